"""NaN in attributes: how many, and where the first one is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class NanCount:
    """What is NaN in an attribute.

    Attributes:
        entries: numbers that are NaN.
        rows: nodes, or edges, with one.
        first: the global id of the first of these; -1 if there is none.
    """

    entries: int = 0
    rows: int = 0
    first: int = -1

    @staticmethod
    def of(values: Tensor, first_row: int = 0) -> NanCount:
        """Of rows, the first of which has the number ``first_row``. Not collective."""
        # A sum makes no temporary of its size, and is NaN where anything is.
        if not (values.is_floating_point() and values.numel() and values.detach().sum().isnan()):
            return NanCount()
        by_row = values.detach().reshape(len(values), -1).isnan().sum(1)
        rows = by_row.nonzero()
        if not len(rows):  # two infinities
            return NanCount()
        return NanCount(int(by_row.sum()), len(rows), int(rows[0]) + first_row)

    def __add__(self, other: NanCount) -> NanCount:
        """Both together, where ``other`` comes after this one."""
        first = self.first if self.rows else other.first
        return NanCount(self.entries + other.entries, self.rows + other.rows, first)

    def warning(self, name: str, kind: str, size: int) -> str:
        """A line about the attribute ``name`` of ``size`` nodes or edges, as ``kind`` says."""
        return (
            f"'{name}' is NaN at {self.rows} of {size} {kind}s, the first one {kind} {self.first} (entries: "
            f"{self.entries}): NaN spreads over the graph; fill these in, or pass allow_nan=True"
        )
