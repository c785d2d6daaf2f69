"""Norm, ReLU and dropout as one function of rows, with autograd: the backward pass keeps one tensor of rows.

Where the columns of rows are spread over ranks, two numbers a row at most are put together in each direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pyg_dist.backend import host, ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.local_function import Context, LocalFunction
from pyg_dist.backend.on_device import copied_to
from pyg_dist.backend.ops import Norm, NormReLUDropoutSpec


@dataclass(frozen=True, eq=False)
class SplitRows:
    """Rows of which each rank of ``group`` has some columns, ``sizes`` by rank."""

    group: Group
    sizes: Sequence[int]

    def moments(self, x: Tensor, norm: Norm, eps: float) -> tuple[Tensor, Tensor]:
        """Means of whole rows (empty unless ``norm="layer"``), one over their deviations: one message (collective).

        What the ranks have of a row is put together from their means and deviations (Chan, Golub and LeVeque 1983):
        nothing cancels. Every rank adds in the order of the ranks: the same bits.
        """
        mean, mean_square = ops.row_moments(x, norm)
        of_part = torch.stack([mean, mean_square] if norm == "layer" else [mean_square])
        parts = self.group.stack(of_part)
        share = copied_to(host.tensor(self.sizes, dtype=parts.dtype) / sum(self.sizes), parts.device).view(-1, 1)
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


class _NormReLUDropout(LocalFunction[Tensor]):
    """One pass forward, one back; two floats a row are kept beside x.

    Without a norm y is saved instead of x: the next layer saves y anyway, and the gradient needs only its zeros.
    A norm of split rows takes two passes each way, with one message between them.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor | None, bias: Tensor | None, key: Tensor | None,
        spec: NormReLUDropoutSpec, split: SplitRows | None,
    ) -> Tensor:  # fmt: skip
        w, b = (None if factor is None else factor.to(ops.sum_dtype(x)) for factor in (weight, bias))
        ctx.spec, ctx.split = spec, None if spec.norm is None else split
        moments = None if split is None or spec.norm is None else split.moments(x, spec.norm, spec.eps)
        y, moments = ops.norm_relu_dropout(x, (w, b, key), spec, moments)
        ctx.saves_output = spec.norm is None and weight is None and spec.relu
        ctx.save_for_backward(*((y, None, bias, None) if ctx.saves_output else (x, weight, bias, key)), *moments)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, key, *moments = ctx.saved_tensors
        spec: NormReLUDropoutSpec = ctx.spec
        w = None if weight is None else weight.to(ops.sum_dtype(x))
        b = None if bias is None or ctx.saves_output else bias.to(ops.sum_dtype(x))
        is_part = ctx.split is not None
        by_x, by_w, by_b, sums = ops.norm_relu_dropout_grad(grad, x, (w, b, key), spec, (*moments,), is_part)
        if is_part and spec.norm is not None:
            ops.row_norm_grad_(by_x, x, (*moments,), ctx.split.means(sums, spec.norm), spec.norm)
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
    return _NormReLUDropout.apply(x, weight, bias, key, spec, split)
