"""A sparse matrix's pattern in compressed rows, and its transpose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.errors import DataError, OptionError


@dataclass(frozen=True)
class CSR:
    """Pattern of a ``[num_rows, num_cols]`` sparse matrix.

    Attributes:
        rowptr: int64 ``[num_rows + 1]``.
        col: int32 ``[num_entries]``.
        edge: int64 ``[num_entries]``, where each entry's value lies in the caller's edge storage.
        num_cols: number of columns.
        is_identity: whether it was made as one.
    """

    rowptr: Tensor
    col: Tensor
    edge: Tensor
    num_cols: int
    is_identity: bool = False

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.rowptr.numel() - 1

    @property
    def num_entries(self) -> int:
        """Number of stored entries."""
        return self.col.numel()

    @staticmethod
    def from_edges(row: Tensor, col: Tensor, edge: Tensor | None, num_rows: int, num_cols: int) -> CSR:
        """Group entries by row; entries of one row keep their given order.

        Args:
            row: of each entry.
            col: of each entry.
            edge: where its value lies; None: values lie in the order of the entries given.
            num_rows: number of rows.
            num_cols: number of columns.

        Shapes:
            - row, col, edge: ``[num_entries]`` integers

        Raises:
            DataError: an entry lies outside of the matrix.
            OptionError: more rows or columns than 32 bits can number.
        """
        if max(num_rows, num_cols) > torch.iinfo(torch.int32).max:
            raise OptionError(
                f"Expected fewer than 2^31 rows and columns on one rank (got {num_rows}, {num_cols}): use more ranks"
            )
        if not (_all_below(row, num_rows) and _all_below(col, num_cols)):
            raise DataError(f"Expected entries with rows in [0, {num_rows}) and columns in [0, {num_cols}), got others")
        rowptr, order = ops.group_rows(row, num_rows)
        return CSR(rowptr, col.to(torch.int32)[order], order if edge is None else edge[order], num_cols)

    @staticmethod
    def identity(size: int, device: torch.device | str = "cpu") -> CSR:
        """One entry in every row, on the diagonal."""
        place = torch.arange(size + 1, device=device)
        return CSR(place, place[:-1].to(torch.int32), place[:-1], size, is_identity=True)

    def row(self) -> Tensor:
        """The row of each entry, int64 ``[num_entries]``."""
        return torch.repeat_interleave(torch.arange(self.num_rows, device=self.rowptr.device), self.rowptr.diff())

    @cached_property
    def transposed(self) -> CSR:
        """The pattern of the transposed matrix; ``edge`` still names the same values. Computed once and kept."""
        if self.is_identity:
            return self
        rowptr, col, entry = ops.transpose_csr(self.rowptr, self.col, self.num_cols)
        return CSR(rowptr, col, self.edge[entry], self.num_rows)

    def columns(self, low: int, high: int) -> CSR:
        """The pattern of the columns from ``low`` to ``high``, exclusive."""
        chosen = (self.col >= low) & (self.col < high)
        before = torch.zeros(self.num_entries + 1, dtype=torch.int64, device=self.col.device)
        torch.cumsum(chosen, 0, out=before[1:])
        return CSR(before[self.rowptr], self.col[chosen] - low, self.edge[chosen], high - low)

    def restricted(self, row: Tensor, column: Tensor) -> tuple[CSR, Tensor]:
        """Some rows and columns, whose values lie in the order of the entries, with the transpose.

        O(entries of the rows + num_cols / 64) time.

        Args:
            row: which, in any order.
            column: which, ascending.

        Returns:
            The pattern, and which entries of this one its entries are, int64.
        """
        rowptr, col, entry, turned_rowptr, turned_col, turned_entry = ops.restrict_csr(
            self.rowptr, self.col, row, column, self.num_cols
        )
        restricted = CSR(rowptr, col, torch.arange(col.numel()), column.numel())
        restricted.__dict__["transposed"] = CSR(turned_rowptr, turned_col, turned_entry, row.numel())
        return restricted, entry

    def to(self, device: torch.device | str) -> CSR:
        """The same pattern on ``device``."""
        return CSR(self.rowptr.to(device), self.col.to(device), self.edge.to(device), self.num_cols, self.is_identity)


def _all_below(numbers: Tensor, limit: int) -> bool:
    """Whether all numbers lie in ``[0, limit)``."""
    if numbers.numel() == 0:
        return True
    least, most = torch.aminmax(numbers)
    return int(least) >= 0 and int(most) < limit
