"""Rows: picked, added, made, and what follows a linear map, row by row."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from pyg_dist.backend.ops.call import (
    as_rows,
    call,
    factor_of,
    like_rows,
    meta_kernel,
    native,
    signed,
    sum_dtype,
    written_rows,
)


def empty_rows(like: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Uninitialised ``[num_rows, num_columns]`` of the dtype of ``like``, where outputs of the native ops lie.

    A large one (:mod:`pyg_dist.backend.ops.memory`) cannot be resized.
    """
    return call(native.empty_rows.default, like, num_rows, num_columns)  # type: ignore[no-any-return]


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
        UnsupportedError: a tensor is not a dense CPU tensor.
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
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    call(native.scatter_add_rows.default, written_rows(out), index.contiguous(), as_rows(rows))
    return out


def relu(x: Tensor, keeps_mask: bool) -> tuple[Tensor, Tensor]:
    """Zero where x is negative, else x (a NaN and -0.0 included, as in torch), and for the backward where x passes.

    Shapes:
        - x: any shape, contiguous; float32, float64, bfloat16 or float16
        - output: as x, and ``[ceil(x.numel() / 8)]`` uint8, whose bits, lowest first, are one where x is positive or
          NaN (empty without ``keeps_mask``)

    Raises:
        DataError: a dtype does not fit, or x is not contiguous.
        UnsupportedError: x is not a dense CPU tensor.
    """
    return call(native.relu.default, x, keeps_mask)  # type: ignore[no-any-return]


def relu_grad(grad: Tensor, passed: Tensor) -> Tensor:
    """``grad`` where ``passed``, zero elsewhere: the derivative of :func:`relu`, which is its own.

    Shapes:
        - grad: any shape, float32, float64, bfloat16 or float16; copied unless contiguous
        - passed: ``[ceil(grad.numel() / 8)]`` uint8, of :func:`relu`
        - output: as grad

    Raises:
        DataError: a shape or dtype does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    return call(native.relu_grad.default, grad.contiguous(), passed)  # type: ignore[no-any-return]


Norm = Literal["layer", "rms"]
_NORM_NUMBER: dict[Norm | None, int] = {None: 0, "layer": 1, "rms": 2}


def norm_relu_dropout(
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
) -> tuple[Tensor, Tensor, Tensor]:
    r"""What follows a layer's linear map, in one pass over its rows.

    .. math::
        y_i = \mathrm{dropout}(\mathrm{relu}(\mathrm{norm}(x_i) \odot w + b))

    Exact up to rounding; the mask is :func:`keyed_dropout`'s. :func:`norm_relu_dropout_grad` is the derivative.

    Shapes:
        - x: ``[N, F]`` float32, float64, bfloat16 or float16; copied unless contiguous
        - weight, bias: ``[F]`` in the dtype of x or in its sum dtype, or ``None`` for ones and zeros
        - key: ``[N]`` int64, or ``None``: nothing is dropped, and all is multiplied by ``1 / (1 - p)``
        - output: y ``[N, F]``; the rows' means ``[N]`` (empty unless ``norm="layer"``) and one over their deviations
          ``[N]`` (empty without a norm), in the sum dtype

    Args:
        x: The rows.
        weight: Factor of each column.
        bias: Summand of each column.
        key: What stands for each row.
        norm: ``"layer"``, ``"rms"`` or ``None``.
        eps: Added to the variance, or to the mean square.
        relu: Whether negative values become zero.
        p: The probability of zero, in ``[0, 1)``.
        seed: Any integer modulo 2^64.
        column_offset: The number of the first column for the mask.

    Raises:
        DataError: a shape, dtype or value does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    factors = factor_of(weight, x), factor_of(bias, x)
    args = (*factors, key, _NORM_NUMBER[norm], eps, relu, p, signed(seed), column_offset)
    return call(native.norm_relu_dropout.default, x.contiguous(), *args)  # type: ignore[no-any-return]


def norm_relu_dropout_grad(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    norm: Norm | None,
    relu: bool,
    p: float,
    seed: int,
    column_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of :func:`norm_relu_dropout` by x, weight and bias, in one pass over grad and x.

    Everything else, the mask included, is computed again. The sums over rows do not depend on the threads.

    Shapes:
        - grad: ``[N, F]``, dtype of x; mean, rstd: of :func:`norm_relu_dropout`; all others: its arguments
        - output: ``[N, F]`` in the dtype of x, ``[F]`` and ``[F]`` in the sum dtype

    Raises:
        DataError: a shape, dtype or value does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    factors = factor_of(weight, x), factor_of(bias, x)
    args = (mean, rstd, *factors, key, _NORM_NUMBER[norm], relu, p, signed(seed), column_offset, False)
    by_x, sums, _ = call(native.norm_relu_dropout_grad.default, grad.contiguous(), x.contiguous(), *args)
    by_weight, by_bias, _ = sums.sum(0)
    return by_x, by_weight, by_bias


def row_moments(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """The rows' means and mean squared deviations from them, or their mean squares: where x is a part of the columns.

    Shapes:
        - x: ``[N, F]`` float32, float64 or bfloat16; copied unless contiguous
        - output: ``[N]`` (empty unless ``norm="layer"``) and ``[N]``, in the sum dtype; zeros where F is 0

    Raises:
        DataError: a shape or dtype does not fit.
        UnsupportedError: x is not a dense CPU tensor.
    """
    return call(native.row_moments.default, x.contiguous(), _NORM_NUMBER[norm])  # type: ignore[no-any-return]


def norm_relu_dropout_of(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    norm: Norm,
    relu: bool,
    p: float,
    seed: int,
    column_offset: int = 0,
) -> Tensor:
    """:func:`norm_relu_dropout`'s y for given moments: those of whole rows, of which x has some columns.

    Shapes:
        - mean, rstd: as :func:`norm_relu_dropout` returns them; all others: its arguments
        - output: as x

    Raises:
        DataError: a shape, dtype or value does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    factors = factor_of(weight, x), factor_of(bias, x)
    args = (mean, rstd, *factors, key, _NORM_NUMBER[norm], relu, p, signed(seed), column_offset)
    return call(native.norm_relu_dropout_of.default, x.contiguous(), *args)  # type: ignore[no-any-return]


def norm_relu_dropout_grad_part(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    norm: Norm,
    relu: bool,
    p: float,
    seed: int,
    column_offset: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of :func:`norm_relu_dropout_of` by norm(x), weight and bias; :func:`row_norm_grad_` has that by x.

    Shapes:
        - arguments: as :func:`norm_relu_dropout_grad`'s
        - output: ``[N, F]`` in the dtype of x, ``[F]`` and ``[F]``, and ``[N, 2]``: of each row of the first one the
          sum (zero unless ``norm="layer"``) and that of its product with n, in the sum dtype

    Raises:
        DataError: a shape, dtype or value does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    factors = factor_of(weight, x), factor_of(bias, x)
    args = (mean, rstd, *factors, key, _NORM_NUMBER[norm], relu, p, signed(seed), column_offset, True)
    by_n, sums, by_row = call(native.norm_relu_dropout_grad.default, grad.contiguous(), x.contiguous(), *args)
    by_weight, by_bias, _ = sums.sum(0)
    return by_n, by_weight, by_bias, by_row


def row_norm_grad_(by_n: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, by_row: Tensor, norm: Norm) -> Tensor:
    """The gradient by x from that by norm(x), in place: ``(by_n - by_row[:, 0] - n * by_row[:, 1]) * rstd``.

    Shapes:
        - by_n: ``[N, F]``, of :func:`norm_relu_dropout_grad_part`, overwritten; x, mean, rstd: its arguments
        - by_row: ``[N, 2]``, its row sums, divided by the columns of whole rows; contiguous

    Raises:
        DataError: a shape or dtype does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    call(native.row_norm_grad_.default, by_n, x.contiguous(), mean, rstd, by_row, _NORM_NUMBER[norm])
    return by_n


@meta_kernel("empty_rows")
def _(like: Tensor, num_rows: int, num_columns: int) -> Tensor:
    return like.new_empty(num_rows, num_columns)


@meta_kernel("gather_rows")
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], x.shape[1])


@meta_kernel("gather_rows_into")
def _(out: Tensor, x: Tensor, index: Tensor) -> None:
    return None


@meta_kernel("scatter_add_rows")
def _(out: Tensor, index: Tensor, rows: Tensor) -> None:
    return None


@meta_kernel("relu")
def _(x: Tensor, keeps_mask: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((x.numel() + 7) // 8 if keeps_mask else 0, dtype=torch.uint8)


@meta_kernel("relu_grad")
def _(grad: Tensor, passed: Tensor) -> Tensor:
    return torch.empty_like(grad)


@meta_kernel("norm_relu_dropout")
def _(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    norm: int,
    eps: float,
    relu: bool,
    p: float,
    seed: int,
    column_offset: int,
) -> tuple[Tensor, Tensor, Tensor]:
    mean, rstd = (x.new_empty(x.shape[0] if given else 0, dtype=sum_dtype(x)) for given in (norm == 1, norm != 0))
    return torch.empty_like(x), mean, rstd


@meta_kernel("norm_relu_dropout_grad")
def _(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    norm: int,
    relu: bool,
    p: float,
    seed: int,
    column_offset: int,
    is_part: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    num_groups = min(max(x.numel() // 2**15, 1), 64)  # csrc/ops/norm_relu_dropout.cpp
    sums = x.new_empty(num_groups, 3, x.shape[1], dtype=sum_dtype(x))
    return torch.empty_like(x), sums, x.new_empty(x.shape[0] if is_part else 0, 2, dtype=sum_dtype(x))


@meta_kernel("row_moments")
def _(x: Tensor, norm: int) -> tuple[Tensor, Tensor]:
    mean, square = (x.new_empty(x.shape[0] if given else 0, dtype=sum_dtype(x)) for given in (norm == 1, norm != 0))
    return mean, square


@meta_kernel("norm_relu_dropout_of")
def _(
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    norm: int,
    relu: bool,
    p: float,
    seed: int,
    column_offset: int,
) -> Tensor:
    return torch.empty_like(x)


@meta_kernel("row_norm_grad_")
def _(by_n: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, by_row: Tensor, norm: int) -> None:
    return None
