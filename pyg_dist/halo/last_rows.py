"""Adds received rows to the last rows of the local product, without another tensor of all rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyg_dist.backend.local_function import LocalFunction


class _AddToLastRows(LocalFunction):
    """In place; the gradient is that of the sum, and its last rows."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, addend: Tensor) -> Tensor:
        ctx.mark_dirty(out)
        ctx.num_inner = out.shape[0] - addend.shape[0]
        out[ctx.num_inner :].add_(addend)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad[ctx.num_inner :]


def add_to_last_rows(out: Tensor, addend: Tensor) -> Tensor:
    """``out`` with ``addend`` added to its last rows, in place; differentiable to any order, not collective.

    To be called only if nothing else refers to ``out`` and no derivative needs it.

    Shapes: ``[n, F], [k, F] -> [n, F]``.
    """
    return _AddToLastRows.apply(out, addend)  # type: ignore[no-any-return]
