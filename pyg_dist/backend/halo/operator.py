"""Aggregation over the halo layout, with autograd: a linear operator, its transpose, and its two derivatives.

``y_i = r_i * sum_{(j -> i)} w_ji * c_j * x_j`` with optional row scale r, edge weight w and column scale c. GCN's
normalisation is r = c = degree^-1/2; a mean *divides* by r = in-degree: no edge-sized floats are made for either.

While r, w and c are constants (:class:`LinearOperator`), remote edges may be multiplied on either side of the exchange
(:mod:`pyg_dist.plan.halo.transfer`), and messages fly while local edges are multiplied. Weights that learn take
:func:`aggregate_edges`, which differentiates by x and by w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.codec import EXACT, Codec
from pyg_dist.backend.halo.transfer import HaloTransfer
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.sparse.csr import CSR
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

    def multiply(self, x: Tensor) -> Tensor:
        """The product (collective, no autograd). Shapes: ``[n, F] -> [n, F]``."""
        pending = self.halo.start(x, self.col_scale, self.divides)
        with phase("aggregate"):
            out = self.local.multiply(x, self.row_scale, self.col_scale, self.divides)
        return self.halo.finish(pending, out, self.row_scale, self.divides)


class _Multiply(LocalFunction):
    """Multiply by an operator or by its transpose: each is the other's backward, to any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: LinearOperator, transposed: bool) -> Tensor:
        ctx.operator, ctx.transposed = operator, transposed
        if transposed or ctx.needs_input_grad[0]:
            turned = operator.transposed  # sorted now, not in the backward pass on top of all activations
        return (turned if transposed else operator).multiply(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Multiply.apply(grad, ctx.operator, not ctx.transposed), None, None  # type: ignore[no-untyped-call]


class _HaloRows(LocalFunction):
    """Bring the halo, or add halo rows to their owners': each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, post: HaloTransfer, transposed: bool) -> Tensor:
        ctx.post, ctx.transposed = post, transposed
        rows = rows.contiguous()
        if post.codecs[transposed] is not EXACT:
            halo = HaloTransfer(post.outgoing, post.exchange, post.exchange.slots, post.codecs)
            halo = halo.transposed if transposed else halo
            num_rows = post.outgoing.num_cols if transposed else post.exchange.num_received
            return halo.finish(halo.start(rows), rows.new_zeros(num_rows, rows.shape[1]))
        if not transposed:
            with phase("pack"):
                sent = post.outgoing.multiply(rows)
            return post.exchange.start(sent).wait()
        received = post.exchange.transposed.start(rows).wait()
        with phase("unpack"):
            return post.outgoing.transposed.multiply(received)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _HaloRows.apply(grad, ctx.post, not ctx.transposed), None, None  # type: ignore[no-untyped-call]


class _EdgeProduct(LocalFunction):
    """``y_i = sum_e w_e x_col(e)``, by rows, of one rank's pattern; linear in w and in x."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, csr: CSR) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(weight, x)
        with phase("aggregate"):
            return ops.spmm_csr(csr.rowptr, csr.col, x.contiguous(), weight[csr.edge])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, x = ctx.saved_tensors
        by_weight = _EdgeDot.apply(grad, x, ctx.csr, weight.numel()) if ctx.needs_input_grad[0] else None  # type: ignore[no-untyped-call]
        by_x = _EdgeProduct.apply(weight, grad, ctx.csr.transposed) if ctx.needs_input_grad[1] else None  # type: ignore[no-untyped-call]
        return by_weight, by_x, None


class _EdgeDot(LocalFunction):
    """``d_e = <a_row(e), b_col(e)>`` in edge storage order (zero for edges that the pattern lacks)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, csr: CSR, num_edges: int) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(a, b)
        dots = ops.sddmm_csr(csr.rowptr, csr.col, a.contiguous(), b.contiguous())
        return dots.new_zeros(num_edges).index_copy_(0, csr.edge, dots)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors
        by_a = _EdgeProduct.apply(grad, b, ctx.csr)  # type: ignore[no-untyped-call]
        by_b = _EdgeProduct.apply(grad, a, ctx.csr.transposed)  # type: ignore[no-untyped-call]
        return by_a, by_b, None, None


def edge_product(weight: Tensor, x: Tensor, csr: CSR) -> Tensor:
    """``y_i = sum_e w_e x_col(e)`` on one rank, differentiable by w and by x to any order; talks to nobody.

    Shapes:
        - weight: ``[e]``, by edge storage of the pattern
        - x: ``[m, F]``
        - output: ``[n, F]``
    """
    out: Tensor = _EdgeProduct.apply(weight, x, csr)  # type: ignore[no-untyped-call]
    return out


def _require_dtype(x: Tensor) -> None:
    # Before any message leaves: an error between start and land would leave the others' messages without receiver.
    if x.dtype not in ops.FLOATS or x.dim() != 2:
        raise UnsupportedError(
            f"Expected features [N, F] in float32, float64 or bfloat16 (got {x.dim()} dimensions, {x.dtype}): "
            f"cast and reshape them, x.float().flatten(1)"
        )


def aggregate(x: Tensor, operator: LinearOperator) -> Tensor:
    """Multiply local rows by a constant distributed matrix; exact, differentiable by x, collective both ways.

    Shapes:
        - x: ``[n, F]`` (float32, float64 or bfloat16)
        - output: ``[n, F]``
    """
    _require_dtype(x)
    return _Multiply.apply(x, operator, False)  # type: ignore[no-any-return, no-untyped-call]


def halo_rows(x: Tensor, post: HaloTransfer) -> Tensor:
    """The halo of x by a post exchange, differentiable; collective both ways. Shapes: ``[n, F] -> [h, F]``."""
    _require_dtype(x)
    return _HaloRows.apply(x, post, False)  # type: ignore[no-any-return, no-untyped-call]


def halo_sums(rows: Tensor, post: HaloTransfer) -> Tensor:
    """Send halo rows home, where they are summed: the transpose of :func:`halo_rows`. Shapes: ``[h, F] -> [n, F]``."""
    _require_dtype(rows)
    return _HaloRows.apply(rows, post, True)  # type: ignore[no-any-return, no-untyped-call]


def aggregate_edges(x: Tensor, weight: Tensor, local: CSR, post: HaloTransfer) -> Tensor:
    """Weighted sum over in-edges, differentiable by x and by the weights; collective both ways.

    The weights' derivatives need the sources' rows themselves: the exchange is post.

    Shapes:
        - x: ``[n, F]``
        - weight: ``[e]``, this rank's edge storage
        - output: ``[n, F]``
    """
    halo = post.incoming.pattern
    arrived = halo_rows(x, post)
    inner_and_boundary = edge_product(weight, x, local)
    boundary = edge_product(weight, arrived, halo)
    inner, rest = torch.split(inner_and_boundary, [local.num_rows - halo.num_rows, halo.num_rows])
    return torch.cat([inner, rest + boundary])
