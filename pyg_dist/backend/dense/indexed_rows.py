"""Rows of large CPU tensors selected by an index and added up by one: PyG's gather and scatter, with torch's bits.

See :mod:`~pyg_dist.backend.dense.large_tensors`. No function is collective.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.utils import scatter

from pyg_dist.backend import ops
from pyg_dist.backend.dense.large_tensors import is_large
from pyg_dist.backend.local_function import Context, LocalFunction


class _Select(LocalFunction[Tensor]):
    """Rows, and their gradients brought back, added in the order of the index."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = x.shape[0]
        return ops.gather_rows(x, index)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            return grad.new_zeros(ctx.num_rows, grad.shape[1]).index_add(0, index, grad), None
        by_x = ops.empty_rows(grad, ctx.num_rows, grad.shape[1]).zero_()
        return ops.scatter_add_rows(by_x, index, grad.contiguous()), None


def select(x: Tensor, index: Tensor) -> Tensor:
    """``x.index_select(0, index)`` of any shape."""
    columns = x.shape[1:].numel()
    if x.dim() > 1 and columns and _moves_rows(x, max(x.numel(), index.numel() * columns), index):
        rows = _Select.apply(x.as_subclass(Tensor).view(-1, columns), index)
        return rows.view(index.numel(), *x.shape[1:])
    return x.index_select(0, index)


class _SumRows(LocalFunction[Tensor]):
    """Rows added up, in their order, and the gradients of sums at each of these."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, index: Tensor, num_sums: int) -> Tensor:
        ctx.save_for_backward(index)
        sums = ops.empty_rows(rows, num_sums, rows.shape[1]).zero_()
        return ops.scatter_add_rows(sums, index, rows)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # with create_graph, torch differentiates again
            return grad.index_select(0, index), None, None
        return ops.gather_rows(grad.contiguous(), index), None, None


def sum_rows(rows: Tensor, index: Tensor, num_sums: int, mean: bool = False) -> Tensor:
    """The sum, or mean, of the rows with each index, zero where there are none; as PyG's ``scatter``."""
    columns = rows.shape[1:].numel()
    if rows.dim() == 1 or not columns or not _moves_rows(rows, rows.numel(), index):
        out: Tensor = scatter(rows, index, 0, num_sums, "mean" if mean else "sum")
        return out
    sums = _SumRows.apply(rows.as_subclass(Tensor).view(-1, columns), index, num_sums)
    if mean:
        ones = rows.new_ones(index.numel()).detach()
        sums = sums / rows.new_zeros(num_sums).scatter_add_(0, index, ones).clamp_(min=1).view(-1, 1)
    return sums.view(num_sums, *rows.shape[1:])


_FASTER = 16
"""So many times sooner than others, the kernels that move rows are worth their calls: torch adds rows slowly."""


def _moves_rows(x: Tensor, num_elements: int, index: Tensor) -> bool:
    """Whether the kernels that move rows are to move these."""
    if x.dtype.itemsize <= 2:  # torch rounds sums each time
        return False
    return is_large(x, num_elements * _FASTER) and x.is_contiguous() and index.dtype == torch.int64
