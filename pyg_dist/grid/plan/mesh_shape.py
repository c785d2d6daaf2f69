"""The grid layout's mesh, and the rows and columns that each of its ranks holds (pure functions).

Ranks are points of ``data x z x x x y``. They run y fastest, then x, z, data (Plexus, 4.2): neighbours on y are
neighbours in a machine, on which the planner's bandwidth formulas rely. The ranks of a *product* of axes differ only
in these axes.

A layout splits the positions of the nodes in one of the node orders over some axes, one after another (the first is the
coarsest), and columns over at most one; all other axes hold replicas. Splits are near-even, for any numbers of nodes,
columns and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from pyg_dist.backend.comm.topology import mesh_sizes
from pyg_dist.backend.comm.wires.wire import by_machine

GRID_AXES = ("x", "y", "z")
RANK_ORDER = ("y", "x", "z", "data")
"""The axes, fastest first."""


@dataclass(frozen=True)
class MeshShape:
    """The number of ranks along each axis: x, y, z of one grid (Plexus, 3.1), and how many such grids there are."""

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    @staticmethod
    def of(mesh: Mapping[str, int], num_ranks: int) -> MeshShape:
        """The shape of a user's ``mesh``; an axis left out is 1. Raises OptionError where it does not fit."""
        data, x, y, z = mesh_sizes("grid", ("data", *GRID_AXES), mesh, num_ranks)
        return MeshShape(x, y, z, data)

    def __str__(self) -> str:
        data = f"data={self.data} x " if self.data > 1 else ""
        return f"{data}x={self.x} x y={self.y} x z={self.z}"

    def __getitem__(self, axis: str) -> int:
        size: int = getattr(self, axis)
        return size

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.x * self.y * self.z * self.data

    def sizes(self, *axes: str) -> tuple[int, ...]:
        """The sizes of some axes."""
        return tuple([getattr(self, axis) for axis in axes])  # prices of all meshes read this a million times

    def stride(self, axis: str) -> int:
        """The difference between the numbers of two neighbours along ``axis``."""
        return math.prod(self.sizes(*RANK_ORDER[: RANK_ORDER.index(axis)]))

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinates of ``rank``, by axis."""
        place = {}
        for axis in RANK_ORDER:
            rank, place[axis] = divmod(rank, self[axis])
        return place

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at some coordinates; axes left out are 0."""
        rank = 0
        for axis in reversed(RANK_ORDER):
            rank = rank * self[axis] + coordinates.get(axis, 0)
        return rank


def in_order(ranks: Sequence[int], of_rank: Sequence[int]) -> list[list[int]]:
    """:func:`by_machine`, if ranks of a machine also follow one another, so that sums take two steps; else ``[]``."""
    found = by_machine(ranks, of_rank)
    return found if [rank for own in found for rank in own] == [*ranks] else []


def meshes(num_ranks: int) -> list[MeshShape]:
    """Every mesh of one data group with ``num_ranks`` ranks."""
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    return [MeshShape(x, y, num_ranks // (x * y)) for x in divisors for y in divisors if num_ranks % (x * y) == 0]


def nearest_cube(num_ranks: int) -> MeshShape:
    """The mesh whose sides differ least; the larger sides are those of rows, x and z."""
    return min(meshes(num_ranks), key=lambda m: (max(m.x, m.y, m.z) / min(m.x, m.y, m.z), m.y, m.x))


@dataclass(frozen=True)
class TileLayout:
    """How a matrix with a row per node is distributed over the mesh."""

    rows: tuple[str, ...]  # the axes that split its rows, the coarsest split first
    columns: str | None  # the axis that splits its columns, or ``None``
    order: int  # the number of the node order

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


class Tiling(NamedTuple):
    """A way to cut the adjacency matrix into tiles."""

    row_axis: str  # splits the targets
    column_axis: str  # splits the sources
    order: int  # the node order of the sources; the targets have the other one, if there are two

    @staticmethod
    def of(layout: TileLayout) -> Tiling:
        """The tiling that multiplies an x of this layout."""
        return Tiling(layout.free_axis(), layout.rows[0], layout.order)

    @property
    def third_axis(self) -> str:
        """The axis along which a tile has replicas."""
        (axis,) = (a for a in GRID_AXES if a not in (self.row_axis, self.column_axis))
        return axis

    def layouts(self, num_orders: int) -> tuple[TileLayout, TileLayout]:
        """The layouts of a tile's rows and of its columns."""
        return (
            TileLayout((self.row_axis,), None, num_orders - 1 - self.order),
            TileLayout((self.column_axis,), None, self.order),
        )


WHOLE_ROWS = TileLayout(("x", "z", "y"), None, 0)
"""Whole rows: the layout of labels and masks, and for functions that need whole rows."""
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
    """The number of the range at ``coordinates``."""
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
"""The form of a layer's two large sums: to all ranks (Plexus, Alg. 1), or scattered."""


def tilings(sums: Sums) -> tuple[tuple[str, str], ...]:
    """The (row axis, column axis) of the adjacency tiles that layers use, the first layer's first.

    Layouts rotate with period three for sums to all ranks (Plexus, 3.2), with period two for scattered sums.
    """
    two = (("z", "x"), ("x", "z"))
    return two if sums == "reduce_scatter" else (*two, ("y", "z"), ("z", "y"), ("x", "y"), ("y", "x"))
