"""Pictures of plans, from their numbers: a heat map, and bars by rank (needs matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pyg_dist.errors import MissingPackageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class HeatMap(NamedTuple):
    """Numbers by two indices.

    Attributes:
        title: above it.
        rows: the numbers, row by row.
        unit: of the numbers.
        xlabel: what columns are.
        ylabel: what rows are.
    """

    title: str
    rows: Sequence[Sequence[float]]
    unit: str
    xlabel: str
    ylabel: str


class Bars(NamedTuple):
    """Numbers by rank.

    Attributes:
        title: above it.
        series: numbers by rank, by what they are; a single one has no legend.
        unit: of the numbers.
    """

    title: str
    series: Mapping[str, Sequence[float]]
    unit: str = ""


def draw(path: str | Path, title: str, heat_map: HeatMap, *bars: Bars) -> None:
    """Write a picture to ``path``; the suffix (.png, .svg, .pdf) chooses the format.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure = new_figure(13, 4.2)
    first, *others = figure.subplots(1, 1 + len(bars))
    image = first.imshow(heat_map.rows, cmap="viridis")
    figure.colorbar(image, ax=first, label=heat_map.unit)
    first.set(title=heat_map.title, xlabel=heat_map.xlabel, ylabel=heat_map.ylabel)
    for axes, panel in zip(others, bars, strict=True):
        width = 0.8 / len(panel.series)
        for number, (name, values) in enumerate(panel.series.items()):
            shift = (number - (len(panel.series) - 1) / 2) * width
            axes.bar([rank + shift for rank in range(len(values))], values, width=width, label=name)
        axes.set(title=panel.title, xlabel="rank", ylabel=panel.unit)
        if len(panel.series) > 1:
            axes.legend()
    figure.suptitle(title)
    figure.savefig(path)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; not through pyplot, which keeps figures and opens windows.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            f"Expected matplotlib to draw (got: {error}); pip install 'pyg-dist[plot]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")
