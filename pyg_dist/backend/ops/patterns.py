"""Sparse patterns made from others: some rows and columns, transposes, orders; and places in ascending lists."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend.ops.call import call, meta_kernel, native


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

    Raises:
        DataError: a row is outside of the pattern, columns do not ascend in ``[0, num_cols)``, or a dtype is wrong.
        UnsupportedError: a tensor is not a dense CPU tensor.

    Example:
        >>> rowptr, col = torch.tensor([0, 2, 3]), torch.tensor([1, 2, 0], dtype=torch.int32)
        >>> new_rowptr, new_col, entry, *_ = restrict_csr(rowptr, col, torch.tensor([0]), torch.tensor([0, 2]), 3)
        >>> new_rowptr, new_col, entry
        (tensor([0, 1]), tensor([1], dtype=torch.int32), tensor([1]))
    """
    args = (rowptr.contiguous(), col.contiguous(), row.contiguous(), column.contiguous(), num_cols)
    return call(native.restrict_csr.default, *args)  # type: ignore[no-any-return]


def transpose_csr(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """The transposed pattern, in O(entries + rows + columns) time. Every column is checked.

    Shapes:
        - rowptr: ``[n + 1]`` int64, col: ``[e]`` int32: the pattern
        - output: rowptr ``[num_cols + 1]``, col ``[e]`` int32, and where each entry stood in the first pattern ``[e]``,
          ascending in each row

    Raises:
        DataError: a column is outside of ``[0, num_cols)``, ``rowptr`` is none, or a dtype is wrong.
        UnsupportedError: a tensor is not a dense CPU tensor.

    Example:
        >>> transpose_csr(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0], dtype=torch.int32), 2)
        (tensor([0, 2, 3]), tensor([0, 1, 0], dtype=torch.int32), tensor([0, 2, 1]))
    """
    return call(native.transpose_csr.default, rowptr.contiguous(), col.contiguous(), num_cols)  # type: ignore[no-any-return]


def equals_transpose_csr(rowptr: Tensor, col: Tensor) -> bool:
    """Whether a square pattern's transpose has the same ``rowptr`` and ``col``: columns ascend, and it is symmetric.

    In O(entries + rows) time and 8 bytes a row; it ends at the first entry that shows the contrary.

    Shapes:
        - rowptr: ``[n + 1]`` int64, col: ``[e]`` int32

    Raises:
        DataError: ``rowptr`` is none, or a dtype is wrong.
        UnsupportedError: a tensor is not a dense CPU tensor.

    Example:
        >>> equals_transpose_csr(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0], dtype=torch.int32))
        True
    """
    return bool(call(native.equals_transpose_csr.default, rowptr.contiguous(), col.contiguous()))


def find_sorted(sorted: Tensor, value: Tensor) -> Tensor:
    """Where each value stands in an ascending list, or -1. Fastest where the values ascend, too, even in pieces.

    Shapes:
        - sorted: ``[n]`` int64, ascending, which is not checked
        - value: ``[k]`` int64
        - output: ``[k]`` int64

    Raises:
        DataError: a shape or dtype is wrong.
        UnsupportedError: a tensor is not a dense CPU tensor.

    Example:
        >>> find_sorted(torch.tensor([2, 3, 7]), torch.tensor([3, 4, 7]))
        tensor([ 1, -1,  2])
    """
    return call(native.find_sorted.default, sorted.contiguous(), value.contiguous())  # type: ignore[no-any-return]


@meta_kernel("find_sorted")
def _(sorted: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


@meta_kernel("transpose_csr")
def _(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    return rowptr.new_empty(num_cols + 1), torch.empty_like(col), rowptr.new_empty(col.shape[0])
