"""Slow, readable twins of the native ops, in plain torch and NumPy: what the kernels are tested against.

Same arguments, shapes and dtypes as :mod:`pyg_dist.backend.ops`. Random words are those of ``csrc/kernels/philox.h``,
bit for bit.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_Words = npt.NDArray[np.uint64]  # 32-bit numbers; the products of two of them fit

_MASK = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_DROPOUT, _UNIFORM, _NORMAL = 0, 1, 2  # streams


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
    """``y[i] = row_scale[i] * sum_e weight[e] * col_scale[col[e]] * x[col[e]]``, added to or written into ``out``."""
    sums = _sum_dtype(x)
    if divide and col_scale is not None:
        x, col_scale = (x.to(sums) / _column(col_scale, x.to(sums))).to(x.dtype), None
    messages = x.to(sums)[col.long()]
    if weight is not None:
        messages = messages * _column(weight, messages)
    if col_scale is not None:
        messages = messages * _column(col_scale[col.long()], messages)
    num_rows = rowptr.numel() - 1
    y = messages.new_zeros(num_rows, *x.shape[1:]).index_add_(0, _row_of_edge(rowptr), messages)
    if row_scale is not None:
        y = y / _column(row_scale, y) if divide else y * _column(row_scale, y)
    if out is None:
        return y.to(x.dtype)
    return out.copy_(out.to(sums) + y if accumulate else y)


def sddmm_csr(rowptr: Tensor, col: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """``d[e] = <a[i], b[col[e]]>``."""
    products = a.to(_sum_dtype(a))[_row_of_edge(rowptr)] * b.to(_sum_dtype(b))[col.long()]
    return products.flatten(1).sum(1) if products.ndim > 1 else products


def extreme_csr(rowptr: Tensor, col: Tensor, x: Tensor, reduce: str) -> Tensor:
    """``y[i] = max_e x[col[e]]``, zero without edges."""
    y = x.new_zeros(rowptr.numel() - 1, x.shape[1])
    for i, (begin, end) in enumerate(zip(rowptr.tolist(), rowptr.tolist()[1:], strict=False)):
        if end > begin:
            y[i] = getattr(x[col[begin:end].long()], f"a{reduce}")(0)
    return y


def extreme_csr_shares(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, grad: Tensor) -> Tensor:
    """``s[i] = grad[i] / (number of ties + [y[i] == 0])``."""
    row = _row_of_edge(rowptr)
    ties = (x[col.long()] == y[row]).to(_sum_dtype(x))
    return grad.to(_sum_dtype(x)) / (y == 0).to(_sum_dtype(x)).index_add_(0, row, ties)


def extreme_csr_grad(rowptr: Tensor, col: Tensor, x: Tensor, y: Tensor, shares: Tensor) -> Tensor:
    """``d[j] = sum_e s[col[e]] [x[j] == y[col[e]]]`` over the transposed pattern."""
    row, target = _row_of_edge(rowptr), col.long()
    won = torch.where(x[row] == y[target], shares[target], torch.zeros_like(shares[:1]))
    return torch.zeros_like(x, dtype=shares.dtype).index_add_(0, row, won).to(x.dtype)


def gather_rows(x: Tensor, index: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``y[r] = x[index[r]]``."""
    return x[index] if out is None else out.copy_(x[index])


def scatter_add_rows(out: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """``out[index[r]] += rows[r]``, one r after the other."""
    for r, i in enumerate(index.tolist()):
        out[i] += rows[r]
    return out


def philox(seed: int, row_key: Tensor, block: _Words, stream: int) -> _Words:
    """Philox-4x32-10: ``[N]`` keys and ``[B]`` blocks give words ``[N, 4 B]``, those of one block side by side."""
    key = row_key.numpy().astype(np.uint64)[:, None]
    shape = (key.shape[0], block.size)
    c0, c1 = np.broadcast_to(key & _MASK, shape), np.broadcast_to(key >> _SHIFT, shape)
    c2, c3 = np.broadcast_to(block[None, :], shape), np.full(shape, stream, np.uint64)
    k0, k1 = seed % 2**32, (seed >> 32) % 2**32
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (p1 >> _SHIFT) ^ c1 ^ np.uint64(k0), p1 & _MASK
        c2, c3 = (p0 >> _SHIFT) ^ c3 ^ np.uint64(k1), p0 & _MASK
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return np.stack([c0, c1, c2, c3], axis=-1).reshape(shape[0], -1)


def _words(
    key: Tensor, num_columns: int, seed: int, column_offset: int, stream: int, words_each: int
) -> tuple[_Words, ...]:
    """The words of columns ``column_offset ...``: one or two arrays ``[N, num_columns]``."""
    per_block = 4 // words_each
    first = column_offset // per_block
    last = -(-(column_offset + num_columns) // per_block)
    words = philox(seed, key, np.arange(first, last, dtype=np.uint64), stream)
    skipped = (column_offset - first * per_block) * words_each
    words = words[:, skipped : skipped + num_columns * words_each]
    return tuple(words[:, w::words_each] for w in range(words_each))


def keyed_dropout(x: Tensor, key: Tensor, p: float, seed: int, column_offset: int = 0) -> Tensor:
    """``y = x / (1 - p)`` where the element's word is at least p 2^32, else zero."""
    threshold = round(p * 2**32)
    if threshold >= 2**32:
        return torch.zeros_like(x)
    rows = x.reshape(x.shape[0], -1) if x.numel() else x.new_empty(x.shape[0], 0)
    (words,) = _words(key, rows.shape[1], seed, column_offset, _DROPOUT, 1)
    keep = torch.from_numpy(words >= threshold)
    scale = torch.tensor(1 / (1 - p), dtype=_sum_dtype(x))
    y = torch.where(keep, rows.to(_sum_dtype(x)) * scale, torch.zeros((), dtype=_sum_dtype(x)))
    return y.to(x.dtype).view_as(x)


def row_epilogue(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    key: Tensor | None,
    norm: str | None,
    eps: float,
    relu: bool,
    p: float,
    seed: int,
    column_offset: int = 0,
) -> Tensor:
    """``dropout(relu(norm(x) * weight + bias))``, y alone; its gradients are autograd's."""
    z = x.to(_sum_dtype(x))
    if norm == "layer":
        z = z - z.mean(1, keepdim=True)
    if norm is not None:
        z = z * (z.square().mean(1, keepdim=True) + eps).rsqrt()
    z = z if weight is None else z * weight
    z = z if bias is None else z + bias
    z = z.relu() if relu else z
    if key is not None:
        z = z * keyed_dropout(torch.ones_like(z), key, p, seed, column_offset)
    return z.to(x.dtype)


def keyed_uniform(
    key: Tensor, num_columns: int, seed: int, column_offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The upper 24 (float32), 53 (float64) or 8 (bfloat16) bits of the element's words as a fraction."""
    if dtype == torch.float64:
        low, high = _words(key, num_columns, seed, column_offset, _UNIFORM, 2)
        return torch.from_numpy(((high << _SHIFT | low) >> np.uint64(11)) * 2.0**-53)
    (words,) = _words(key, num_columns, seed, column_offset, _UNIFORM, 1)
    bits = 24 if dtype == torch.float32 else 8
    return torch.from_numpy((words >> np.uint64(32 - bits)) * 2.0**-bits).to(dtype)


def keyed_normal(
    key: Tensor, num_columns: int, seed: int, column_offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Box-Muller on the uniforms of a pair of columns: cosine in the even one, sine in the odd one."""
    first, last = column_offset // 2, -(-(column_offset + num_columns) // 2)
    num_columns_of_pairs = 2 * (last - first)
    if dtype == torch.float64:
        low, high = _words(key, num_columns_of_pairs, seed, 2 * first, _NORMAL, 2)
        bits, each = (high << _SHIFT | low) >> np.uint64(11), 2.0**-53
    else:
        (bits,) = _words(key, num_columns_of_pairs, seed, 2 * first, _NORMAL, 1)
        each = 2.0**-32
    u, v = (bits[:, 0::2] + 1.0) * each, bits[:, 1::2] * each
    radius, angle = np.sqrt(-2 * np.log(u)), 2 * np.pi * v
    pairs = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(key.numel(), -1)
    skipped = column_offset - 2 * first
    return torch.from_numpy(pairs[:, skipped : skipped + num_columns].copy()).to(dtype)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _row_of_edge(rowptr: Tensor) -> Tensor:
    return torch.repeat_interleave(torch.arange(rowptr.numel() - 1), rowptr.diff())


def _column(factor: Tensor, rows: Tensor) -> Tensor:
    return factor.to(rows.dtype).view(-1, *(1,) * (rows.ndim - 1))
