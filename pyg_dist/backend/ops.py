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


def relu(x: Tensor, keeps_mask: bool) -> tuple[Tensor, Tensor]:
    """``max(x, 0)``, a NaN kept, and for the backward where x passes.

    Shapes:
        - x: any shape, contiguous; float32, float64 or bfloat16
        - output: as x, and ``[x.numel()]`` uint8, one where x is positive or NaN (empty without ``keeps_mask``)

    Raises:
        DataError: a dtype does not fit, or x is not contiguous.
        UnsupportedError: x is not a dense CPU tensor.
    """
    return _call(_native.relu.default, x, keeps_mask)  # type: ignore[no-any-return]


def relu_grad(grad: Tensor, passed: Tensor) -> Tensor:
    """``grad`` where ``passed``, zero elsewhere: the derivative of :func:`relu`, which is its own.

    Shapes:
        - grad: any shape, float32, float64 or bfloat16; copied unless contiguous
        - passed: ``[grad.numel()]`` uint8, of :func:`relu`
        - output: as grad

    Raises:
        DataError: a shape or dtype does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    return _call(_native.relu_grad.default, grad.contiguous(), passed)  # type: ignore[no-any-return]


def empty_rows(like: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Uninitialised ``[num_rows, num_columns]`` of the dtype of ``like``, in huge pages if it is large."""
    return _call(_native.empty_rows.default, like, num_rows, num_columns)  # type: ignore[no-any-return]


def packed_row_bytes(num_columns: int, bits: int) -> int:
    """Bytes of a row of :func:`quantize_csr`: ``4 + ceil(F bits / 8)``, or ``2 F`` for 16 bits."""
    if num_columns == 0:
        return 0
    return 2 * num_columns if bits == 16 else 4 + -(-num_columns * bits // 8)


def quantize_csr(
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    bits: int,
    weight: Tensor | None = None,
    *,
    col_scale: Tensor | None = None,
    key: Tensor | None = None,
    seed: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    r"""Sparse times dense, quantized row by row and packed, in one pass over x.

    .. math::
        h_i = \sum_{e=\mathrm{rowptr}_i}^{\mathrm{rowptr}_{i+1}-1} w_e \, c_{\mathrm{col}_e} \, x_{\mathrm{col}_e} \\
        q_{ic} = \min\Big(2^b - 1, \Big\lfloor \frac{h_{ic} - Z_i}{S_i} + u_{ic} \Big\rfloor\Big) \\
        h_{ic} \approx Z_i + S_i q_{ic}

    Source: SuperGCN, 2.4 and 7.3. Approximate: with a ``key``, u is uniform in [0, 1), a function of (seed, key of the
    row, column) alone, and the mean of ``Z + S q`` is h up to ``2^-16 S``, each value within S of h; without one, u is
    1/2 and each value within S / 2. Z and S are the row's smallest value and a step of ``2^b - 1`` to its largest,
    rounded to bfloat16 outward (``csrc/kernels/packed_rows.h`` has every step). ``bits=16`` rounds to bfloat16.
    A pattern with one entry a row gathers rows, and reads them where they lie.

    Shapes:
        - rowptr: ``[R + 1]`` int64, col: ``[E]`` int32
        - x: ``[M, F]`` float32, float64 or bfloat16; copied unless its rows are contiguous
        - weight: ``[E]``, col_scale: ``[M]``, in the sum dtype of x (or its dtype)
        - key: ``[R]`` int64
        - out: as the output, contiguous, overwritten
        - output: uint8 ``[R, packed_row_bytes(F, bits)]``: Z and S, then the numbers

    Raises:
        DataError: a value is not finite or a range exceeds float32 (``bits < 16``); a shape or dtype does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    x_MF = _rows(x)
    if out is None:
        out = x.new_empty(rowptr.numel() - 1, packed_row_bytes(x_MF.shape[1], bits), dtype=torch.uint8)
    factors = (_factor(weight, x), _factor(col_scale, x))
    _call(_native.quantize_csr_into.default, out, rowptr, col, x_MF, *factors, bits, key, _signed(seed))
    return out


def dequantize_csr_add(
    out: Tensor,
    rowptr: Tensor,
    col: Tensor,
    packed: Tensor,
    bits: int,
    weight: Tensor | None = None,
    *,
    row_scale: Tensor | None = None,
) -> Tensor:
    r"""Sparse times the rows of :func:`quantize_csr`, unpacked in registers, added to ``out``, which is returned.

    .. math::
        y_i \mathrel{+}= r_i \sum_{e=\mathrm{rowptr}_i}^{\mathrm{rowptr}_{i+1}-1} w_e \,
        (Z_{\mathrm{col}_e} + S_{\mathrm{col}_e} q_{\mathrm{col}_e})

    Exact up to rounding; sums are kept in float32 (also where ``out`` is float64) and do not depend on the threads.

    Shapes:
        - out: ``[N, F]`` float32, float64 or bfloat16; its rows may be apart
        - rowptr: ``[N + 1]`` int64, col: ``[E]`` int32
        - packed: uint8 ``[M, packed_row_bytes(F, bits)]``
        - weight: ``[E]``, row_scale: ``[N]``, in the sum dtype of ``out`` (or its dtype)

    Raises:
        DataError: a shape or dtype does not fit.
        UnsupportedError: a tensor is not a dense CPU tensor.
    """
    factors = (_factor(weight, out), _factor(row_scale, out))
    _call(_native.dequantize_csr_add.default, _written_rows(out), rowptr, col, packed, *factors, bits)
    return out


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


@torch.library.register_fake("pyg_dist::relu")
def _(x: Tensor, keeps_mask: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.numel() if keeps_mask else 0, dtype=torch.uint8)


@torch.library.register_fake("pyg_dist::relu_grad")
def _(grad: Tensor, passed: Tensor) -> Tensor:
    return torch.empty_like(grad)


@torch.library.register_fake("pyg_dist::empty_rows")
def _(like: Tensor, num_rows: int, num_columns: int) -> Tensor:
    return like.new_empty(num_rows, num_columns)


@torch.library.register_fake("pyg_dist::quantize_csr_into")
def _(
    packed: Tensor,
    rowptr: Tensor,
    col: Tensor,
    x: Tensor,
    weight: Tensor | None,
    col_scale: Tensor | None,
    bits: int,
    key: Tensor | None,
    seed: int,
) -> None:
    return None


@torch.library.register_fake("pyg_dist::dequantize_csr_add")
def _(
    out: Tensor,
    rowptr: Tensor,
    col: Tensor,
    packed: Tensor,
    weight: Tensor | None,
    row_scale: Tensor | None,
    bits: int,
) -> None:
    return None


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
