"""One rank's sparse matrix: products with constant values, with weights that learn, and extremes over in-edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyg_dist.backend import ops
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.local_function import Context, LocalFunction
from pyg_dist.backend.ops.library import as_rows
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.timing import phase


@dataclass(frozen=True)
class Matrix:
    """A pattern with values by ``pattern.edge`` (negative numbers count from the end), or ``None`` for ones."""

    pattern: CSR
    storage: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.pattern.num_rows

    @property
    def num_cols(self) -> int:
        """Number of columns."""
        return self.pattern.num_cols

    @cached_property
    def value(self) -> Tensor | None:
        """Values in the order of the entries, ``[num_entries]``, or ``None`` for ones."""
        return None if self.storage is None else self.pattern.values(self.storage)

    @cached_property
    def transposed(self) -> Matrix:
        """The transpose; matrices of one pattern share the transposed pattern."""
        if self.storage is None:
            return Matrix(self.pattern.transposed_pattern)
        return Matrix(self.pattern.transposed, self.storage)

    def columns(self, low: int, high: int) -> Matrix:
        """The columns from ``low`` to ``high``, exclusive. Kept: a product cuts its matrix alike every time."""
        return self._part(CSR.columns, low, high, self.num_cols)

    def rows(self, low: int, high: int) -> Matrix:
        """The rows from ``low`` to ``high``, exclusive. Kept, as :meth:`columns`."""
        return self._part(CSR.rows, low, high, self.num_rows)

    def _part(self, cut: Callable[[CSR, int, int], CSR], low: int, high: int, size: int) -> Matrix:
        if (low, high) == (0, size):
            return self
        if (cut, low, high) not in self._parts:
            self._parts[cut, low, high] = Matrix(cut(self.pattern, low, high), self.storage)
        return self._parts[cut, low, high]

    @cached_property
    def _parts(self) -> dict[tuple[object, int, int], Matrix]:
        return {}

    def multiply(self, x: Tensor, tries: bool = False, **options: Unpack[ops.SpmmOptions]) -> Tensor:
        """``diag(row_scale) self diag(col_scale) x``; see :meth:`~pyg_dist.backend.sparse.csr.CSR.multiply`."""
        return self.pattern.multiply(x, self.value, tries, **options)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """``self x``: it is a :class:`~pyg_dist.backend.autograd.linear_map.LinearMap`, of one rank."""
        return Pending(lambda: self.multiply(as_rows(x), tries=True))


class _EdgeProduct(LocalFunction[Tensor]):
    """``y_i = sum_e w_e x_col(e)``, by rows, of one rank's pattern; linear in w and in x."""

    @staticmethod
    def forward(ctx: Context, weight: Tensor, x: Tensor, csr: CSR) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(weight, x)
        with phase("aggregate"):
            return csr.multiply(as_rows(x), csr.values(weight), tries=True)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, x = ctx.saved_tensors
        by_weight = _EdgeDot.apply(grad, x, ctx.csr, weight.numel()) if ctx.needs_input_grad[0] else None
        by_x = _EdgeProduct.apply(weight, grad, ctx.csr.transposed) if ctx.needs_input_grad[1] else None
        return by_weight, by_x, None


class _EdgeDot(LocalFunction[Tensor]):
    """``d_e = <a_row(e), b_col(e)>`` in edge storage order (zero for edges that the pattern lacks)."""

    @staticmethod
    def forward(ctx: Context, a: Tensor, b: Tensor, csr: CSR, num_edges: int) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(a, b)
        dots = ops.sddmm_csr(csr.rowptr, csr.col, a, b)
        if csr.place is None and num_edges == dots.numel():
            return dots
        whole = dots.new_zeros(num_edges)
        if csr.place is None:
            whole[csr.first : csr.first + dots.numel()] = dots
            return whole
        return whole.index_copy_(0, csr.edge.long(), dots)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors
        by_a = _EdgeProduct.apply(grad, b, ctx.csr)
        by_b = _EdgeProduct.apply(grad, a, ctx.csr.transposed)
        return by_a, by_b, None, None


def edge_product(weight: Tensor, x: Tensor, csr: CSR) -> Tensor:
    """``y_i = sum_e w_e x_col(e)`` on one rank, differentiable by w and by x to any order. No communication.

    Shapes: weight ``[e]``, by edge storage of the pattern; x ``[m, F]``; output ``[n, F]``.
    """
    out: Tensor = _EdgeProduct.apply(weight, x, csr)
    return out


class _Extreme(LocalFunction[Tensor]):
    """The gradient goes to the sources that tie, in equal shares: two passes over the edges, the second transposed.

    What is differentiated again is made edge by edge.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, csr: CSR, reduce: Literal["max", "min"]) -> Tensor:
        ctx.csr = csr
        y = ops.extreme_csr(csr.rowptr, csr.col, x, reduce)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        x, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            return _by_edge(x.detach(), y.detach(), grad, ctx.csr), None, None
        shares = ops.extreme_csr_shares(ctx.csr.rowptr, ctx.csr.col, x, y, grad)
        transposed = ctx.csr.transposed_pattern
        return ops.extreme_csr_grad(transposed.rowptr, transposed.col, x, y, shares), None, None


def _by_edge(x: Tensor, y: Tensor, grad: Tensor, csr: CSR) -> Tensor:
    """The backward pass in torch's functions, with a value for each edge and column: linear in ``grad``."""
    row, col = csr.row(), csr.col.long()
    wins = (x[col] == y[row]).to(torch.float32 if grad.dtype.itemsize == 2 else grad.dtype)
    number = (y == 0).to(wins.dtype).index_add_(0, row, wins)
    shares = wins * (grad / number)[row]
    return shares.new_zeros(x.shape).index_add(0, col, shares).to(x.dtype)


def extreme(x: Tensor, csr: CSR, reduce: Literal["max", "min"]) -> Tensor:
    """Largest or smallest in-neighbour of every row, column by column; exact, differentiable, not collective.

    Equal to PyG's ``MaxAggregation`` and ``MinAggregation`` on CPU, gradients at ties included
    (:func:`~pyg_dist.backend.ops.extreme_csr_shares`).

    Shapes: x ``[csr.num_cols, F]`` (float32, float64, bfloat16 or float16); output ``[csr.num_rows, F]``, zero for rows
    without edges.
    """
    return _Extreme.apply(x, csr, reduce)
