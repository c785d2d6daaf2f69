"""A maximum matching of a bipartite graph."""

from __future__ import annotations

from torch import Tensor

from pyg_dist.backend.ops.call import call, meta_kernel, native


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

    Raises:
        DataError: a column is outside of ``[0, num_cols)``, ``rowptr`` is none, or a dtype is wrong.
        UnsupportedError: a tensor is not a dense CPU tensor.

    Example:
        >>> bipartite_matching(torch.tensor([0, 2, 3]), torch.tensor([0, 1, 0], dtype=torch.int32), 2)
        tensor([1, 0], dtype=torch.int32)
    """
    return call(native.bipartite_matching.default, rowptr.contiguous(), col.contiguous(), num_cols)  # type: ignore[no-any-return]


@meta_kernel("bipartite_matching")
def _(rowptr: Tensor, col: Tensor, num_cols: int) -> Tensor:
    return col.new_empty(rowptr.shape[0] - 1)
