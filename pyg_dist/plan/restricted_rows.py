"""Some rows and columns of a sparse matrix, with the columns numbered anew (ScaleGNN, Alg. 2, phases 2 and 3)."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.plan.sample import contains


def restricted_rows(csr: CSR, row: Tensor, new_col: Tensor, num_cols: int) -> CSR:
    """Some rows of a pattern, and of their entries those whose column has a new number; ``edge`` stays.

    Not collective; O(entries of the rows) time.

    Shapes:
        - row: int64 ``[b]``
        - new_col: int32 ``[csr.num_cols]``, below ``num_cols``; -1: none
    """
    entry, ends = _entries(csr, row)
    col = new_col[csr.col[entry].long()]
    chosen = col >= 0
    before = torch.zeros(entry.numel() + 1, dtype=torch.int64)
    torch.cumsum(chosen, 0, out=before[1:])
    rowptr = before[torch.cat([ends.new_zeros(1), ends])]
    return CSR(rowptr, col[chosen], csr.edge[entry[chosen]], num_cols)


def edges_between(csr: CSR, node_id: Tensor) -> Tensor:
    """Ascending places (``edge``) of the entries of a square pattern whose row and column are in an ascending list.

    Not collective; O(entries of the rows times log B) time, whatever the number of rows is.
    """
    entry, _ = _entries(csr, node_id)
    return csr.edge[entry[contains(node_id, csr.col[entry].long())]].sort().values


def _entries(csr: CSR, row: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of some rows, row by row, and where each row ends among them."""
    first = csr.rowptr[row]
    count = csr.rowptr[row + 1] - first
    ends = torch.cumsum(count, 0)
    entry = torch.arange(int(ends[-1]) if row.numel() else 0)
    entry += torch.repeat_interleave(first - ends + count, count)
    return entry, ends
