"""Pictures of plans, from their numbers: a heat map, and bars by rank (needs matplotlib); and pages with them."""

from __future__ import annotations

import html
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from pyg_dist.partition.solver import package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_BARS = 32
"""With more ranks, their numbers are drawn sorted, as steps: single bars would not be seen."""


class HeatMap(NamedTuple):
    """Numbers by two indices."""

    title: str  # above it
    rows: Sequence[Sequence[float]]  # the numbers, row by row
    unit: str  # of the numbers
    xlabel: str  # of columns
    ylabel: str  # of rows


class Bars(NamedTuple):
    """Numbers by rank."""

    title: str  # above it
    series: Mapping[str, Sequence[float]]  # numbers by rank, by the name in the legend; a single one has no legend
    unit: str = ""  # of the numbers
    is_stacked: bool = False  # whether the series of a rank stand on one another


def draw(path: str | Path, title: str, heat_map: HeatMap | None, *bars: Bars) -> None:
    """Write a picture to ``path``; the suffix (.png, .svg, .pdf) chooses the format."""
    num_panels = len(bars) + (heat_map is not None)
    figure = new_figure(4.6 * max(num_panels, 2), 4.4)
    panels = list(figure.subplots(1, num_panels, squeeze=False)[0])
    if heat_map is not None:
        first = panels.pop(0)
        image = first.imshow(heat_map.rows, cmap="viridis")
        figure.colorbar(image, ax=first, label=heat_map.unit)
        first.set(title=heat_map.title, xlabel=heat_map.xlabel, ylabel=heat_map.ylabel)
        _whole_numbers(first, "x", "y")
    for axes, panel in zip(panels, bars, strict=True):
        _draw_bars(axes, panel)
    figure.suptitle(title)
    figure.savefig(path)


def _draw_bars(axes: Axes, panel: Bars) -> None:
    """Bars by rank, or, of many ranks, each series sorted and drawn as steps."""
    num_ranks = max((len(values) for values in panel.series.values()), default=0)
    if num_ranks > MOST_BARS:
        for name, values in panel.series.items():
            axes.stairs(sorted(values, reverse=True), label=name, baseline=None)
        axes.set(title=panel.title, xlabel="ranks, each series sorted", ylabel=panel.unit, ylim=(0, None))
    else:
        width = 0.8 / (1 if panel.is_stacked else len(panel.series))
        below = [0.0] * num_ranks
        for number, (name, values) in enumerate(panel.series.items()):
            shift = 0.0 if panel.is_stacked else (number - (len(panel.series) - 1) / 2) * width
            places = [rank + shift for rank in range(len(values))]
            axes.bar(places, values, width=width, bottom=below if panel.is_stacked else None, label=name)
            below = [a + b for a, b in zip(below, values, strict=True)]
        axes.set(title=panel.title, xlabel="rank", ylabel=panel.unit)
        _whole_numbers(axes, "x")
    if len(panel.series) > 1:  # beside the bars, which it would hide
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")


def _whole_numbers(axes: Axes, *which: Literal["x", "y"]) -> None:
    """Ticks at integers alone: there is no rank 0.5."""
    from matplotlib.ticker import MaxNLocator

    for axis in which:
        getattr(axes, f"{axis}axis").set_major_locator(MaxNLocator(integer=True))


def number_ranks(axes: Axes, ranks: Sequence[int]) -> None:
    """Label an axis of ranks with these numbers, whatever its scale."""
    from matplotlib.ticker import NullLocator

    axes.set_xlabel("ranks")
    axes.set_xticks(list(ranks), [str(count) for count in ranks])
    axes.xaxis.set_minor_locator(NullLocator())


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches; not through pyplot, which keeps figures and opens windows."""
    pictures = package("matplotlib.figure", "to draw", "'pyg-dist[plot]'")
    return pictures.Figure(figsize=(width, height), layout="constrained")  # type: ignore[no-any-return]


_STYLE = "body{font-family:sans-serif;margin:2em;max-width:90em}pre{overflow-x:auto}svg{max-width:100%;height:auto}"


def write_page(path: str | Path, title: str, text: str, pictures: Sequence[Callable[[Path], None]]) -> None:
    """Write a page with the text as it is, and a picture by each function, which draws into an .svg file."""
    drawn = []
    with tempfile.TemporaryDirectory(prefix="pyg_dist") as folder:
        for number, draw in enumerate(pictures):
            file = Path(folder) / f"{number}.svg"
            draw(file)
            svg = file.read_text()
            drawn.append(svg[svg.index("<svg") :])
    name = html.escape(title)
    Path(path).write_text(
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title>\n'
        f"<style>{_STYLE}</style></head>\n"
        f"<body><h1>{name}</h1>\n<pre>{html.escape(text)}</pre>\n" + "\n".join(drawn) + "\n</body></html>\n"
    )
