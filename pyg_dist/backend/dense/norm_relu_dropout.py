"""Norm, ReLU and dropout as one function of rows, with autograd: the backward pass keeps one tensor of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.ops import Norm


@dataclass(frozen=True)
class NormReLUDropoutSpec:
    """What is done to the rows; see :func:`pyg_dist.backend.ops.row_epilogue`.

    Attributes:
        norm: ``"layer"``, ``"rms"`` or ``None``.
        eps: added to the variance, or to the mean square.
        relu: whether negative values become zero.
        p: the probability of zero, in ``[0, 1)``.
        seed: of the dropout.
        first_column: the number of the first column for the mask.
    """

    norm: Norm | None
    eps: float
    relu: bool
    p: float
    seed: int
    first_column: int = 0


class _RowEpilogue(LocalFunction):
    """One pass forward, one back; two floats a row are kept beside x.

    Without a norm y takes x's place: what follows keeps it anyway, and its zeros are all that the gradient asks for.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, key: Tensor | None, spec: NormReLUDropoutSpec
    ) -> Tensor:
        w, b = (None if factor is None else factor.to(ops.sum_dtype(x)) for factor in (weight, bias))
        y, mean, rstd = ops.row_epilogue(
            x, w, b, key, spec.norm, spec.eps, spec.relu, spec.p, spec.seed, spec.first_column
        )
        ctx.saves_output = spec.norm is None and weight is None and spec.relu
        if ctx.saves_output:
            ctx.save_for_backward(y, mean, rstd, None, bias, None)
        else:
            ctx.save_for_backward(x, mean, rstd, weight, bias, key)
        ctx.spec = spec
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias, key = ctx.saved_tensors
        spec: NormReLUDropoutSpec = ctx.spec
        w = None if weight is None else weight.to(ops.sum_dtype(x))
        b = None if bias is None or ctx.saves_output else bias.to(ops.sum_dtype(x))
        by_x, by_w, by_b = ops.row_epilogue_grad(
            grad, x, mean, rstd, w, b, key, spec.norm, spec.relu, spec.p, spec.seed, spec.first_column
        )
        by_weight = None if weight is None else by_w.to(weight.dtype)
        by_bias = None if bias is None else by_b.to(bias.dtype)
        return by_x, by_weight, by_bias, None, None


def norm_relu_dropout_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, key: Tensor | None, spec: NormReLUDropoutSpec
) -> Tensor:
    """:func:`pyg_dist.backend.ops.row_epilogue`'s y, differentiable once by x, weight and bias; not collective."""
    return _RowEpilogue.apply(x, weight, bias, key, spec)  # type: ignore[no-any-return, no-untyped-call]
