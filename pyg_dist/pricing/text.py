"""Lines that commands print, no wider than a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 120


def fold(text: str) -> str:
    """Break lines that are too wide between words; what follows is indented."""
    return "\n".join(
        line if len(line) <= WIDTH else textwrap.fill(line, WIDTH, subsequent_indent="  ", break_long_words=False)
        for line in text.split("\n")
    )


def aligned(lines: Sequence[Sequence[str]], left: Sequence[int] = (), elastic: int | None = None) -> list[str]:
    """Columns of equal width.

    Args:
        lines: cells, the header first.
        left: columns that begin at the left; others end at the right.
        elastic: the column that is cut where the lines would be too wide.
    """
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    if elastic is not None:
        excess = sum(widths) + 2 * (len(widths) - 1) - WIDTH
        widths[elastic] = max(widths[elastic] - max(excess, 0), 8)
        lines = [[_cut(c, widths[k]) if k == elastic else c for k, c in enumerate(line)] for line in lines]
    return [
        "  ".join(c.ljust(w) if k in left else c.rjust(w) for k, (c, w) in enumerate(zip(line, widths, strict=True)))
        .rstrip()
        for line in lines
    ]  # fmt: skip


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."
