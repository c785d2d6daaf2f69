"""The native ops: each wrapper documents its op, views rows as two-dimensional and raises the package's own errors.

CPU only for now. Nothing here is differentiable except :func:`keyed_dropout`: the derivatives of the others need
transposes and exchanges, which stand in the modules that use them. Every op has a readable twin in
:mod:`pyg_dist.backend.reference`. No function is collective.

Legend: N rows, M source rows, E edges, F columns, R selected rows. The *sum dtype* of float64 is float64; of float32
and bfloat16, float32.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from pyg_dist.backend import library as library  # importing it registers the ops
from pyg_dist.errors import DataError, UnsupportedError

_native = torch.ops.pyg_dist


def spmm_csr(
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    weight: Tensor | None = None,
    *,
    row_scale: Tensor | None = None,
    col_scale: Tensor | None = None,
    divide: bool = False,
    out: Tensor | None = None,
    accumulate: bool = True,
) -> Tensor:
    r"""Sparse times dense: the sum over the in-edges of every row.

    .. math::
        y_i = r_i \sum_{e=\mathrm{rowptr}_i}^{\mathrm{rowptr}_{i+1}-1} w_e \, c_{\mathrm{col}_e} \, x_{\mathrm{col}_e}

    where factors that are not given are one. GCN's norm is two scales. With ``divide``, r and c divide: a mean is the
    sum divided by the degree, and its transpose takes rows divided by it (and rounded to x's dtype), bit for bit as
    PyG has both. Exact up to rounding, and the same for every number of threads. With ``out``, y is *added* to it, or
    written into it where ``accumulate`` is False.

    That ``rowptr`` does not decrease and that ``col`` lies in ``[0, M)`` is not checked (its ends are): a look at every
    edge would cost as much as a narrow product. A wrong pattern reads outside of x.

    Shapes:
        - rowptr: ``[N + 1]`` int64, col: ``[E]`` int32
        - x: ``[M, F]`` or ``[M]``, float32, float64 or bfloat16; copied unless its rows are contiguous
        - weight: ``[E]``, row_scale: ``[N]``, col_scale: ``[M]``, in the sum dtype of x (or its dtype)
        - out: as the output; its rows may be apart (a slice of a larger tensor)
        - output: ``[N, F]``, or ``[N]`` if x is ``[M]``

    Raises:
        DataError: a shape, dtype or the ends of ``rowptr`` do not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    x_MF = _rows(x)
    factors = (_factor(weight, x), _factor(row_scale, x), _factor(col_scale, x))
    if out is None:
        y_NF = _call(_native.spmm_csr.default, rowptr, col, x_MF, *factors, divide)
        return _like_rows(y_NF, x)
    native = _native.spmm_csr_add if accumulate else _native.spmm_csr_into
    _call(native.default, _written_rows(out), rowptr, col, x_MF, *factors, divide)
    return out


def sddmm_csr(rowptr: Tensor, col: Tensor, a: Tensor, b: Tensor) -> Tensor:
    r"""One dot product per edge: the derivative of :func:`spmm_csr` by its weights.

    .. math::
        d_e = \langle a_i, b_{\mathrm{col}_e} \rangle \quad\text{for } \mathrm{rowptr}_i \le e < \mathrm{rowptr}_{i+1}

    As in :func:`spmm_csr`, only the ends of ``rowptr`` are checked.

    Shapes:
        - rowptr: ``[N + 1]`` int64, col: ``[E]`` int32
        - a: ``[N, F]`` or ``[N]``, b: ``[M, F]`` or ``[M]``; float32, float64 or bfloat16, the same for both
        - output: ``[E]`` in the sum dtype

    Raises:
        DataError: a shape, dtype or the ends of ``rowptr`` do not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    return _call(_native.sddmm_csr.default, rowptr, col, _rows(a), _rows(b))  # type: ignore[no-any-return]


def extreme_csr(rowptr: Tensor, col: Tensor, x: Tensor, reduce: Literal["max", "min"]) -> Tensor:
    r"""Largest or smallest value among the in-edges of every row, column by column.

    .. math::
        y_i = \max_{\mathrm{rowptr}_i \le e < \mathrm{rowptr}_{i+1}} x_{\mathrm{col}_e}

    Exact: zero for a row without edges, and a NaN wins, as in ``Tensor.scatter_reduce`` from zeros without them. As in
    :func:`spmm_csr`, only the ends of ``rowptr`` are checked. :func:`extreme_csr_grad` is the derivative.

    Shapes:
        - rowptr: ``[N + 1]`` int64, col: ``[E]`` int32
        - x: ``[M, F]`` float32, float64 or bfloat16
        - output: ``[N, F]``

    Raises:
        DataError: a shape, dtype or the ends of ``rowptr`` do not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    return _call(_native.extreme_csr.default, rowptr, col, _rows(x), reduce == "max")  # type: ignore[no-any-return]


def extreme_csr_shares(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    r"""The gradient of each extreme divided by its number of ties: the first half of :func:`extreme_csr`'s backward.

    .. math::
        s_i = g_i \, / \, \big( |\{e : x_{\mathrm{col}_e} = y_i\}| + [y_i = 0] \big)

    The zero that torch's ``scatter_reduce`` starts from counts as one of the ties, and its share is lost; so here.

    Shapes:
        - rowptr, col, x, y: the arguments and the output of :func:`extreme_csr`
        - grad: ``[N, F]``, dtype of x
        - output: ``[N, F]`` in the sum dtype

    Raises:
        DataError: a shape, dtype or the ends of ``rowptr`` do not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    return _call(_native.extreme_csr_shares.default, rowptr, col, _rows(x), y, grad.contiguous())  # type: ignore[no-any-return]


def extreme_csr_grad(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
    r"""The shares brought back to every source that ties: the second half of :func:`extreme_csr`'s backward.

    .. math::
        d_j = \sum_{\mathrm{rowptr}_j \le e < \mathrm{rowptr}_{j+1}} s_{\mathrm{col}_e} \, [x_j = y_{\mathrm{col}_e}]

    Added up in the order of the edges, without atomics: the same for every number of threads.

    Shapes:
        - rowptr: ``[M + 1]`` int64, col: ``[E]`` int32, the *transposed* pattern
        - x: ``[M, F]``, y: ``[N, F]``, shares: ``[N, F]``, of :func:`extreme_csr` and :func:`extreme_csr_shares`
        - output: ``[M, F]``, dtype of x

    Raises:
        DataError: a shape, dtype or the ends of ``rowptr`` do not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    return _call(_native.extreme_csr_grad.default, rowptr, col, _rows(x), y, shares)  # type: ignore[no-any-return]


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Pick rows: ``y[r] = x[index[r]]``. Every index is checked.

    Shapes:
        - x: ``[N, ...]``, any dtype
        - index: ``[R]`` int64, repetitions allowed
        - out: as the output, overwritten; it may be rows of a larger tensor
        - output: ``[R, ...]``

    Raises:
        DataError: an index is outside of ``[0, N)`` (``out`` may then be half written), or a shape or dtype is wrong.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    if out is None:
        return _like_rows(_call(_native.gather_rows.default, _rows(x), index.contiguous()), x)
    _call(_native.gather_rows_into.default, _written_rows(out), _rows(x), index.contiguous())
    return out


def scatter_add_rows(out: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Add rows in place, ``out[index[r]] += rows[r]`` in the order of r, and return ``out``. Every index is checked.

    Repeated indices always add up in the same order, for any number of threads; bfloat16 rounds after each addition.

    Shapes:
        - out: ``[N, ...]`` float32, float64 or bfloat16; it may be rows of a larger tensor
        - index: ``[R]`` int64, repetitions allowed
        - rows: ``[R, ...]``, dtype of ``out``

    Raises:
        DataError: an index is outside of ``[0, N)`` (``out`` is then untouched), or a shape or dtype does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    _call(_native.scatter_add_rows.default, _written_rows(out), index.contiguous(), _rows(rows))
    return out


def keyed_dropout(x: Tensor, key: Tensor, p: float, seed: int, column_offset: int = 0) -> Tensor:
    r"""Dropout whose mask is a function of (seed, key of the row, column) alone; differentiable to any order.

    .. math::
        y_{ic} = \frac{x_{ic}}{1 - p} \, [\, \mathrm{word}(\mathrm{seed}, \mathrm{key}_i, c + \mathrm{offset})
        \ge p \, 2^{32} \,]

    The words come from Philox-4x32-10 (``csrc/kernels/philox.h``): the mask depends neither on ranks, threads and
    instruction sets nor on which other rows there are. Columns of ``x[i]`` are counted over its trailing dimensions.

    Shapes:
        - x: ``[N, ...]`` float32, float64 or bfloat16; copied unless contiguous
        - key: ``[N]`` int64, for instance global node ids
        - output: as x

    Args:
        x: The rows.
        key: What stands for each row.
        p: The probability of zero, in ``[0, 1]``; taken as a multiple of 2^-32.
        seed: Any integer modulo 2^64.
        column_offset: The number of the first column, where x is a block of the columns of a larger tensor.

    Raises:
        DataError: a shape, dtype or value does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    rows = _rows(x).contiguous()
    y = _call(_native.keyed_dropout.default, rows, key.contiguous(), p, _signed(seed), column_offset)
    return _like_rows(y, x)


Norm = Literal["layer", "rms"]
_NORM_NUMBER: dict[Norm | None, int] = {None: 0, "layer": 1, "rms": 2}


def row_epilogue(
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

    Exact up to rounding; the mask is :func:`keyed_dropout`'s. :func:`row_epilogue_grad` is the derivative.

    Shapes:
        - x: ``[N, F]`` float32, float64 or bfloat16; copied unless contiguous
        - weight, bias: ``[F]`` in the sum dtype of x, or ``None`` for ones and zeros
        - key: ``[N]`` int64, or ``None``: no dropout
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
    args = (weight, bias, key, _NORM_NUMBER[norm], eps, relu, p, _signed(seed), column_offset)
    return _call(_native.row_epilogue.default, x.contiguous(), *args)  # type: ignore[no-any-return]


def row_epilogue_grad(
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
    """The gradients of :func:`row_epilogue` by x, weight and bias, in one pass over grad and x.

    Everything else, the mask included, is computed again. The sums over rows do not depend on the threads.

    Shapes:
        - grad: ``[N, F]``, dtype of x; mean, rstd: of :func:`row_epilogue`; all others: its arguments
        - output: ``[N, F]`` in the dtype of x, ``[F]`` and ``[F]`` in the sum dtype

    Raises:
        DataError: a shape, dtype or value does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    args = (mean, rstd, weight, bias, key, _NORM_NUMBER[norm], relu, p, _signed(seed), column_offset)
    by_x, sums = _call(_native.row_epilogue_grad.default, grad.contiguous(), x.contiguous(), *args)
    by_weight, by_bias, _ = sums.sum(0)
    return by_x, by_weight, by_bias


def keyed_uniform(
    key: Tensor, num_columns: int, seed: int, column_offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform numbers in [0, 1), a function of (seed, key of the row, column) alone, as in :func:`keyed_dropout`.

    They are multiples of 2^-24 (float32), 2^-53 (float64) or 2^-8 (bfloat16); bfloat16 is float32 rounded down.

    Shapes:
        - key: ``[N]`` int64
        - output: ``[N, num_columns]`` of ``dtype``

    Raises:
        DataError: a shape, dtype or value does not fit.
        UnsupportedError: ``key`` is not a dense CPU tensor.
    """
    args = (key.contiguous(), num_columns, _signed(seed), column_offset, dtype)
    return _call(_native.keyed_uniform.default, *args)  # type: ignore[no-any-return]


def keyed_normal(
    key: Tensor, num_columns: int, seed: int, column_offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard normal numbers, a function of (seed, key of the row, column) alone, as in :func:`keyed_dropout`.

    Box-Muller in double precision (``csrc/kernels/keyed_normal.h``), then rounded; equal between machines up to the
    last bit of the C library's logarithm, sine and cosine.

    Shapes:
        - key: ``[N]`` int64
        - output: ``[N, num_columns]`` of ``dtype`` (float32, float64 or bfloat16)

    Raises:
        DataError: a shape, dtype or value does not fit.
        UnsupportedError: ``key`` is not a dense CPU tensor.
    """
    args = (key.contiguous(), num_columns, _signed(seed), column_offset, dtype)
    return _call(_native.keyed_normal.default, *args)  # type: ignore[no-any-return]


def _call(op: Any, *args: Any) -> Any:
    """Call a native op; its errors are one line that starts with the op's name (``csrc/ops/check.h``)."""
    try:
        return op(*args)
    except NotImplementedError:  # the dispatcher found no kernel; its own text lists all backends of torch
        for arg in args:
            if isinstance(arg, Tensor) and (arg.device.type != "cpu" or arg.layout is not torch.strided):
                name = op.__name__.removesuffix(".default")
                raise UnsupportedError(
                    f"{name}: expected dense tensors on cpu, got one on {arg.device} ({arg.layout}); "
                    "move it with .cpu() or .to_dense()"
                ) from None
        raise
    except RuntimeError as error:
        message = str(error)
        if ": expected" not in message:
            raise
        raise DataError(message.splitlines()[0]) from None


def _rows(x: Tensor) -> Tensor:
    """View x as ``[N, F]`` with contiguous rows, or copy it there."""
    if x.ndim != 2:
        if x.ndim == 0:
            raise DataError("expected a tensor with rows, got one without dimensions")
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return x if x.layout is not torch.strided or x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def _written_rows(out: Tensor) -> Tensor:
    """View ``out`` as ``[N, F]``; never a copy, since the op writes into it."""
    if out.ndim == 2:
        return out
    try:
        return out.view(out.shape[0], math.prod(out.shape[1:]))
    except (IndexError, RuntimeError):
        raise DataError(
            f"expected 'out' to have contiguous rows, got shape {list(out.shape)}, strides {list(out.stride())}"
        ) from None


def _like_rows(y: Tensor, x: Tensor) -> Tensor:
    return y if x.ndim == 2 else y.view(y.shape[0], *x.shape[1:])


def _factor(factor: Tensor | None, x: Tensor) -> Tensor | None:
    """A weight or scale in the sum dtype: bfloat16 ones are widened."""
    if factor is None:
        return None
    return factor.float() if x.dtype == factor.dtype == torch.bfloat16 else factor.contiguous()


def _signed(seed: int) -> int:
    """The seed modulo 2^64 as the signed integer that a schema can carry."""
    return (seed + 2**63) % 2**64 - 2**63


# What torch.compile and FakeTensor see instead of the kernels.


@torch.library.register_fake("pyg_dist::spmm_csr")
def _(
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    divide: bool,
) -> Tensor:
    return x.new_empty(rowptr.shape[0] - 1, x.shape[1])


@torch.library.register_fake("pyg_dist::spmm_csr_into")
@torch.library.register_fake("pyg_dist::spmm_csr_add")
def _(
    out: Tensor,
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    col_scale: Tensor | None,
    divide: bool,
) -> None:
    return None


@torch.library.register_fake("pyg_dist::sddmm_csr")
def _(rowptr: Tensor, col: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(col.shape[0], dtype=torch.float64 if a.dtype == torch.float64 else torch.float32)


@torch.library.register_fake("pyg_dist::extreme_csr")
def _(rowptr: Tensor, col: Tensor, x: Tensor, largest: bool) -> Tensor:
    return x.new_empty(rowptr.shape[0] - 1, x.shape[1])


@torch.library.register_fake("pyg_dist::extreme_csr_shares")
def _(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    return torch.empty_like(y, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


@torch.library.register_fake("pyg_dist::extreme_csr_grad")
def _(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("pyg_dist::gather_rows")
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], x.shape[1])


@torch.library.register_fake("pyg_dist::gather_rows_into")
def _(out: Tensor, x: Tensor, index: Tensor) -> None:
    return None


@torch.library.register_fake("pyg_dist::scatter_add_rows")
def _(out: Tensor, index: Tensor, rows: Tensor) -> None:
    return None


@torch.library.register_fake("pyg_dist::row_epilogue")
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
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    mean, rstd = (x.new_empty(x.shape[0] if given else 0, dtype=sums) for given in (norm == 1, norm != 0))
    return torch.empty_like(x), mean, rstd


@torch.library.register_fake("pyg_dist::row_epilogue_grad")
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
) -> tuple[Tensor, Tensor]:
    num_groups = min(max(x.numel() // 2**15, 1), 64)  # csrc/ops/row_epilogue_cpu.cpp
    sums = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty_like(x), x.new_empty(num_groups, 3, x.shape[1], dtype=sums)


@torch.library.register_fake("pyg_dist::keyed_dropout")
def _(x: Tensor, key: Tensor, p: float, seed: int, column_offset: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake("pyg_dist::keyed_uniform")
@torch.library.register_fake("pyg_dist::keyed_normal")
def _(key: Tensor, num_columns: int, seed: int, column_offset: int, dtype: torch.dtype) -> Tensor:
    return key.new_empty(key.shape[0], num_columns, dtype=dtype)


def _setup_dropout(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, key, ctx.p, ctx.seed, ctx.column_offset = inputs
    ctx.save_for_backward(key)


def _dropout_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The map is linear and diagonal, so it is its own transpose."""
    (key,) = ctx.saved_tensors
    by_x = _native.keyed_dropout.default(grad.contiguous(), key, ctx.p, ctx.seed, ctx.column_offset)
    return by_x, None, None, None, None


torch.library.register_autograd("pyg_dist::keyed_dropout", _dropout_backward, setup_context=_setup_dropout)
