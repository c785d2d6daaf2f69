"""Norm, ReLU and dropout as one function of rows, with autograd: the backward pass keeps one tensor of rows.

Where the columns of rows are spread over ranks, two numbers a row at most are put together in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_dist.backend import ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.ops import Norm


@dataclass(frozen=True)
class NormReLUDropoutSpec:
    """What is done to the rows; see :func:`pyg_dist.backend.ops.norm_relu_dropout`.

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


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Rows of which each rank has some columns.

    Attributes:
        group: the ranks that have the others.
        sizes: how many each rank has.
    """

    group: Group
    sizes: Sequence[int]

    def moments(self, x: Tensor, norm: Norm, eps: float) -> tuple[Tensor, Tensor]:
        """Means of whole rows (empty unless ``norm="layer"``), one over their deviations: one message (collective).

        What the ranks have of a row is put together from their means and deviations (Chan, Golub and LeVeque 1983):
        nothing cancels. Every rank adds in the order of the ranks: the same bits.
        """
        mean, mean_square = ops.row_moments(x, norm)
        of_part = torch.stack([mean, mean_square] if norm == "layer" else [mean_square])
        parts = self.group.gather_rows(of_part.unsqueeze(0), [1] * self.group.size)
        share = (parts.new_tensor(self.sizes) / sum(self.sizes)).view(-1, 1)
        mean_square = (parts[:, -1] * share).sum(0)
        if norm == "layer":
            mean = (parts[:, 0] * share).sum(0)
            mean_square += ((parts[:, 0] - mean).square() * share).sum(0)
        return mean, mean_square.add_(eps).rsqrt_()

    def means(self, sums: Tensor, norm: Norm) -> Tensor:
        """Means over whole rows: one number a row is sent for RMS norm, two for layer norm (collective)."""
        used = sums if norm == "layer" else sums[:, 1:].contiguous()
        total = self.group.sum(used).div_(sum(self.sizes))
        return total if norm == "layer" else torch.cat([torch.zeros_like(total), total], dim=1)


class _NormReLUDropout(LocalFunction):
    """One pass forward, one back; two floats a row are kept beside x.

    Without a norm y is saved instead of x: the next layer saves y anyway, and the gradient needs only its zeros.
    A norm of split rows takes two passes each way, with one message between them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, key: Tensor | None, spec: NormReLUDropoutSpec,
        split: SplitRows | None,
    ) -> Tensor:  # fmt: skip
        w, b = (None if factor is None else factor.to(ops.sum_dtype(x)) for factor in (weight, bias))
        ctx.split = split
        if split is not None and spec.norm is not None:
            mean, rstd = split.moments(x, spec.norm, spec.eps)
            y = ops.norm_relu_dropout_of(
                x, mean, rstd, w, b, key, spec.norm, spec.relu, spec.p, spec.seed, spec.first_column
            )
            ctx.saves_output, ctx.spec = False, spec
            ctx.save_for_backward(x, mean, rstd, weight, bias, key)
            return y
        y, mean, rstd = ops.norm_relu_dropout(
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
        options = (spec.relu, spec.p, spec.seed, spec.first_column)
        if ctx.split is not None and spec.norm is not None:
            by_x, by_w, by_b, sums = ops.norm_relu_dropout_grad_part(
                grad, x, mean, rstd, w, b, key, spec.norm, *options
            )
            ops.row_norm_grad_(by_x, x, mean, rstd, ctx.split.means(sums, spec.norm), spec.norm)
        else:
            by_x, by_w, by_b = ops.norm_relu_dropout_grad(grad, x, mean, rstd, w, b, key, spec.norm, *options)
        by_weight = None if weight is None else by_w.to(weight.dtype)
        by_bias = None if bias is None else by_b.to(bias.dtype)
        return by_x, by_weight, by_bias, None, None, None


def norm_relu_dropout_rows(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    spec: NormReLUDropoutSpec,
    split: SplitRows | None = None,
) -> Tensor:
    """:func:`pyg_dist.backend.ops.norm_relu_dropout`'s y, differentiable once by x, weight and bias.

    Not collective; but a norm of split rows is, both ways.
    """
    return _NormReLUDropout.apply(x, weight, bias, key, spec, split)  # type: ignore[no-any-return]
