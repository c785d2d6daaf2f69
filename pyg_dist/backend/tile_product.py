"""One rank's adjacency tile times a dense tile, with its transpose and its derivative."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.csr import CSR


@dataclass(frozen=True)
class TileOperator:
    """A constant sparse matrix ``diag(r) W diag(c)`` on one rank, and its transpose.

    Attributes:
        csr: the pattern.
        weight: by edge storage of the pattern, or ``None`` for ones.
        row_scale: r, or ``None`` for ones.
        col_scale: c, or ``None`` for ones.
    """

    csr: CSR
    weight: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None

    @cached_property
    def _values(self) -> Tensor | None:
        return None if self.weight is None else self.weight[self.csr.edge]

    @cached_property
    def transposed(self) -> TileOperator:
        """The transposed matrix; a directed graph's backward needs it."""
        return TileOperator(self.csr.transpose(), self.weight, self.col_scale, self.row_scale)

    def multiply(self, x: Tensor, low: int = 0, high: int | None = None) -> Tensor:
        """Rows ``low`` to ``high`` of the product, local, without autograd. Shapes: ``[m, F] -> [high - low, F]``."""
        high = self.csr.num_rows if high is None else high
        if (low, high) == (0, self.csr.num_rows):
            rowptr, col, values, scale = self.csr.rowptr, self.csr.col, self._values, self.row_scale
        else:
            rowptr = self.csr.rowptr[low : high + 1]
            first, last = int(rowptr[0]), int(rowptr[-1])
            rowptr, col = rowptr - first, self.csr.col[first:last]
            values = None if self._values is None else self._values[first:last]
            scale = None if self.row_scale is None else self.row_scale[low:high]
        return ops.spmm_csr(rowptr, col, x, values, row_scale=scale, col_scale=self.col_scale)


class _Multiply(torch.autograd.Function):
    """Multiply by an operator; the backward multiplies by its transpose, and so to any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, operator: TileOperator) -> Tensor:
        ctx.operator = operator
        return operator.multiply(x.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return multiply(grad, ctx.operator.transposed), None


def multiply(x: Tensor, operator: TileOperator) -> Tensor:
    """``operator @ x`` on this rank, differentiable by x (not collective). Shapes: ``[m, F] -> [n, F]``."""
    return _Multiply.apply(x, operator)  # type: ignore[no-untyped-call]
