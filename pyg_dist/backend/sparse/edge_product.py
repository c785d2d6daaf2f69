"""Products with edge weights that learn, on one rank's pattern: linear in the weights and in x."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.ops.call import as_rows
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.timing import phase


class _EdgeProduct(LocalFunction[Tensor]):
    """``y_i = sum_e w_e x_col(e)``, by rows, of one rank's pattern; linear in w and in x."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, x: Tensor, csr: CSR) -> Tensor:
        ctx.csr = csr
        ctx.save_for_backward(weight, x)
        with phase("aggregate"):
            return csr.multiply(as_rows(x), csr.values(weight), tries=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weight, x = ctx.saved_tensors
        by_weight = _EdgeDot.apply(grad, x, ctx.csr, weight.numel()) if ctx.needs_input_grad[0] else None
        by_x = _EdgeProduct.apply(weight, grad, ctx.csr.transposed) if ctx.needs_input_grad[1] else None
        return by_weight, by_x, None


class _EdgeDot(LocalFunction[Tensor]):
    """``d_e = <a_row(e), b_col(e)>`` in edge storage order (zero for edges that the pattern lacks)."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, csr: CSR, num_edges: int) -> Tensor:
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b = ctx.saved_tensors
        by_a = _EdgeProduct.apply(grad, b, ctx.csr)
        by_b = _EdgeProduct.apply(grad, a, ctx.csr.transposed)
        return by_a, by_b, None, None


def edge_product(weight: Tensor, x: Tensor, csr: CSR) -> Tensor:
    """``y_i = sum_e w_e x_col(e)`` on one rank, differentiable by w and by x to any order. No communication.

    Shapes:
        - weight: ``[e]``, by edge storage of the pattern
        - x: ``[m, F]``
        - output: ``[n, F]``
    """
    out: Tensor = _EdgeProduct.apply(weight, x, csr)
    return out
