"""The minimum vertex cover of a bipartite graph: the fewest rows that carry all remote edges.

Seen from the traffic, the left vertices are rows that could be sent (a source, to one rank) and the right vertices are
partial sums that could be sent (for a target, from one rank). A cover picks one end at least of every edge.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.ops.memory import release_after
from pyg_dist.errors import OptionError

Array = np.ndarray[Any, Any]


class Cover(NamedTuple):
    """The chosen vertices, bool ``[L]`` and ``[R]``."""

    left: Tensor
    right: Tensor


def minimum_vertex_cover(
    left: Tensor, right: Tensor, num_left: int, num_right: int, prefer_left: Tensor | None = None
) -> Cover:
    r"""A minimum vertex cover, as large as a maximum matching (König). Exact, not collective, O(E sqrt(V)) time.

    With Z the left vertices that alternating paths reach from unmatched left ones, and Z' likewise on the right, every
    minimum cover holds the partners of Z and of Z' and not Z and Z' themselves (Dulmage and Mendelsohn, 1958). Between
    the other vertices, all matched, each connected component may take either side: ``prefer_left`` chooses. So the
    result depends on the graph and ``prefer_left`` alone and not on which maximum matching was found: ranks that see
    different parts of a graph agree on its components.

    Source: SuperGCN, Alg. 1, lines 1-3.

    Args:
        left: one end of each edge.
        right: the other end.
        num_left: L.
        num_right: R.
        prefer_left: whether to take the left side where both are minimum; the same for all vertices of a connected
            component. None: everywhere.

    Shapes:
        - left, right: ``[E]`` integers
        - prefer_left: bool ``[L]``
        - output: bool ``[L]``, bool ``[R]``

    Example:
        >>> minimum_vertex_cover(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2, 2)
        Cover(left=tensor([True, True]), right=tensor([False, False]))
    """
    if max(num_left, num_right, left.numel()) > torch.iinfo(torch.int32).max:  # SciPy's graphs count in 32 bits
        raise OptionError(
            f"Expected at most 2**31 - 1 remote edges in one cover (got {left.numel()}): use more ranks or "
            f"exchange='post'"
        )
    if left.numel() == 0:
        return Cover(torch.zeros(num_left, dtype=torch.bool), torch.zeros(num_right, dtype=torch.bool))
    row, col = (end.numpy().astype(np.int32, copy=False) for end in (left, right))
    right_of = _matching(row, col, num_left, num_right)
    release_after(row.size)
    left_of = np.full(num_right, -1, dtype=np.int32)
    is_matched = right_of >= 0
    left_of[right_of[is_matched]] = np.flatnonzero(is_matched)

    # Where each edge leads: across it, then back along the matching.
    from_left = _reached(row, left_of[col], right_of < 0)
    release_after(row.size)
    from_right = _reached(col, right_of[row], left_of < 0)
    in_left, in_right = np.zeros(num_left, dtype=bool), np.zeros(num_right, dtype=bool)
    in_right[right_of[from_left & is_matched]] = True
    in_left[left_of[from_right & (left_of >= 0)]] = True
    free = np.flatnonzero(is_matched & ~from_left & ~in_left)
    takes_left = np.ones(free.size, dtype=bool) if prefer_left is None else prefer_left.numpy()[free]
    in_left[free[takes_left]] = True
    in_right[right_of[free[~takes_left]]] = True
    return Cover(torch.from_numpy(in_left), torch.from_numpy(in_right))


def _matching(row: Array, col: Array, num_rows: int, num_cols: int) -> Array:
    """The column matched to each row in a maximum matching, or -1."""
    rowptr, end = _grouped(row, col, num_rows, num_cols)
    matched: Array = ops.bipartite_matching(rowptr, end, num_cols).numpy()
    return matched


def _reached(start: Array, end: Array, is_root: Array) -> Array:
    """Which vertices can be reached from the roots along the directed edges start -> end (end < 0: no edge)."""
    from scipy import sparse
    from scipy.sparse.csgraph import breadth_first_order  # at the import of pyg_dist it would be a third of its time

    size, leads = is_root.size, end >= 0
    rowptr, col = _grouped(start[leads], end[leads], size, size)
    begin, finish = rowptr.to(torch.int32).numpy(), col.numpy()
    del leads, rowptr, col
    release_after(finish.size)
    # One more vertex, with an edge to every root, makes it one search.
    finish = np.concatenate([finish, np.flatnonzero(is_root).astype(np.int32)])
    begin = np.append(begin, np.int32(finish.size))
    graph = sparse.csr_array((np.ones(finish.size), finish, begin), shape=(size + 1, size + 1))
    reached = np.zeros(size + 1, dtype=bool)
    reached[breadth_first_order(graph, size, return_predecessors=False)] = True
    return reached[:size]


def _grouped(start: Array, end: Array, num_rows: int, num_cols: int) -> tuple[Tensor, Tensor]:
    """Edges by their start: the first of each and one more, int64, and their ends, int32."""
    rowptr, col, _ = ops.csr_from_edges(torch.from_numpy(start), torch.from_numpy(end), None, num_rows, num_cols)
    return rowptr, col
