"""The mesh of the grid layout: ranks as points of ``data x z x x x y``, and the process groups of its axes.

Ranks run y fastest, then x, z, data (Plexus, 4.2): neighbours on y are neighbours in a machine, and the bandwidth
formulas of the planner rest on it. A *product* of axes is the ranks that differ in those axes only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations

from pyg_dist.backend.comm.group import Group, group_within, world_group
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.errors import OptionError

GRID_AXES = ("x", "y", "z")
RANK_ORDER = ("y", "x", "z", "data")
"""The axes, fastest first."""


@dataclass(frozen=True)
class MeshShape:
    """The number of ranks along each axis.

    Attributes:
        x, y, z: the axes of one grid (Plexus, 3.1).
        data: how many such grids there are.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1

    @staticmethod
    def of(mesh: Mapping[str, int], num_ranks: int) -> MeshShape:
        """The shape that a user's ``mesh`` names; an axis left out is 1.

        Raises:
            OptionError: An unknown axis, a size that is no positive integer, or sizes that do not multiply to the
                number of ranks.
        """
        for axis, size in mesh.items():
            if axis not in RANK_ORDER:
                raise OptionError(
                    f"Expected the axes of a grid mesh to be 'data', 'x', 'y' and 'z' (got {axis!r}): rename it"
                )
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise OptionError(
                    f"Expected mesh axis {axis!r} to be a positive integer (got {size!r}): leave it out or 1"
                )
        shape = MeshShape(**mesh)
        if shape.size != num_ranks:
            raise OptionError(
                f"Expected a mesh of {num_ranks} ranks (got {shape}, which makes {shape.size}): "
                f"choose sizes whose product is {num_ranks}, or mesh=None"
            )
        return shape

    def __str__(self) -> str:
        data = f"data={self.data} x " if self.data > 1 else ""
        return f"{data}x={self.x} x y={self.y} x z={self.z}"

    def __getitem__(self, axis: str) -> int:
        return getattr(self, axis)  # type: ignore[no-any-return]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.x * self.y * self.z * self.data

    def sizes(self, *axes: str) -> tuple[int, ...]:
        """The sizes of some axes."""
        return tuple([getattr(self, axis) for axis in axes])  # prices of all meshes read this a million times

    def stride(self, axis: str) -> int:
        """How far apart the numbers of two ranks are that are neighbours along ``axis``."""
        return math.prod(self.sizes(*RANK_ORDER[: RANK_ORDER.index(axis)]))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands, by axis."""
        place = {}
        for axis in RANK_ORDER:
            rank, place[axis] = divmod(rank, self[axis])
        return place

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Which rank stands there; axes left out are 0."""
        rank = 0
        for axis in reversed(RANK_ORDER):
            rank = rank * self[axis] + coordinates.get(axis, 0)
        return rank


class Mesh:
    """The axes of this process's mesh, and what was sent along them.

    Args:
        shape: its size is the number of ranks.

    Attributes:
        rank: this rank's number in its grid (within its data group).
        coordinates: this rank's place by axis.
        traffic: bytes and messages that this rank has handed to the process groups, by axes.
    """

    def __init__(self, shape: MeshShape) -> None:
        self.shape = shape
        self.coordinates = shape.coordinates(world_group().rank)
        self.grid_shape = MeshShape(shape.x, shape.y, shape.z)
        self.rank = self.grid_shape.rank(self.coordinates | {"data": 0})
        self.traffic: dict[tuple[str, ...], Traffic] = {}
        self._groups: dict[frozenset[str], Group] = {}

    def __deepcopy__(self, memo: object) -> Mesh:
        return self  # it holds connections

    def group(self, *names: str) -> Group:
        """The ranks that differ from this one in the axes ``names`` only (collective over all ranks at the first use).

        One object per set of ranks, so that gradients share buckets. Its ranks are numbered in rank order.
        """
        key = frozenset(name for name in names if self.shape[name] > 1)
        if key not in self._groups:
            self._groups[key] = group_within(self.rank_lists(*key)) if key else Group()
        return self._groups[key]

    def connect_data_groups(self) -> None:
        """Make the groups of products of axes with ``data``, where there are several (collective over all ranks)."""
        for count in range(len(GRID_AXES) + 1 if self.shape.data > 1 else 0):
            for names in combinations(GRID_AXES, count):
                self.group(*names, "data")

    def traffic_of(self, *names: str) -> Traffic:
        """The counter of what this rank sends along a product of axes."""
        return self.traffic.setdefault(tuple(sorted(names)), Traffic())

    def rank_lists(self, *names: str) -> list[list[int]]:
        """The ranks of every group along a product of axes."""
        groups: dict[tuple[int, ...], list[int]] = {}
        fixed = [axis for axis in RANK_ORDER if axis not in names]
        for rank in range(self.shape.size):
            place = self.shape.coordinates(rank)
            groups.setdefault(tuple(place[axis] for axis in fixed), []).append(rank)
        return list(groups.values())


def meshes(num_ranks: int) -> list[MeshShape]:
    """Every mesh of one data group with ``num_ranks`` ranks."""
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    return [MeshShape(x, y, num_ranks // (x * y)) for x in divisors for y in divisors if num_ranks % (x * y) == 0]


def nearest_cube(num_ranks: int) -> MeshShape:
    """The mesh whose sides differ least; the larger sides are those of rows, x and z."""
    return min(meshes(num_ranks), key=lambda m: (max(m.x, m.y, m.z) / min(m.x, m.y, m.z), m.y, m.x))
