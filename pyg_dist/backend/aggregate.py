"""Aggregation over the halo layout, with autograd: a linear operator, its transpose, and its two derivatives.

``y_i = r_i * sum_{(j -> i)} w_ji * c_j * x_j`` with optional row scale r, edge weight w and column scale c. A mean is
r = 1 / in-degree; GCN's normalisation is r = c = degree^-1/2: no edge-sized floats are made for either.

While r, w and c are constants (:class:`LinearOperator`), messages fly while local edges are multiplied. Weights that
learn take :func:`aggregate_edges`, which differentiates by x and by w.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.csr import CSR
from pyg_dist.backend.exchange import HaloExchange
from pyg_dist.errors import UnsupportedError


@dataclass(frozen=True)
class LinearOperator:
    """A constant distributed sparse matrix ``diag(r) W diag(c)`` and its transpose.

    Attributes:
        local: ``[n, n]`` pattern of the edges with a local source.
        halo: ``[n - num_inner, h]`` pattern of the others: rows are the boundary nodes, columns slots.
        exchange: brings the halo.
        weight: ``[e]`` in edge storage order, or ``None`` for ones.
        row_scale: r, ``[n]``, or ``None`` for ones.
        col_scale: c of the local sources, ``[n]``, or ``None`` for ones.
        halo_scale: c of the halo, ``[h]``; given exactly when ``col_scale`` is.
    """

    local: CSR
    halo: CSR
    exchange: HaloExchange
    weight: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    halo_scale: Tensor | None = None

    @property
    def num_inner(self) -> int:
        """Rows that need no halo, the first ones."""
        return self.local.num_rows - self.halo.num_rows

    @cached_property
    def _weights(self) -> tuple[Tensor | None, Tensor | None]:
        return self._weights_of(self.local), self._weights_of(self.halo)

    @cached_property
    def _transposed(self) -> tuple[CSR, CSR, Tensor | None, Tensor | None]:
        local, halo = self.local.transposed, self.halo.transposed
        return local, halo, self._weights_of(local), self._weights_of(halo)

    def _weights_of(self, csr: CSR) -> Tensor | None:
        return None if self.weight is None else self.weight[csr.edge]

    @cached_property
    def _boundary_scale(self) -> Tensor | None:
        return None if self.row_scale is None else self.row_scale[self.num_inner :]

    def multiply(self, x: Tensor) -> Tensor:
        """The aggregation itself (collective, no autograd). Shapes: ``[n, F] -> [n, F]``."""
        flight = self.exchange.start(x)
        weight, halo_weight = self._weights
        out = ops.spmm_csr(
            self.local.rowptr, self.local.col, x, weight, row_scale=self.row_scale, col_scale=self.col_scale
        )
        ops.spmm_csr(
            self.halo.rowptr,
            self.halo.col,
            flight.land(),
            halo_weight,
            row_scale=self._boundary_scale,
            col_scale=self.halo_scale,
            out=out[self.num_inner :],
        )
        return out

    def multiply_transposed(self, g: Tensor) -> Tensor:
        """The transpose (collective, no autograd). Shapes: ``[n, F] -> [n, F]``."""
        local, halo, weight, halo_weight = self._transposed
        to_owners = ops.spmm_csr(
            halo.rowptr,
            halo.col,
            g[self.num_inner :],
            halo_weight,
            row_scale=self.halo_scale,
            col_scale=self._boundary_scale,
        )
        flight = self.exchange.start_transposed(to_owners)
        out = ops.spmm_csr(local.rowptr, local.col, g, weight, row_scale=self.col_scale, col_scale=self.row_scale)
        return ops.scatter_add_rows(out, self.exchange.send_index, flight.land())


class _Multiply(torch.autograd.Function):
    """Multiply by an operator or by its transpose: each is the other's backward, to any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: LinearOperator, transposed: bool) -> Tensor:
        ctx.operator, ctx.transposed = operator, transposed
        x = x.contiguous()
        return operator.multiply_transposed(x) if transposed else operator.multiply(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Multiply.apply(grad, ctx.operator, not ctx.transposed), None, None  # type: ignore[no-untyped-call]


class _HaloRows(torch.autograd.Function):
    """Bring the halo, or add halo rows to their owners': each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: HaloExchange, num_local: int, transposed: bool) -> Tensor:
        ctx.exchange, ctx.num_local, ctx.transposed = exchange, num_local, transposed
        rows = rows.contiguous()
        if not transposed:
            return exchange.start(rows).land()
        arrived = exchange.start_transposed(rows).land()
        out = rows.new_zeros((num_local, *rows.shape[1:]))
        return ops.scatter_add_rows(out, exchange.send_index, arrived)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        rows = _HaloRows.apply(grad, ctx.exchange, ctx.num_local, not ctx.transposed)  # type: ignore[no-untyped-call]
        return rows, None, None, None


class _EdgeProduct(torch.autograd.Function):
    """``y_i = sum_e w_e x_col(e)``, by rows, of one rank's pattern; linear in w and in x."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, csr: CSR) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(weight, x)
        return ops.spmm_csr(csr.rowptr, csr.col, x.contiguous(), weight[csr.edge])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, x = ctx.saved_tensors
        by_weight = _EdgeDot.apply(grad, x, ctx.csr, weight.numel()) if ctx.needs_input_grad[0] else None  # type: ignore[no-untyped-call]
        by_x = _EdgeProduct.apply(weight, grad, ctx.csr.transposed) if ctx.needs_input_grad[1] else None  # type: ignore[no-untyped-call]
        return by_weight, by_x, None


class _EdgeDot(torch.autograd.Function):
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


_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def _require_dtype(x: Tensor) -> None:
    # Before any message leaves: an error between start and land would leave the others' messages without receiver.
    if x.dtype not in _DTYPES or x.dim() != 2:
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


def halo_rows(x: Tensor, exchange: HaloExchange) -> Tensor:
    """The halo of x, differentiable; collective both ways. Shapes: ``[n, F] -> [h, F]``."""
    _require_dtype(x)
    return _HaloRows.apply(x, exchange, x.shape[0], False)  # type: ignore[no-any-return, no-untyped-call]


def aggregate_edges(x: Tensor, weight: Tensor, local: CSR, halo: CSR, exchange: HaloExchange) -> Tensor:
    """Weighted sum over in-edges, differentiable by x and by the weights; collective both ways.

    Shapes:
        - x: ``[n, F]``
        - weight: ``[e]``, this rank's edge storage
        - output: ``[n, F]``
    """
    arrived = halo_rows(x, exchange)
    inner_and_boundary = _EdgeProduct.apply(weight, x, local)  # type: ignore[no-untyped-call]
    boundary = _EdgeProduct.apply(weight, arrived, halo)  # type: ignore[no-untyped-call]
    inner, rest = inner_and_boundary.split([local.num_rows - halo.num_rows, halo.num_rows])
    return torch.cat([inner, rest + boundary])
