"""Overlap of messages with products: distributed sparse matrices over a halo graph's edges. Messages travel while
local edges are multiplied.

``y_i = r_i * sum_{(j -> i)} w_ji * c_j * x_j`` with optional row scale r, edge weight w and column scale c, for a
rank's n targets and m sources, which are one set of nodes in a square graph. GCN's
normalisation is r = c = degree^-1/2; a mean *divides* by r = in-degree: no edge-sized floats are made for either.

Remote edges may be multiplied on either side of the exchange (:mod:`pyg_dist.halo.plan.transfer`). If r, w and c are
constant, that is a :class:`LinearOperator`. Weights that learn make a :class:`LearningOperator`, whose products send
rows of sources, or rows and partial sums, and are differentiable by x and by w to any order. With partial sums, with L
for the exchange of weights, P for that of rows, and C made of the weights of remote ranks::

    forward          remote = L w     sent = C x           out = local(w) x + incoming(w) P sent
    backward by x    d_sent = P^T incoming(w)^T d_out      d_x = local(w)^T d_out + C^T d_sent
    backward by w    d_remote[e] = <d_sent[sum of e], x[source of e]>, which are sent back: L^T d_remote
                     the others' as of any product, <d_out[target], row of the source>
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.autograd.linear_map import LinearMap, append, apply
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.local_function import Context, LocalFunction
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.ops.library import as_rows
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix, edge_product
from pyg_dist.backend.timing import overlaps, phase
from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.gcn_norm import LearnedScales
from pyg_dist.graph.protocol import Norm
from pyg_dist.halo.exchange import Exchange
from pyg_dist.halo.transfer import Codecs, HaloTransfer


@dataclass(eq=False, frozen=True)
class LinearOperator:
    """A constant matrix ``diag(r) (local + halo) diag(c)``."""

    local: Matrix  # ``[n, m]``, the edges with a local source
    halo: HaloTransfer  # the others
    row_scale: Tensor | None = None  # r, ``[n]``, or ``None`` for ones
    col_scale: Tensor | None = None  # c, ``[m]``, or ``None`` for ones
    # whether r and c stand for their inverses: dividing rounds once where a factor 1 / r rounds twice, and on one rank
    # it gives PyG's means bit for bit
    divides: bool = False
    learns: ClassVar[bool] = False

    @cached_property
    def transposed(self) -> LinearOperator:
        return LinearOperator(self.local.transposed, self.halo.transposed, self.col_scale, self.row_scale, self.divides)

    def coded(self, codecs: Codecs) -> LinearOperator:
        """The same matrix, whose messages are coded in this way."""
        halo = self.halo if self.halo.is_empty else self.halo.coded(codecs)
        return self if halo is self.halo else replace(self, halo=halo)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Begin the product (collective, no autograd). Shapes: ``[m, F] -> [n, F]``."""
        x, halo = as_rows(x), self.halo
        scales: ops.SpmmOptions = {"row_scale": self.row_scale, "col_scale": self.col_scale, "divide": self.divides}
        if halo.is_empty:
            with phase("aggregate"):
                out = self.local.multiply(x, tries=True, **scales)
            return Pending(lambda: out)
        self.local.pattern.choose_form(x)
        messages = halo.send(x, self.col_scale, self.divides)
        with phase("aggregate"):
            out = self.local.multiply(x, **scales)
        return Pending(lambda: halo.add(messages, out, self.row_scale, self.divides))


def aggregate(x: Tensor, by: LinearMap) -> Tensor:
    """Multiply local rows by a constant distributed matrix; exact, differentiable by x, collective both ways.

    Shapes: x ``[m, F]`` (float32, float64, bfloat16 or float16); output ``[n, F]``, or as many rows as there are slots.
    """
    require_dtype(x)
    return apply(by, x)


def require_dtype(x: Tensor) -> None:
    """Refuse what products do not take."""
    # Before any message leaves: an error later would leave the others' messages without receiver.
    if x.dim() != 2 or x.dtype not in ops.FLOATS:
        raise UnsupportedError(
            f"Expected features [N, F] in float32, float64, bfloat16 or float16 (got {x.dim()} dimensions, {x.dtype}): "
            f"cast and reshape them, x.float().flatten(1)"
        )


@dataclass(frozen=True)
class RemoteSums:
    """One rank's exchange where sums with weights that learn are made at their sources, too."""

    # of the weights that other ranks multiply by, in edge storage, integers ``[l]``, grouped by these ranks
    places: Tensor
    weights: Exchange  # moves l weights away and brings k
    outgoing: CSR  # ``[s, m]``, makes what is sent. Values: the k weights, and a one behind them for rows as they are.
    way: HaloTransfer  # moves s rows away and brings h
    incoming: CSR  # ``[b, h]``, adds what arrives to the boundary rows. Values: edge storage, and a one behind it.

    def remote_weights(self, weight: Tensor) -> Tensor:
        """The weights of other ranks that this one multiplies by, and a one; differentiable, collective both ways.

        Shapes: ``[e] -> [k + 1]``.
        """
        return _and_one(apply(self.weights, weight.index_select(0, on_device(self.places, weight.device))))


def _and_one(values: Tensor) -> Tensor:
    return append([values, values.new_ones(1)])


@dataclass(eq=False, frozen=True)
class LearningOperator:
    """A matrix whose weights require a gradient."""

    norm: Norm  # how it scales
    weight: Tensor  # by edge storage, ``[e]``
    local: CSR  # local nodes by local sources
    halo: CSR  # boundary nodes by halo slots
    sums: Callable[[], RemoteSums]  # what sends partial sums as well as rows
    # weights of the loops that the norm adds, ``[e] -> [n]``; ``None``: it adds none
    loops: Callable[[Tensor], Tensor] | None = None
    scales: LearnedScales = field(default_factory=LearnedScales)  # of GCN's norm
    _remote_weights: dict[tuple[torch.dtype, bool], Tensor] = field(default_factory=dict)
    learns: ClassVar[bool] = True

    def by_rows(self, x: Tensor, post: HaloTransfer) -> Tensor:
        """Weighted sums, loops included; rows of sources are sent (collective). Shapes: ``[m, F] -> [n, F]``."""
        require_dtype(x)
        weight = self.weight.to(x.dtype)
        return self._product(x, weight, post.to_slots, x, weight, self.halo)

    def by_sums(self, x: Tensor, codecs: Codecs) -> Tensor:
        """The same; partial sums are sent, too. One exchange of weights serves all products (collective)."""
        require_dtype(x)
        weight, sums, key = self.weight.to(x.dtype), self.sums(), (x.dtype, torch.is_grad_enabled())
        if key not in self._remote_weights:
            self._remote_weights[key] = sums.remote_weights(weight)
        sent = edge_product(self._remote_weights[key], x, sums.outgoing)
        return self._product(x, weight, sums.way.coded(codecs), sent, _and_one(weight), sums.incoming)

    def _product(
        self, x: Tensor, weight: Tensor, way: LinearMap, sent: Tensor, incoming_weight: Tensor, incoming: CSR
    ) -> Tensor:
        """``local(weight) x``, loops, and ``incoming(incoming_weight)`` times ``way sent``, sent meanwhile."""
        pending = None
        if overlaps():
            if incoming.num_cols:
                self.local.choose_form(as_rows(x.detach()))
            pending = way.start(sent.detach())
        out = edge_product(weight, x, self.local)
        arrived = edge_product(incoming_weight, apply(way, sent, pending), incoming)
        return self._with_loops(add_to_last_rows(out, arrived), weight, x)

    def degree(self, dtype: torch.dtype) -> Tensor:
        """The sum of the weights of each node's in-edges and loop; not collective. Shapes: ``[n, 1]``."""
        weight = self.weight.to(dtype)
        local, halo = (edge_product(weight, weight.new_ones(csr.num_cols, 1), csr) for csr in (self.local, self.halo))
        out = add_to_last_rows(local, halo)
        return self._with_loops(out, weight, out.new_ones(out.shape))

    def _with_loops(self, out: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return out if self.loops is None else out + self.loops(weight).view(-1, 1) * x


HaloOperator = LinearOperator | LearningOperator


def in_degree(local: CSR, halo: CSR, dtype: torch.dtype) -> Tensor:
    """Number of in-edges of the local nodes, ``[n]``, of which the last have edges from remote sources, too."""
    degree = local.rowptr.diff()
    degree[local.num_rows - halo.num_rows :] += halo.rowptr.diff()
    return degree.to(dtype)


class _AddToLastRows(LocalFunction[Tensor]):
    """In place; the gradient is that of the sum, and its last rows."""

    @staticmethod
    def forward(ctx: Context, out: Tensor, addend: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        ctx.num_inner = out.shape[0] - addend.shape[0]
        out[ctx.num_inner :].add_(addend)
        return out

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad[ctx.num_inner :]


def add_to_last_rows(out: Tensor, addend: Tensor) -> Tensor:
    """``out`` with ``addend`` added to its last rows, in place; differentiable to any order, not collective.

    To be called only if nothing else refers to ``out`` and no derivative needs it.

    Shapes: ``[n, F], [k, F] -> [n, F]``.
    """
    return _AddToLastRows.apply(out, addend)
