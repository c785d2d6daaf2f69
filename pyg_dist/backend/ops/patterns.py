"""Sparse patterns made from others, places in ascending lists, and a maximum matching."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend.ops.library import call, meta_kernel, native


def restrict_csr(
    rowptr: Tensor, col: Tensor, row: Tensor, column: Tensor, num_cols: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The entries of a pattern in some rows and columns, numbered by their places in the lists, and the transpose.

    One pass over the entries of the rows, whatever the number of the others is (ScaleGNN, Alg. 2, phases 2 and 3), and
    two over those that are kept. Entries of one row keep their order.

    Shapes:
        - rowptr: ``[n + 1]`` int64, col: ``[e]`` int32 in ``[0, num_cols)``: the pattern; columns are not checked
        - row: ``[b]`` int64, in any order
        - column: ``[c]`` int64, ascending
        - output: rowptr ``[b + 1]``, col ``[k]`` int32, and where each entry stood in the pattern ``[k]``; rowptr
          ``[c + 1]``, col ``[k]`` int32 of the transpose, and where each of its entries stands in the first ``[k]``

    Example:
        >>> rowptr, col = torch.tensor([0, 2, 3]), torch.tensor([1, 2, 0], dtype=torch.int32)
        >>> new_rowptr, new_col, entry, *_ = restrict_csr(rowptr, col, torch.tensor([0]), torch.tensor([0, 2]), 3)
        >>> new_rowptr, new_col, entry
        (tensor([0, 1]), tensor([1], dtype=torch.int32), tensor([1]))
    """
    args = (rowptr.contiguous(), col.contiguous(), row.contiguous(), column.contiguous(), num_cols)
    return call(native.restrict_csr.default, *args)


def transpose_csr(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed pattern, in O(entries + rows + columns) time. Every column is checked.

    Shapes:
        - rowptr: ``[n + 1]`` int64, col: ``[e]`` int32: the pattern
        - output: rowptr ``[num_cols + 1]``, col ``[e]`` int32, and where each entry stood in the first pattern ``[e]``,
          ascending in each row
    """
    return call(native.transpose_csr.default, rowptr.contiguous(), col.contiguous(), num_cols)


def equals_transpose_csr(rowptr: Tensor, col: Tensor) -> bool:
    """Whether a square pattern's transpose has the same ``rowptr`` and ``col``: columns ascend, and it is symmetric.

    In O(entries + rows) time and 8 bytes a row; it ends at the first entry that shows the contrary.
    Shapes: rowptr ``[n + 1]`` int64, col ``[e]`` int32.
    """
    return bool(call(native.equals_transpose_csr.default, rowptr.contiguous(), col.contiguous()))


def find_sorted(sorted: Tensor, value: Tensor) -> Tensor:
    """Where each value stands in an ascending list, which is not checked, or -1. Fastest where the values ascend, too.

    Shapes: int64 ``[n], [k] -> [k]``.
    """
    return call(native.find_sorted.default, sorted.contiguous(), value.contiguous())


def bipartite_matching(rowptr: Tensor, col: Tensor, num_cols: int) -> Tensor:
    """The column of each row in a maximum matching: the most entries of which no two share a row or a column.

    Exact, in O(E sqrt(V)) time for V rows and columns, and 20 bytes a row and 4 a column; one thread. Of several
    matchings of that size, which one depends on the order of the entries. An entry that is there several times counts
    once.

    Source: Hopcroft and Karp, An n^(5/2) algorithm for maximum matchings in bipartite graphs, 1973. Their first
    matching is empty; here each row first takes its first free column.

    Shapes:
        - rowptr: ``[n + 1]`` int64, col: ``[e]`` int32 in ``[0, num_cols)``: the pattern, which is checked
        - output: ``[n]`` int32, -1 where a row has no column

    Example:
        >>> bipartite_matching(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0], dtype=torch.int32), 2)
        tensor([1, 0], dtype=torch.int32)
    """
    return call(native.bipartite_matching.default, rowptr.contiguous(), col.contiguous(), num_cols)


@meta_kernel("find_sorted")
def _(sorted: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


@meta_kernel("transpose_csr")
def _(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    return rowptr.new_empty(num_cols + 1), torch.empty_like(col), rowptr.new_empty(col.shape[0])


@meta_kernel("bipartite_matching")
def _(rowptr: Tensor, col: Tensor, num_cols: int) -> Tensor:
    return col.new_empty(rowptr.shape[0] - 1)
