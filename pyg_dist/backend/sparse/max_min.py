"""Largest and smallest values among in-edges, with autograd, on one rank's pattern: no message is ever materialised."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.sparse.csr import CSR


class _Extreme(LocalFunction[Tensor]):
    """The gradient goes to the sources that tie, in equal shares: two passes over the edges, the second transposed.

    What is differentiated again is made edge by edge.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, csr: CSR, reduce: Literal["max", "min"]) -> Tensor:
        ctx.csr = csr
        y = ops.extreme_csr(csr.rowptr, csr.col, x, reduce)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
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

    Shapes:
        - x: ``[csr.num_cols, F]`` (float32, float64, bfloat16 or float16)
        - output: ``[csr.num_rows, F]``, zero for rows without edges
    """
    return _Extreme.apply(x, csr, reduce)
