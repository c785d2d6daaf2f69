"""Random numbers that are functions of (seed, key of the row, column) alone, and dropout by them."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend.local_function import Context
from pyg_dist.backend.ops.library import as_rows, call, like_first, like_rows, meta_kernel, native, signed


def keyed_dropout(x: Tensor, key: Tensor, p: float, seed: int, column_offset: int = 0) -> Tensor:
    r"""Dropout whose mask is a function of (seed, key of the row, column) alone; differentiable to any order.

    .. math::
        y_{ic} = \frac{x_{ic}}{1 - p} \, [\, \mathrm{word}(\mathrm{seed}, \mathrm{key}_i, c + \mathrm{offset})
        \ge p \, 2^{32} \,]

    The words come from Philox-4x32-10 (``csrc/formats/keyed.h``): the mask depends neither on ranks, threads and
    instruction sets nor on which other rows there are. Columns of ``x[i]`` are counted over its trailing dimensions.
    What is dropped is multiplied by zero, as in torch: a NaN or an infinity becomes NaN.

    Shapes:
        - x: ``[N, ...]`` float32, float64, bfloat16 or float16; copied unless contiguous
        - key: ``[N]`` int64, for instance global node ids
        - output: as x

    ``p`` is taken as a multiple of 2^-32, ``seed`` modulo 2^64. ``column_offset``: the number of the first column,
    where x is a block of the columns of a larger tensor.
    """
    rows = as_rows(x).contiguous()
    y: Tensor = call(native.keyed_dropout.default, rows, key.contiguous(), p, signed(seed), column_offset)
    return like_rows(y, x)


def keyed_uniform(
    key: Tensor, num_columns: int, seed: int, column_offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Uniform numbers in [0, 1), a function of (seed, key of the row, column) alone, as in :func:`keyed_dropout`.

    They are multiples of 2^-24 (float32), 2^-53 (float64), 2^-8 (bfloat16) or 2^-11 (float16); those of 16 bits are
    float32's rounded down. Shapes: ``[N]`` int64 ``-> [N, num_columns]`` of ``dtype``.
    """
    args = (key.contiguous(), num_columns, signed(seed), column_offset, dtype)
    return call(native.keyed_uniform.default, *args)


def keyed_normal(
    key: Tensor, num_columns: int, seed: int, column_offset: int = 0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Standard normal numbers, a function of (seed, key of the row, column) alone, as :func:`keyed_uniform`'s.

    Box-Muller in double precision (``csrc/formats/keyed.h``), then rounded; equal between machines up to the last bit
    of the C library's logarithm, sine and cosine. Shapes: ``[N] -> [N, num_columns]`` of ``dtype``.
    """
    args = (key.contiguous(), num_columns, signed(seed), column_offset, dtype)
    return call(native.keyed_normal.default, *args)


def keyed_permutation(place: Tensor, size: int, seed: int) -> Tensor:
    """Some entries of the permutation of ``[0, size)`` that a seed names: O(places), whatever the size.

    A Feistel network with cycle walking (``csrc/formats/permutation.h``; Black and Rogaway, "Ciphers with arbitrary
    finite domains", 2002). Integers alone: equal on every machine. The first k places are a sample of k numbers without
    replacement. ``size`` is 1 to 2^62. Shapes: int64 ``[k] -> [k]``.

    Example:
        >>> sorted(keyed_permutation(torch.arange(5), 5, seed=7).tolist())
        [0, 1, 2, 3, 4]
    """
    return call(native.keyed_permutation.default, place.contiguous(), size, signed(seed))


def sample_rows(
    rowptr: Tensor, col: Tensor, place: Tensor | None, row: Tensor, key: Tensor, count: int, seed: int,
    replace: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Some entries of rows of a pattern, drawn uniformly: a function of (seed, key of the row, its degree) alone.

    Without replacement by Floyd's algorithm (``csrc/cpu/sample_rows.h``): O(count) time a row, whatever its
    degree. Integers alone: equal on every machine.

    Shapes:
        - rowptr: int64 ``[num_rows + 1]``; col: int32 ``[num_entries]``; place: int32 or int64 ``[num_entries]``
        - row: int64 ``[k]``, which rows, in any order; key: int64 ``[k]``
        - output: int64 ``[k + 1]``, how many entries of the rows before; int32 ``[m]``, int64 ``[m]``: the columns
          and the places of these, in each row as they stand there

    ``place`` ``None`` stands for the numbers of the entries. A ``count`` of -1 are all entries of a row, which only a
    draw without replacement can be; there a row with fewer entries has them all. ``seed``: see :func:`mixed_seed`.

    Example:
        >>> rowptr, col = torch.tensor([0, 2, 7]), torch.tensor([4, 8, 3, 5, 6, 7, 9], dtype=torch.int32)
        >>> starts, columns, _ = sample_rows(rowptr, col, None, torch.tensor([1, 0]), torch.tensor([1, 0]), 2, seed=0)
        >>> starts.tolist(), columns[2:].tolist()
        ([0, 2, 4], [4, 8])
    """
    rows = row.contiguous(), key.contiguous()
    return call(native.sample_rows.default, rowptr, col, place, *rows, count, replace, signed(seed))


def mixed_seed(*numbers: int) -> int:
    """A seed of 64 bits in which every bit of every number (modulo 2^64) counts, and their order."""
    seed = 0
    for number in numbers:
        seed = mix(((seed ^ mix((number + _GOLDEN) & _WORD)) + _GOLDEN) & _WORD)
    return seed


_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(word: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): a permutation of the words of 64 bits."""
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _WORD
    return word ^ (word >> 31)


meta_kernel("keyed_dropout", "keyed_permutation")(like_first)


@meta_kernel("keyed_uniform", "keyed_normal")
def _(key: Tensor, num_columns: int, seed: int, column_offset: int, dtype: torch.dtype) -> Tensor:
    return key.new_empty(key.shape[0], num_columns, dtype=dtype)


def _setup_dropout(ctx: Context, inputs: tuple[object, ...], output: Tensor) -> None:
    _, key, ctx.p, ctx.seed, ctx.column_offset = inputs
    ctx.save_for_backward(key)


def _dropout_backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The map is linear and diagonal, so it is its own transpose."""
    (key,) = ctx.saved_tensors
    by_x = native.keyed_dropout.default(grad.contiguous(), key, ctx.p, ctx.seed, ctx.column_offset)
    return by_x, None, None, None, None


torch.library.register_autograd("pyg_dist::keyed_dropout", _dropout_backward, setup_context=_setup_dropout)
