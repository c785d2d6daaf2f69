"""The process groups of the axes of the grid layout's mesh."""

from __future__ import annotations

from itertools import combinations

from pyg_dist.backend.comm.group import Group, group_within, world_group
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.grid.plan.mesh_shape import GRID_AXES, RANK_ORDER, MeshShape


class Mesh:
    """The axes of this process's mesh, and what was sent along them, by axes.

    ``rank`` is this rank's number in its grid (within its data group), ``coordinates`` its place by axis.
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
