"""Overlap of messages and local product: aggregation on the halo layout, a linear operator with both its derivatives.

``y_i = r_i * sum_{(j -> i)} w_ji * c_j * x_j`` with optional row scale r, edge weight w and column scale c. GCN's
normalisation is r = c = degree^-1/2; a mean *divides* by r = in-degree: no edge-sized floats are made for either.

While r, w and c are constants (:class:`LinearOperator`), remote edges may be multiplied on either side of the exchange
(:mod:`pyg_dist.plan.halo.transfer`), and messages travel while local edges are multiplied. Weights that learn take
:func:`aggregate_edges`, which differentiates by x and by w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.codec import EXACT, Codec
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.halo.last_rows import add_to_last_rows
from pyg_dist.backend.halo.transfer import HaloTransfer
from pyg_dist.backend.ops.call import as_rows
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.edge_product import edge_product
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.backend.timing import phase
from pyg_dist.errors import UnsupportedError


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

    The weights' derivatives need the sources' rows themselves: the exchange is post.

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
    arrived = halo_rows(x, transfer)
    return add_to_last_rows(edge_product(weight, x, local), edge_product(weight, arrived, halo))
