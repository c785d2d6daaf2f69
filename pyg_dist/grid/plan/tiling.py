"""The grid layout: which rows and columns a rank of the mesh holds (pure functions).

A layout splits the positions of the nodes in one of the node orders over some axes, one after another (the first is the
coarsest), and columns over at most one; all other axes hold replicas. Splits are as even as they can be: any numbers of
nodes, columns and ranks fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from pyg_dist.grid.plan.mesh_shape import GRID_AXES, MeshShape


@dataclass(frozen=True)
class TileLayout:
    """How a matrix with a row per node is distributed over the mesh.

    Attributes:
        rows: the axes that split its rows, the coarsest split first.
        columns: the axis that splits its columns, or ``None``.
        order: the number of the node order.
    """

    rows: tuple[str, ...]
    columns: str | None
    order: int

    @property
    def distinct(self) -> tuple[str, ...]:
        """The axes along which ranks hold different elements."""
        return self.rows if self.columns is None else (*self.rows, self.columns)

    @cached_property
    def replicas(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same elements."""
        return tuple(axis for axis in GRID_AXES if axis not in self.distinct)

    def free_axis(self) -> str:
        """The one axis that is neither the coarsest row axis nor the column axis."""
        (axis,) = (a for a in GRID_AXES if a not in (self.rows[0], self.columns))
        return axis


WHOLE_ROWS = TileLayout(("x", "z", "y"), None, 0)
"""Every row on one rank: what labels and masks have, and what functions of whole rows work on."""
INPUT = TileLayout(("x", "z"), "y", 0)
"""Input features and embeddings: split over x and y, and over z as well (Plexus, 3.1)."""


def split(size: int, num_parts: int) -> list[int]:
    """The bounds of ``num_parts`` near-equal ranges: ``num_parts + 1`` numbers from 0 to ``size``."""
    return [size * part // num_parts for part in range(num_parts + 1)]


def nested_split(size: int, parts: Sequence[int]) -> list[int]:
    """The bounds of the ranges of a split whose ranges are split again, and so on."""
    bounds = [0, size]
    for num_parts in parts:
        bounds = [low + inner for low, high in pairwise(bounds) for inner in split(high - low, num_parts)[:-1]] + [size]
    return bounds


def nested_index(axes: Sequence[str], shape: MeshShape, coordinates: Mapping[str, int]) -> int:
    """The number of the range that falls on ``coordinates``."""
    index = 0
    for axis in axes:
        index = index * shape[axis] + coordinates[axis]
    return index


def row_range(num_nodes: int, layout: TileLayout, shape: MeshShape, coordinates: Mapping[str, int]) -> range:
    """The positions held at ``coordinates``."""
    low, high = 0, num_nodes  # of :func:`nested_split`, without the bounds of all others
    for axis in layout.rows:
        size, index, parts = high - low, coordinates[axis], shape[axis]
        low, high = low + size * index // parts, low + size * (index + 1) // parts
    return range(low, high)


def column_range(num_columns: int, layout: TileLayout, shape: MeshShape, coordinates: Mapping[str, int]) -> range:
    """The columns held at ``coordinates``."""
    if layout.columns is None:
        return range(num_columns)
    index, parts = coordinates[layout.columns], shape[layout.columns]
    return range(num_columns * index // parts, num_columns * (index + 1) // parts)


Sums = Literal["all_reduce", "reduce_scatter"]
"""How the two big sums of a layer go on: to all ranks (Plexus, Alg. 1), or each rank's piece to it alone."""


def tilings(sums: Sums) -> tuple[tuple[str, str], ...]:
    """The (row axis, column axis) of the adjacency tiles that layers use, the first layer's first.

    Layouts rotate with period three where sums go to all ranks (Plexus, 3.2), and with period two where they are
    scattered: the column axis then stays what it is.
    """
    two = (("z", "x"), ("x", "z"))
    return two if sums == "reduce_scatter" else (*two, ("y", "z"), ("z", "y"), ("x", "y"), ("y", "x"))
