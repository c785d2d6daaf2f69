"""The table of every rank's sizes, as a plan prints it."""

from __future__ import annotations

from collections.abc import Sequence

from pyg_dist.halo.plan.sizes import ShareSizes
from pyg_dist.pricing.base import aligned

_MOST_LINES = 32
"""With more ranks, a table has half as many: those with most to do."""

_COLUMNS = ("nodes", "inner", "edges", "halo_edges", "work", "rows_sent", "rows_received", "messages")


def imbalance(values: Sequence[int]) -> float:
    """Largest over mean: 1.0 is even."""
    return max(values) * len(values) / sum(values) if sum(values) else 1.0


def size_table(sizes: Sequence[ShareSizes]) -> list[str]:
    """A line for each rank, or for those with most to do; the sums; and the largest over the mean."""
    by_column = {name: [getattr(s, name) for s in sizes] for name in _COLUMNS}
    shown, header = list(range(len(sizes))), ["rank", *(name.replace("_", " ") for name in _COLUMNS)]
    if len(sizes) > _MOST_LINES:
        loads = (by_column[name] for name in ("work", "rows_sent", "rows_received"))
        share = [max(of_rank) for of_rank in zip(*(_shares(values) for values in loads), strict=True)]
        shown = sorted(shown, key=lambda rank: -share[rank])[: _MOST_LINES // 2]
    lines = [[str(rank), *(f"{values[rank]:,}" for values in by_column.values())] for rank in shown]
    if len(shown) < len(sizes):
        lines.append([f"+{len(sizes) - len(shown)}", *("..." for _ in _COLUMNS)])
        header[0] = "worst"
    lines.append(["all", *(f"{sum(values):,}" for values in by_column.values())])
    lines.append(["max/mean", *(f"{imbalance(values):.2f}" for values in by_column.values())])
    return aligned([header, *lines])


def _shares(values: Sequence[int]) -> list[float]:
    total = max(sum(values), 1)
    return [value / total for value in values]
