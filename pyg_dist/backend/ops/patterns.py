"""Sparse patterns made from others, a maximum matching; lists of ids: distinct ones, places, bytes in messages."""

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


def bipartite_matching(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    """The column of each row in a maximum matching: the most entries of which no two share a row or a column.

    And which rows alternating paths, along entries and matched entries in turn, reach from rows without a column, and
    which columns from columns without a row: the same for each maximum matching (Dulmage and Mendelsohn, 1958).

    Exact, in O(E sqrt(V)) time for V rows and columns, and 20 bytes a row and a column and 4 an entry; one thread. Of
    several matchings of that size, which one depends on the order of the entries. An entry that is there several times
    counts once.

    Source: Hopcroft and Karp, An n^(5/2) algorithm for maximum matchings in bipartite graphs, 1973. Their first
    matching is empty; here each row first takes its first free column.

    Shapes:
        - rowptr: ``[n + 1]`` int64, col: ``[e]`` int32 in ``[0, num_cols)``: the pattern, which is checked
        - output: ``[n]`` int32, -1 where a row has no column; ``[n]`` and ``[num_cols]`` bool

    Example:
        >>> found = bipartite_matching(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0], dtype=torch.int32), 3)
        >>> [x.tolist() for x in found]
        [[1, 0], [False, False], [False, False, True]]
    """
    return call(native.bipartite_matching.default, rowptr.contiguous(), col.contiguous(), num_cols)


def distinct(known: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Where each value that is not known comes first, and the place of each value in the known ones and these.

    ``torch.cat([known, value[first]])[place]`` is ``value``, and ``value[first]`` ascends. By a hash table and a radix
    sort in O(n + k) time, by one thread (``csrc/cpu/distinct.h``).

    Shapes: int64 ``[n]``, distinct, int64 or int32 ``[k]`` -> int64 ``[m]``, ``[k]``, on the CPU.

    Example:
        >>> [x.tolist() for x in distinct(torch.tensor([7, 3]), torch.tensor([5, 3, 5, 4]))]
        [[3, 0], [3, 1, 3, 2]]
    """
    return call(native.distinct.default, known.contiguous(), value.contiguous())


def add_places(place_of: Tensor, value: Tensor, next: int, again: Tensor | None = None) -> Tensor:
    """The distinct values without a place, ascending; they get the places ``next``, ``next + 1`` and so on.

    So do those of ``again``, which have places, and are distinct. O(k) time, by one thread (``csrc/cpu/add_places.h``).

    Shapes:
        - place_of: int32 ``[span]``, the place of each value or -1; written to, unless there is an error
        - value: int64 or int32 ``[k]`` in ``[0, span)``; again: int64
        - output: int64 ``[m]``

    Example:
        >>> place_of = torch.tensor([-1, 0, -1, -1], dtype=torch.int32)
        >>> add_places(place_of, torch.tensor([3, 1, 0, 3]), 1).tolist(), place_of.tolist()
        ([0, 3], [1, 0, -1, 2])
    """
    return call(native.add_places.default, place_of, value.contiguous(), next, again)


def find_numbers(
    id: Tensor, count: Tensor, first: Tensor, given: Tensor, given_number: Tensor, value: Tensor
) -> Tensor:
    """The numbers of values, given lists of ids of groups; -1: a value is no such id.

    List ``i`` is of group ``i % G``. A group's ids, ascending, have the numbers ``first[g]``, ``first[g] + 1`` and so
    on; the ``given`` ones have ``given_number``. All ids are distinct. By maps of bits, or where ids are far apart by a
    radix sort and a hash table: O(m + s + n) time, by one thread (``csrc/cpu/find_numbers.h``).

    Shapes:
        - int64 on the CPU: id ``[m]``, list after list; count ``[lists]``; first ``[G]``; given, given_number ``[s]``;
          value ``[n]``
        - output: int64 ``[n]``

    Example:
        >>> id, count, first = torch.tensor([4, 9, 2]), torch.tensor([2, 1]), torch.tensor([1])
        >>> seed = torch.tensor([7]), torch.tensor([0])
        >>> find_numbers(id, count, first, *seed, torch.tensor([7, 2, 3, 9])).tolist()
        [0, 1, -1, 3]
    """
    arguments = (x.contiguous() for x in (id, count, first, given, given_number, value))
    return call(native.find_numbers.default, *arguments)


def encode_ids(rows: Tensor, count: Tensor, is_ascending: bool) -> tuple[Tensor, Tensor]:
    """The bytes of lists of rows of ids, and how many each list has: 1, 2, 3 or 8 for a number, and a quarter.

    Stream VByte (Lemire, Kurz and Rupp, 2018; ``csrc/cpu/id_lists.h``). In ascending lists the first column has
    differences to the row before. Negative numbers take eight bytes.

    Shapes:
        - rows: int64 ``[n, columns]``, list after list; count: int64 ``[lists]``, the rows of each
        - output: uint8 ``[bytes]``, int64 ``[lists]``

    Example:
        >>> [x.tolist() for x in encode_ids(torch.tensor([[300], [301], [4]]), torch.tensor([2, 1]), True)]
        [[172, 2, 1, 4], [3, 1]]
    """
    return call(native.encode_ids.default, rows.contiguous(), count.contiguous(), is_ascending)


def decode_ids(content: Tensor, num_bytes: Tensor, num_columns: int, is_ascending: bool) -> tuple[Tensor, Tensor]:
    """The rows of :func:`encode_ids`, and how many each list has.

    Example:
        >>> content, num_bytes = encode_ids(torch.tensor([[300], [301], [4]]), torch.tensor([2, 1]), True)
        >>> [x.tolist() for x in decode_ids(content, num_bytes, 1, True)]
        [[[300], [301], [4]], [2, 1]]
    """
    return call(native.decode_ids.default, content.contiguous(), num_bytes.contiguous(), num_columns, is_ascending)


@meta_kernel("find_sorted")
def _(sorted: Tensor, value: Tensor) -> Tensor:
    return torch.empty_like(value)


@meta_kernel("transpose_csr")
def _(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    return rowptr.new_empty(num_cols + 1), torch.empty_like(col), rowptr.new_empty(col.shape[0])


@meta_kernel("bipartite_matching")
def _(rowptr: Tensor, col: Tensor, num_cols: int) -> tuple[Tensor, Tensor, Tensor]:
    col_of = col.new_empty(rowptr.shape[0] - 1)
    return col_of, torch.empty_like(col_of, dtype=torch.bool), col.new_empty(num_cols, dtype=torch.bool)
