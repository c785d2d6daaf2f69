"""The shape of the grid layout's mesh: ranks as points of ``data x z x x x y``.

Ranks run y fastest, then x, z, data (Plexus, 4.2): neighbours on y are neighbours in a machine, and the bandwidth
formulas of the planner rest on it. A *product* of axes is the ranks that differ in those axes only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

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


def meshes(num_ranks: int) -> list[MeshShape]:
    """Every mesh of one data group with ``num_ranks`` ranks."""
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    return [MeshShape(x, y, num_ranks // (x * y)) for x in divisors for y in divisors if num_ranks % (x * y) == 0]


def nearest_cube(num_ranks: int) -> MeshShape:
    """The mesh whose sides differ least; the larger sides are those of rows, x and z."""
    return min(meshes(num_ranks), key=lambda m: (max(m.x, m.y, m.z) / min(m.x, m.y, m.z), m.y, m.x))
