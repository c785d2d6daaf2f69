"""Rows: picked, added, made, and what follows a linear map, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyg_dist.backend.ops.library import (
    as_rows,
    call,
    factor_of,
    like_first,
    like_rows,
    meta_kernel,
    native,
    nothing,
    signed,
    sum_dtype,
    written_rows,
)


def empty_rows(like: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Uninitialised ``[num_rows, num_columns]`` like ``like``, where outputs of the ops lie; not to be resized."""
    return call(native.empty_rows.default, like, num_rows, num_columns)


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Pick rows: ``y[r] = x[index[r]]``. Every index is checked.

    Shapes:
        - x: ``[N, ...]``, any dtype
        - index: ``[R]`` int64, repetitions allowed
        - out: as the output, overwritten; it may be rows of a larger tensor
        - output: ``[R, ...]``

    Raises:
        DataError: an index is outside of ``[0, N)`` (``out`` may then be half written), a shape or dtype is wrong, or
            ``out`` shares memory with another argument.
    """
    if out is None:
        return like_rows(call(native.gather_rows.default, as_rows(x), index.contiguous()), x)
    call(native.gather_rows_into.default, written_rows(out), as_rows(x), index.contiguous())
    return out


def scatter_add_rows(out: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Add rows in place, ``out[index[r]] += rows[r]`` in the order of r, and return ``out``. Every index is checked.

    Repeated indices always add up in the same order, for any number of threads; 16-bit rows are rounded after each
    addition. On a GPU wide rows add up in pieces of that order, which are alike in every run.

    Shapes:
        - out: ``[N, ...]`` float32, float64, bfloat16 or float16; it may be rows of a larger tensor
        - index: ``[R]`` int64, repetitions allowed
        - rows: ``[R, ...]``, dtype of ``out``

    Raises:
        DataError: an index is outside of ``[0, N)`` (``out`` is then untouched), a shape or dtype does not fit, or
            ``out`` shares memory with another argument.
    """
    call(native.scatter_add_rows.default, written_rows(out), index.contiguous(), as_rows(rows))
    return out


def relu(x: Tensor, keeps_mask: bool) -> tuple[Tensor, Tensor]:
    """Zero where x is negative, else x (a NaN and -0.0 included, as in torch), and for the backward where x passes.

    Shapes:
        - x: any shape, contiguous; float32, float64, bfloat16 or float16
        - output: as x, and ``[ceil(x.numel() / 8)]`` uint8, whose bits, lowest first, are one where x is positive or
          NaN (empty without ``keeps_mask``)
    """
    return call(native.relu.default, x, keeps_mask)


def relu_grad(grad: Tensor, passed: Tensor) -> Tensor:
    """``grad`` where ``passed``, zero elsewhere: the derivative of :func:`relu`, which is its own.

    Shapes:
        - grad: any shape, float32, float64, bfloat16 or float16; copied unless contiguous
        - passed: ``[ceil(grad.numel() / 8)]`` uint8, of :func:`relu`
        - output: as grad
    """
    return call(native.relu_grad.default, grad.contiguous(), passed)


Norm = Literal["layer", "rms"]
_NORM_NUMBER: dict[Norm | None, int] = {None: 0, "layer": 1, "rms": 2}
Moments = tuple[Tensor, Tensor]
"""The rows' means (empty unless ``norm="layer"``), and one over their deviations (empty without a norm)."""


@dataclass(frozen=True)
class NormReLUDropoutSpec:
    """The options of :func:`norm_relu_dropout`."""

    norm: Norm | None  # ``"layer"``, ``"rms"`` or ``None``
    eps: float  # added to the variance, or to the mean square
    relu: bool  # whether negative values become zero
    p: float  # the probability of zero, in ``[0, 1)``
    seed: int  # of the dropout, any integer modulo 2^64
    first_column: int = 0  # the number of the first column for the mask


_Factors = tuple[Tensor | None, Tensor | None, Tensor | None]
"""Weight and bias ``[F]`` in the dtype of x or in its sum dtype (``None``: ones, zeros), and the key ``[N]`` int64 that
stands for each row (``None``: nothing is dropped, and all is multiplied by ``1 / (1 - p)``)."""


def _arguments(x: Tensor, factors: _Factors, spec: NormReLUDropoutSpec, *eps: float) -> tuple[object, ...]:
    weight, bias, key = factors
    numbers = spec.relu, spec.p, signed(spec.seed), spec.first_column
    return factor_of(weight, x), factor_of(bias, x), key, _NORM_NUMBER[spec.norm], *eps, *numbers


def norm_relu_dropout(
    x: Tensor, factors: _Factors, spec: NormReLUDropoutSpec, moments: Moments | None = None
) -> tuple[Tensor, Moments]:
    r"""Norm, ReLU and dropout behind a layer's linear map, in one pass over its rows.

    .. math::
        y_i = \mathrm{dropout}(\mathrm{relu}(\mathrm{norm}(x_i) \odot w + b))

    Exact up to rounding; the mask is :func:`keyed_dropout`'s. :func:`norm_relu_dropout_grad` is the derivative.

    Shapes:
        - x: ``[N, F]`` float32, float64, bfloat16 or float16; copied unless contiguous
        - factors: weight ``[F]``, bias ``[F]`` and key ``[N]``, or ``None``
        - moments: of whole rows, where x has some of their columns
        - output: y ``[N, F]``, and the moments
    """
    x = x.contiguous()
    if moments is not None:
        return call(native.norm_relu_dropout_of.default, x, *moments, *_arguments(x, factors, spec)), moments
    made: list[Tensor] = call(native.norm_relu_dropout.default, x, *_arguments(x, factors, spec, spec.eps))
    return made[0], (made[1], made[2])


def norm_relu_dropout_grad(
    grad: Tensor, x: Tensor, factors: _Factors, spec: NormReLUDropoutSpec, moments: Moments, is_part: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of :func:`norm_relu_dropout` by x, weight and bias, in one pass over grad and x.

    Everything else, the mask included, is computed again. The sums over rows do not depend on the threads. Where x is
    a part of the columns, the first one is that by norm(x); :func:`row_norm_grad_` makes that by x of it.

    Shapes:
        - grad: ``[N, F]``, dtype of x; all others: arguments and output of :func:`norm_relu_dropout`
        - output: ``[N, F]`` in the dtype of x, ``[F]``, ``[F]``; of a part ``[N, 2]``: of each row of the first one the
          sum (zero unless ``norm="layer"``) and that of its product with norm(x). In the sum dtype
    """
    x = x.contiguous()
    args = *moments, *_arguments(x, factors, spec), is_part
    made: list[Tensor] = call(native.norm_relu_dropout_grad.default, grad.contiguous(), x, *args)
    by_x, sums, by_row = made
    by_weight, by_bias, _ = sums.sum(0)
    return by_x, by_weight, by_bias, by_row


def row_moments(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The rows' means and mean squared deviations from them, or their mean squares: where x is a part of the columns.

    Shapes:
        - x: ``[N, F]`` float32, float64 or bfloat16; copied unless contiguous
        - output: ``[N]`` (empty unless ``norm="layer"``) and ``[N]``, in the sum dtype; zeros where F is 0
    """
    return call(native.row_moments.default, x.contiguous(), _NORM_NUMBER[norm])


def row_norm_grad_(by_n: Tensor, x: Tensor, moments: Moments, by_row: Tensor, norm: Norm) -> Tensor:
    """The gradient by x from that by norm(x), in place: ``(by_n - by_row[:, 0] - n * by_row[:, 1]) * rstd``.

    Shapes:
        - by_n: ``[N, F]``, of :func:`norm_relu_dropout_grad`, overwritten; x, moments: its arguments
        - by_row: ``[N, 2]``, its row sums, divided by the columns of whole rows; contiguous
    """
    call(native.row_norm_grad_.default, by_n, x.contiguous(), *moments, by_row, _NORM_NUMBER[norm])
    return by_n


@meta_kernel("empty_rows")
def _(like: Tensor, num_rows: int, num_columns: int) -> Tensor:
    return like.new_empty(num_rows, num_columns)


@meta_kernel("gather_rows")
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], x.shape[1])


@meta_kernel("relu")
def _(x: Tensor, keeps_mask: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((x.numel() + 7) // 8 if keeps_mask else 0, dtype=torch.uint8)


def _empty_moments(x: Tensor, norm: int) -> Moments:
    mean, rstd = (x.new_empty(x.shape[0] if given else 0, dtype=sum_dtype(x)) for given in (norm == 1, norm != 0))
    return mean, rstd


meta_kernel("row_moments")(_empty_moments)
meta_kernel("relu_grad", "norm_relu_dropout_of")(like_first)
meta_kernel("gather_rows_into", "scatter_add_rows", "row_norm_grad_")(nothing)


@meta_kernel("norm_relu_dropout")
def _(x: Tensor, weight: object, bias: object, key: object, norm: int, *numbers: object) -> tuple[Tensor, ...]:
    return torch.empty_like(x), *_empty_moments(x, norm)


@meta_kernel("norm_relu_dropout_grad")
def _(grad: Tensor, x: Tensor, *others: object) -> tuple[Tensor, Tensor, Tensor]:
    num_groups = min(max(x.numel() // 2**15, 1), 512)  # csrc/ops/norm_relu_dropout.cpp
    sums = x.new_empty(num_groups, 3, x.shape[1], dtype=sum_dtype(x))
    return torch.empty_like(x), sums, x.new_empty(x.shape[0] if others[-1] else 0, 2, dtype=sum_dtype(x))
