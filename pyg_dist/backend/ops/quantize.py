"""Rows in a few bits: packed, unpacked and added; how long rows of messages are, and what they are keyed by.

``csrc/formats/packed_rows.h`` has how they lie. Plans count with the same functions that messages are made by.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_dist.backend.ops.late_errors import raise_later
from pyg_dist.backend.ops.library import (
    as_rows,
    call,
    factor_of,
    meta_kernel,
    native,
    nothing,
    signed,
    sum_dtype,
    written_rows,
)
from pyg_dist.errors import NotFiniteError

SUM_KEY = 1 << 40
"""A row's key is its node's global id; a partial sum's adds this times (its maker's rank + 1)."""


def packed_row_bytes(num_columns: int, bits: int) -> int:
    """Bytes of a packed row: ``4 + ceil(F bits / 8)`` with its zero point and scale, or ``2 F`` for 16 bits."""
    if num_columns == 0:
        return 0
    return 2 * num_columns if bits == 16 else 4 + -(-num_columns * bits // 8)


def row_bytes(num_columns: int, element_size: int, bits: int) -> int:
    """Bytes of a row in a message: packed if that is shorter than the row as it is, which 32 bits stand for.

    The one rule for what is rounded: a column of float32 takes four bytes as it is and five in two bits.
    """
    exact = num_columns * element_size
    return exact if bits == 32 else min(exact, packed_row_bytes(num_columns, bits))


def is_packed(num_columns: int, element_size: int, bits: int) -> bool:
    """Whether such rows are packed: see :func:`row_bytes`."""
    return row_bytes(num_columns, element_size, bits) < num_columns * element_size


def node_of(key: int) -> int:
    """The global id of the node that a key stands for."""
    return key % SUM_KEY


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
    explain: Callable[[NotFiniteError], Exception] | None = None,
) -> Tensor:
    r"""Sparse times dense, quantized row by row and packed, in one pass over x.

    .. math::
        h_i = \sum_{e=\mathrm{rowptr}_i}^{\mathrm{rowptr}_{i+1}-1} w_e \, c_{\mathrm{col}_e} \, x_{\mathrm{col}_e} \\
        q_{ic} = \min\Big(2^b - 1, \Big\lfloor \frac{h_{ic} - Z_i}{S_i} + u_{ic} \Big\rfloor\Big) \\
        h_{ic} \approx Z_i + S_i q_{ic}

    Source: SuperGCN, 2.4 and 7.3. Approximate: with a ``key``, u is uniform in [0, 1), a function of (seed, key of the
    row, column, F, b) alone, each value is within S of h, and the mean of ``Z + S q`` is h; without one, u is 1/2 and
    each value within S / 2. Z and S are the row's smallest value and a step of ``2^b - 1`` to its largest, rounded to
    bfloat16 outward (``csrc/formats/packed_rows.h`` has every step). ``bits=16`` rounds to bfloat16.
    A pattern with one entry a row gathers rows, and reads them where they lie.

    u has 16 bits, so the mean is low by less than ``2^-16 S``, beside a standard error of up to ``S / 200`` for 10,000
    draws (eight bits would be off by up to ``2^-9 S``, 0.4 of it). Eight of them are drawn for each value, and eight
    are another's: the q of two columns that share have a covariance of at most 2^-10, all others none.

    Shapes:
        - rowptr: ``[R + 1]`` int64, col: ``[E]`` int32
        - x: ``[M, F]`` float32, float64, bfloat16 or float16; copied unless its rows are contiguous
        - weight: ``[E]``, col_scale: ``[M]``, in the sum dtype of x (or its dtype)
        - key: ``[R]`` int64
        - out: as the output, contiguous, overwritten
        - output: uint8 ``[R, packed_row_bytes(F, bits)]``: Z and S, then the numbers

    Raises:
        NotFiniteError: a value is not finite, or a row's range exceeds float32 (16 bits: a value exceeds bfloat16). Of
            tensors on a device a later call raises it (:mod:`~pyg_dist.backend.ops.late_errors`). ``explain`` makes
            another error of it.
        DataError: a shape, a dtype or the pattern does not fit, or ``out`` shares memory with another argument.
    """
    x_MF = as_rows(x)
    if out is None:
        out = x.new_empty(max(rowptr.numel() - 1, 0), packed_row_bytes(x_MF.shape[1], bits), dtype=torch.uint8)
    factors, bad_row = (factor_of(weight, x), factor_of(col_scale, x)), rowptr.new_empty(1)
    call(native.quantize_csr_into.default, out, bad_row, rowptr, col, x_MF, *factors, bits, key, signed(seed))
    explain = explain or (lambda error: error)
    if not x.is_cpu:
        got = "NaN, an infinity or values out of range"  # the values may be others by now
        raise_later(bad_row, lambda row: explain(_not_finite(row, got, bits, is_finite=False)))
        return out
    row = int(bad_row)
    if row >= 0:
        raise explain(_refusal(row, rowptr, col, x_MF, bits, *factors))
    return out


def _refusal(
    row: int, rowptr: Tensor, col: Tensor, x: Tensor, bits: int, weight: Tensor | None, col_scale: Tensor | None
) -> NotFiniteError:
    """The error for a row that cannot be packed."""
    edges = slice(int(rowptr[row]), int(rowptr[row + 1]))
    source = col[edges].long()
    values = x[source].to(sum_dtype(x))
    for factor in (None if weight is None else weight[edges], None if col_scale is None else col_scale[source]):
        if factor is not None:
            values = values * factor[:, None]
    h = values.sum(0)
    is_finite = bool(h.isfinite().all())
    got = "NaN" if h.isnan().any() else "an infinity"
    if is_finite:
        got = f"values from {float(h.min()):.5g} to {float(h.max()):.5g}"
    return _not_finite(row, got, bits, is_finite)


def _not_finite(row: int, got: str, bits: int, is_finite: bool) -> NotFiniteError:
    limit = "bfloat16 holds 3.3895e+38" if bits == 16 else "float32 holds a range of 3.4028e+38"
    return NotFiniteError(
        f"quantize_csr: expected finite values in range, got {got} in row {row}: {limit}", row, got, is_finite
    )


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
        - out: ``[N, F]`` float32, float64, bfloat16 or float16; its rows may be apart
        - rowptr: ``[N + 1]`` int64, col: ``[E]`` int32
        - packed: uint8 ``[M, packed_row_bytes(F, bits)]``
        - weight: ``[E]``, row_scale: ``[N]``, in the sum dtype of ``out`` (or its dtype)
    """
    factors = (factor_of(weight, out), factor_of(row_scale, out))
    call(native.dequantize_csr_add.default, written_rows(out), rowptr, col, packed, *factors, bits)
    return out


meta_kernel("quantize_csr_into", "dequantize_csr_add")(nothing)
