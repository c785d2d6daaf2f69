"""Norm, ReLU and dropout as one function of rows, with autograd: the backward pass keeps one tensor of rows."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.ops import Norm


class _RowEpilogue(LocalFunction):
    """One pass forward, one back; two floats a row are kept beside x.

    Without a norm y takes x's place: what follows keeps it anyway, and its zeros are all that the gradient asks for.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        key: Tensor | None,
        norm: Norm | None,
        eps: float,
        relu: bool,
        p: float,
        seed: int,
        column_offset: int,
    ) -> Tensor:
        w, b = (None if factor is None else factor.to(ops.sum_dtype(x)) for factor in (weight, bias))
        y, mean, rstd = ops.row_epilogue(x, w, b, key, norm, eps, relu, p, seed, column_offset)
        ctx.saves_output = norm is None and weight is None and relu
        if ctx.saves_output:
            ctx.save_for_backward(y, mean, rstd, None, bias, None)
        else:
            ctx.save_for_backward(x, mean, rstd, weight, bias, key)
        ctx.options = norm, relu, p, seed, column_offset
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias, key = ctx.saved_tensors
        w = None if weight is None else weight.to(ops.sum_dtype(x))
        b = None if bias is None or ctx.saves_output else bias.to(ops.sum_dtype(x))
        by_x, by_w, by_b = ops.row_epilogue_grad(grad, x, mean, rstd, w, b, key, *ctx.options)
        by_weight = None if weight is None else by_w.to(weight.dtype)
        by_bias = None if bias is None else by_b.to(bias.dtype)
        return by_x, by_weight, by_bias, *(None,) * 7


def norm_relu_dropout_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    norm: Norm | None,
    eps: float,
    relu: bool,
    p: float,
    seed: int,
    column_offset: int = 0,
) -> Tensor:
    """:func:`pyg_dist.backend.ops.norm_relu_dropout`'s y, differentiable once by x, weight and bias; not collective."""
    return _RowEpilogue.apply(x, weight, bias, key, norm, eps, relu, p, seed, column_offset)  # type: ignore[no-any-return, no-untyped-call]
