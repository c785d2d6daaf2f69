"""Overlap of messages and local product: aggregation on the halo layout, a linear operator with both its derivatives.

``y_i = r_i * sum_{(j -> i)} w_ji * c_j * x_j`` with optional row scale r, edge weight w and column scale c. GCN's
normalisation is r = c = degree^-1/2; a mean *divides* by r = in-degree: no edge-sized floats are made for either.

Remote edges may be multiplied on either side of the exchange (:mod:`pyg_dist.halo.plan.transfer`), and messages travel
while local edges are multiplied. If r, w and c are constant, that is a :class:`LinearOperator`. Weights that learn
take :func:`aggregate_edges`, by rows of sources, or :func:`aggregate_lent`, by rows and partial sums. Both
differentiate by x and by w, to any order. The latter, with L for the exchange of weights, P for that of rows, and C
made of the lent weights::

    forward          lent = L w       sent = C x           out = local(w) x + incoming(w) P sent
    backward by x    d_sent = P^T incoming(w)^T d_out      d_x = local(w)^T d_out + C^T d_sent
    backward by w    d_lent[e] = <d_sent[sum of e], x[source of e]>, which go home: L^T d_lent
                     the others' as of any product, <d_out[target], row of the source>
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.autograd.linear_map import LinearMap, append, apply
from pyg_dist.backend.comm.codec import EXACT, Codec
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.ops.library import as_rows
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix, edge_product
from pyg_dist.backend.timing import overlaps, phase
from pyg_dist.errors import UnsupportedError
from pyg_dist.halo.exchange import Exchange
from pyg_dist.halo.last_rows import add_to_last_rows
from pyg_dist.halo.transfer import HaloTransfer


@dataclass(frozen=True)
class LinearOperator:
    """A constant distributed sparse matrix ``diag(r) (local + halo) diag(c)``.

    Attributes:
        local: ``[n, n]``, the edges with a local source.
        halo: the others.
        row_scale: r, ``[n]``, or ``None`` for ones.
        col_scale: c, ``[n]``, or ``None`` for ones.
        divides: whether r and c stand for their inverses: dividing rounds once where a factor 1 / r rounds twice, and
            on one rank it gives PyG's means bit for bit.
    """

    local: Matrix
    halo: HaloTransfer
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    divides: bool = False

    @cached_property
    def transposed(self) -> LinearOperator:
        """The transposed matrix, whose traffic is the same backwards."""
        return LinearOperator(self.local.transposed, self.halo.transposed, self.col_scale, self.row_scale, self.divides)

    def coded(self, codecs: tuple[Codec, Codec]) -> LinearOperator:
        """The same matrix, whose messages are coded in this way, and in that way on the way back."""
        halo = self.halo.coded(codecs)
        return self if halo is self.halo else replace(self, halo=halo)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Begin the product (collective, no autograd). Shapes: ``[n, F] -> [n, F]``."""
        x, talks = as_rows(x), self.halo.exchange.transport.group.size > 1
        if talks:
            self.local.pattern.choose_form(x)
        messages = self.halo.start(x, self.col_scale, self.divides)
        with phase("aggregate"):
            out = self.local.multiply(x, self.row_scale, self.col_scale, self.divides, tries=not talks)
        return Pending(lambda: self.halo.finish(messages, out, self.row_scale, self.divides))


@dataclass(frozen=True)
class HaloRows:
    """The halo of x by a post exchange. Shapes: ``[n, F] -> [h, F]``."""

    transfer: HaloTransfer

    @property
    def transposed(self) -> HaloSums:
        """Halo rows go home."""
        return HaloSums(self.transfer)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Send local rows (collective, no autograd)."""
        x, transfer = x.contiguous(), self.transfer
        if transfer.codecs[0] is EXACT:
            with phase("pack"):
                sent = transfer.outgoing.multiply(x)
            return transfer.exchange.start(sent)
        return _added(_to_slots(transfer), x, transfer.exchange.num_received)


@dataclass(frozen=True)
class HaloSums:
    """Halo rows, sent home and added up there: the transpose of :class:`HaloRows`. Shapes: ``[h, F] -> [n, F]``."""

    transfer: HaloTransfer

    @property
    def transposed(self) -> HaloRows:
        """The halo."""
        return HaloRows(self.transfer)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Send halo rows (collective, no autograd)."""
        x, transfer = x.contiguous(), self.transfer
        if transfer.codecs[1] is not EXACT:
            return _added(_to_slots(transfer).transposed, x, transfer.outgoing.num_cols)
        messages = transfer.exchange.transposed.start(x)

        def finish() -> Tensor:
            received = messages.wait()
            with phase("unpack"):
                return transfer.outgoing.transposed.multiply(received)

        return Pending(finish)


@dataclass(frozen=True)
class Moved:
    """Rows that go to other ranks as they are: an exchange alone. Shapes: ``[s, ...] -> [h, ...]``.

    Attributes:
        exchange: it.
        codecs: how rows ``[s, F]`` travel, and how on the way back.
    """

    exchange: Exchange
    codecs: tuple[Codec, Codec] = (EXACT, EXACT)

    @property
    def transposed(self) -> Moved:
        """The way back."""
        return Moved(self.exchange.transposed, self.codecs[::-1])

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Send rows (collective, no autograd)."""
        x, exchange = x.contiguous(), self.exchange
        if self.codecs[0] is EXACT:
            return exchange.start(x)
        own, theirs = exchange.transposed.slots(x.device), exchange.slots(x.device)
        return _added(HaloTransfer(own, exchange, theirs, self.codecs), x, exchange.num_received)


@dataclass(frozen=True)
class LentSums:
    """Sums with weights that learn, some of which are made where their edges begin: the lists of one rank.

    Attributes:
        places: of the weights that other ranks multiply by, in edge storage, integers ``[l]``, grouped by these ranks.
        lending: moves l weights away and brings k.
        outgoing: ``[s, n]``, makes what is sent. Values: the k weights, and a one behind them for rows as they are.
        exchange: moves s rows away and brings h.
        incoming: ``[b, h]``, adds what arrives to the boundary rows. Values: edge storage, and a one behind it.
    """

    places: Tensor
    lending: Exchange
    outgoing: CSR
    exchange: Exchange
    incoming: CSR

    def lent(self, weight: Tensor) -> Tensor:
        """The weights that others lend this rank, and a one; differentiable, collective both ways.

        Shapes: ``[e] -> [k + 1]``.
        """
        return _and_one(apply(Moved(self.lending), weight.index_select(0, on_device(self.places, weight.device))))


def _and_one(values: Tensor) -> Tensor:
    return append([values, values.new_ones(1)])


def _to_slots(transfer: HaloTransfer) -> HaloTransfer:
    """The same messages, each row of which becomes one of the result."""
    return HaloTransfer(
        transfer.outgoing, transfer.exchange, transfer.exchange.slots(transfer.outgoing.pattern.device), transfer.codecs
    )


def _added(halo: HaloTransfer, x: Tensor, num_rows: int) -> Pending[Tensor]:
    messages = halo.start(x)
    return Pending(lambda: halo.finish(messages, x.new_zeros(num_rows, x.shape[1])))


def _require_dtype(x: Tensor) -> None:
    # Before any message leaves: an error between start and land would leave the others' messages without receiver.
    if x.dim() != 2 or x.dtype not in ops.FLOATS:
        raise UnsupportedError(
            f"Expected features [N, F] in float32, float64, bfloat16 or float16 (got {x.dim()} dimensions, {x.dtype}): "
            f"cast and reshape them, x.float().flatten(1)"
        )


def aggregate(x: Tensor, operator: LinearOperator) -> Tensor:
    """Multiply local rows by a constant distributed matrix; exact, differentiable by x, collective both ways.

    Shapes:
        - x: ``[n, F]`` (float32, float64, bfloat16 or float16)
        - output: ``[n, F]``
    """
    _require_dtype(x)
    return apply(operator, x)


def halo_rows(x: Tensor, transfer: HaloTransfer) -> Tensor:
    """The halo of x by a post exchange, differentiable; collective both ways. Shapes: ``[n, F] -> [h, F]``."""
    _require_dtype(x)
    return apply(HaloRows(transfer), x)


def halo_sums(rows: Tensor, transfer: HaloTransfer) -> Tensor:
    """Send halo rows home, where they are summed: the transpose of :func:`halo_rows`. Shapes: ``[h, F] -> [n, F]``."""
    _require_dtype(rows)
    return apply(HaloSums(transfer), rows)


def aggregate_edges(x: Tensor, weight: Tensor, local: CSR, halo: CSR, transfer: HaloTransfer) -> Tensor:
    """Weighted sum over in-edges, differentiable by x and by the weights; collective both ways.

    Remote edges are summed at their targets: the rows of the sources are sent.

    Args:
        x: the rank's rows.
        weight: of its edges.
        local: targets by local sources.
        halo: boundary nodes by halo slots.
        transfer: the exchange.

    Shapes:
        - x: ``[n, F]``
        - weight: ``[e]``, this rank's edge storage
        - output: ``[n, F]``
    """
    _require_dtype(x)
    return _with_halo(x, weight, local, HaloRows(transfer), x, weight, halo)


def aggregate_lent(
    x: Tensor, weight: Tensor, lent: Tensor, local: CSR, sums: LentSums, codecs: tuple[Codec, Codec]
) -> Tensor:
    """:func:`aggregate_edges` by rows and partial sums.

    Args:
        x: the rank's rows.
        weight: of its edges.
        lent: ``sums.lent(weight)``, which serves several products.
        local: targets by local sources.
        sums: the exchange.
        codecs: how rows and sums travel, and how on the way back.

    Shapes:
        - x: ``[n, F]``
        - weight: ``[e]``, this rank's edge storage
        - output: ``[n, F]``
    """
    _require_dtype(x)
    sent = edge_product(lent, x, sums.outgoing)
    return _with_halo(x, weight, local, Moved(sums.exchange, codecs), sent, _and_one(weight), sums.incoming)


def _with_halo(
    x: Tensor, weight: Tensor, local: CSR, way: LinearMap, sent: Tensor, incoming_weight: Tensor, incoming: CSR
) -> Tensor:
    """``local(weight) x``, and ``incoming(incoming_weight)`` times ``way sent``, which flies meanwhile (collective)."""
    pending = None
    if overlaps():
        if incoming.num_cols:
            local.choose_form(as_rows(x.detach()))
        pending = way.start(sent.detach())
    out = edge_product(weight, x, local)
    return add_to_last_rows(out, edge_product(incoming_weight, apply(way, sent, pending), incoming))


def weight_sums(weight: Tensor, local: CSR, halo: CSR) -> Tensor:
    """The sum of the weights of each node's in-edges, differentiable to any order; talks to nobody.

    Shapes: ``[e] -> [n, 1]``.
    """
    by_local, by_halo = (edge_product(weight, weight.new_ones(csr.num_cols, 1), csr) for csr in (local, halo))
    return add_to_last_rows(by_local, by_halo)
