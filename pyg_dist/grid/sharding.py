"""Shardings on the grid: rows and columns over the axes of a mesh, and the grid that makes all of them."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.redistribution import BlocksByRank, Redistribution
from pyg_dist.backend.comm.transport import Pending, Traffic, Transport
from pyg_dist.backend.dense.norm_relu_dropout import SplitRows
from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import DataError
from pyg_dist.graph.caches import AskedOfBatches
from pyg_dist.graph.protocol import NodeSharding
from pyg_dist.graph.sample import Subset
from pyg_dist.grid.collectives import Mesh, all_gather
from pyg_dist.grid.plan.mesh_shape import (
    GRID_AXES,
    WHOLE_ROWS,
    Sums,
    TileLayout,
    column_range,
    nested_index,
    nested_split,
)
from pyg_dist.grid.plan.node_order import (
    NodeOrder,
    RedistributionPlan,
    columns_between,
    held_positions,
    redistribution_plan,
)
from pyg_dist.tensor.sharding import RowSharding


class _RowsOfGrid(RowSharding):
    """Rows of a grid's nodes, whose ids are known in every layout."""

    grid: Grid
    _node_id: Tensor

    @property
    def global_id(self) -> Tensor:
        return self._node_id

    @property
    def position(self) -> Tensor:
        return self._node_id

    @property
    def num_rng_keys(self) -> int:
        return self.grid.num_rng_keys


class Tile(_RowsOfGrid):
    """The distribution of a matrix with a row per node over row axes and a column axis (one object per distribution).

    ``group`` are the ranks among which *elements* are distinct, so that a replica counts once for each element, not
    once for each rank that holds it. ``columns`` is this rank's range of the ``width`` columns.
    """

    def __init__(self, grid: Grid, layout: TileLayout, width: int) -> None:
        self._node_id = grid.node_ids(layout)
        super().__init__(grid.ranks(*layout.distinct), "tile", grid.num_nodes, grid.rng_key(self._node_id))
        self.grid = grid
        self.layout = layout
        self.width = width
        self.columns = column_range(width, layout, grid.mesh.grid_shape, grid.mesh.coordinates)

    @property
    def whole(self) -> RowSharding:
        """The grid's nodes."""
        return self.grid.node_sharding

    def __repr__(self) -> str:
        rows = "·".join(self.layout.rows)
        return f"{self.size} nodes x {self.width} columns, rows over {rows}, columns over {self.layout.columns}"

    @property
    def row_group(self) -> Group:
        return self.grid.ranks(*self.layout.rows)

    @property
    def column_group(self) -> Group:
        """The ranks with other columns of the same rows."""
        return self.grid.mesh.group(*(self.layout.columns or ()))

    @cached_property
    def column_sizes(self) -> list[int]:
        """Columns by rank of the column axis."""
        return self.grid.column_sizes(self.layout.columns, self.width)

    @property
    def split_rows(self) -> SplitRows | None:
        return None if self.column_group.size == 1 else SplitRows(self.column_group, self.column_sizes)

    @property
    def first_column(self) -> int:
        return self.columns.start

    def local_shape(self, width: int) -> tuple[int, int]:
        return self.num_local, len(self.columns)

    def global_shape(self, local: torch.Size) -> torch.Size:
        """``[N, width]``."""
        return torch.Size((self.size, self.width))

    def slice_columns(self, tensor: Tensor) -> Tensor:
        """The local columns (last dimension) of a replicated tensor; differentiable. All ranks raise, or none."""
        if tensor.shape[-1:] != (self.width,):
            raise DataError(
                f"Expected a value for each of {self.width} columns (got shape {list(tensor.shape)}): "
                f"make the layer with {self.width} features"
            )
        return self.copy_to_ranks(tensor)[..., self.columns.start : self.columns.stop]

    def gather_columns(self, values: Tensor) -> Tensor:
        transport = self.grid.transport(*(self.layout.columns or ()), exact=True)
        return all_gather(values, transport, self.column_sizes, 1)

    def slice(self, full: Tensor) -> Tensor:
        return self.slice_columns(full).index_select(0, on_device(self.global_id, full.device))

    def gather(self, local: Tensor) -> Tensor:
        whole_rows = self.grid.tile(WHOLE_ROWS, self.width)
        return self.grid.node_sharding.gather(self.to(local, whole_rows))

    def from_sharding(self, local: Tensor, before: RowSharding) -> Tensor | None:
        """The local tile of a matrix distributed as ``before``: tiles of the same grid and width, or whole rows."""
        if not isinstance(before, Tile) and local.shape[1:] == (self.width,):
            rows = self.grid.node_sharding.from_sharding(local, before)
            if rows is not None:
                local, before = rows, self.grid.tile(WHOLE_ROWS, self.width)
        fits = isinstance(before, Tile) and before.grid is self.grid and before.width == self.width
        return before.to(local, self) if fits else None  # type: ignore[attr-defined]

    def to_sharding(self, local: Tensor, after: RowSharding) -> Tensor | None:
        """The local rows of ``after``, if that is the grid's whole rows."""
        return self.to(local, self.grid.tile(WHOLE_ROWS, self.width)) if after is self.grid.node_sharding else None

    def to(self, local: Tensor, other: Tile, pending: Pending[Tensor] | None = None) -> Tensor:
        """The local tile of ``other``, of the same grid and width; differentiable (collective where they differ).

        ``pending``: the result of :meth:`start_to`, where it has been called.
        """
        return local if other is self else apply(self.grid.redistribution(self, other), local, pending)

    @torch.no_grad()
    def start_to(self, local: Tensor, other: Tile) -> Pending[Tensor]:
        """:meth:`to` another distribution, up to waiting for its messages (collective, no autograd)."""
        return self.grid.redistribution(self, other).start(local.detach())


class GridNodes(_RowsOfGrid, NodeSharding):
    """A grid's nodes as whole rows; messages of rows that go to edges are exact."""

    bits = (32, 32)

    @property
    def is_union(self) -> bool:
        return self.grid.is_union

    @property
    def sample(self) -> Subset | None:
        return self.grid.sample

    def __init__(self, grid: Grid) -> None:
        self._node_id = grid.node_ids(WHOLE_ROWS)
        super().__init__(grid.ranks(*GRID_AXES), grid.num_nodes, grid.rng_key(self._node_id))
        self.grid = grid
        self.counts_selections = grid.sample is None

    @property
    def first(self) -> int:
        return self.grid.first

    @property
    def traffic(self) -> Traffic:
        """Counts messages of rows that go to edges."""
        return self.grid.mesh.traffic_of(*GRID_AXES)


class Grid:
    """The mesh, the node orders, and every distribution over them, each made once.

    ``sums`` is the form of the two large sums, ``comm_dtype`` the dtype of their messages; ``num_blocks``: row blocks
    of an aggregation (Plexus, 5.2). ``first`` is the number of this data group's first node, where groups have nodes of
    their own (``is_union``); ``sample``: a batch's nodes; ``asked``: requests of batches of this grid's nodes.
    """

    first = 0
    is_union = False
    sample: Subset | None = None

    def __init__(
        self,
        mesh: Mesh,
        orders: tuple[NodeOrder, ...],
        sums: Sums,
        num_blocks: int = 1,
        comm_dtype: torch.dtype | None = None,
    ) -> None:
        self.mesh = mesh
        self.orders = orders
        self.sums: Sums = sums
        self.num_blocks = num_blocks
        self.comm_dtype = comm_dtype
        self.num_nodes = orders[0].num_nodes
        self._nodes: Any = None
        self._tiles: MutableMapping[tuple[TileLayout, int], Tile] = {}
        self._routes: dict[tuple[TileLayout, TileLayout], RedistributionPlan] = {}
        self._redistributions: dict[tuple[TileLayout, TileLayout, int], Redistribution] = {}
        self.asked = AskedOfBatches()

    def __deepcopy__(self, memo: object) -> Grid:
        return self  # immutable, apart from caches

    @property
    def node_sharding(self) -> GridNodes:
        """The nodes, as whole rows."""
        if self._nodes is None:
            self._nodes = GridNodes(self)
        return self._nodes  # type: ignore[no-any-return]

    @property
    def num_rng_keys(self) -> int:
        return self.num_nodes

    def rng_key(self, node: Tensor) -> Tensor:
        """The key of each node in dropout and random tensors."""
        return node

    def ranks(self, *axes: str) -> Group:
        """The ranks along these axes, with other rows, or other columns where an axis splits them."""
        return self.mesh.group(*axes)

    def tile(self, layout: TileLayout, width: int) -> Tile:
        """The distribution of ``width`` columns."""
        known = self._tiles.get((layout, width))
        if known is None:
            known = self._tiles[layout, width] = Tile(self, layout, width)
        return known

    def other_order(self, order: int) -> int:
        """The order of the rows of a product with x in ``order``."""
        return len(self.orders) - 1 - order

    def node_ids(self, layout: TileLayout) -> Tensor:
        """Global ids of this rank's rows."""
        return self.orders[layout.order].nodes(*self.held(layout))

    def held(self, layout: TileLayout) -> tuple[int, int]:
        """First and last position, exclusive, of this rank's rows."""
        return held_positions(self.orders, layout, self.mesh.grid_shape, self.mesh.coordinates)

    def owners(self, node: Tensor) -> tuple[Tensor, Tensor]:
        """The rank with each node's whole row, and the row's number there; nodes are counted from :attr:`first`."""
        shape, order = self.mesh.grid_shape, self.orders[WHOLE_ROWS.order]
        bounds = order.bounds(nested_split(order.num_split, shape.sizes(*WHOLE_ROWS.rows)))
        position, low = order.positions(node), host.tensor(bounds)
        block = torch.bucketize(position, low[1:-1], right=True)
        rank_of = host.empty(shape.size, dtype=torch.int64)
        for rank in range(shape.size):
            rank_of[nested_index(WHOLE_ROWS.rows, shape, shape.coordinates(rank))] = rank
        return rank_of[block], position - low[block]

    def row_sizes(self, layout: TileLayout, *axes: str) -> list[int]:
        """Rows by rank along ``axes``, the finest axes of the layout."""
        order = self.orders[layout.order]
        bounds = order.bounds(nested_split(order.num_split, self.mesh.shape.sizes(*layout.rows)))
        here = self.mesh.coordinates
        first = 0
        for name in layout.rows:
            first = first * self.mesh.shape[name] + (0 if name in axes else here[name])
        count = math.prod(self.mesh.shape.sizes(*axes))
        return [bounds[k + 1] - bounds[k] for k in range(first, first + count)]

    def column_sizes(self, axis: str | None, width: int) -> list[int]:
        """Columns by rank of ``axis``."""
        if axis is None:
            return [width]
        layout, shape = TileLayout((), axis, 0), self.mesh.grid_shape
        return [len(column_range(width, layout, shape, {axis: k})) for k in range(shape[axis])]

    def transport(self, *axes: str, exact: bool = False) -> Transport:
        """The messages along a product of axes; in the narrow dtype unless ``exact``."""
        return self.mesh.transport(*axes, dtype=None if exact else self.comm_dtype)

    def redistribution(self, before: Tile, after: Tile) -> Redistribution:
        """The change between two distributions of equal width."""
        key = before.layout, after.layout, before.width
        known = self._redistributions.get(key)
        if known is None:
            known = self._redistributions[key] = self._redistribution(before, after)
            # Replicas of a gradient are equal, too, and count once. The transpose is another object, without a
            # reference back: two that referred to each other would outlive a batch's graph.
            known.transposed = self._redistribution(after, before)
        return known

    def _redistribution(self, before: Tile, after: Tile) -> Redistribution:
        rows = self._route(before.layout, after.layout)
        shape = self.mesh.grid_shape
        places = [shape.coordinates(rank) for rank in range(shape.size)]

        def blocks(lists: tuple[Tensor | None, ...], mine: Tile, other: Tile) -> BlocksByRank:
            pieces = []
            for rank, rows in enumerate(lists):
                there = column_range(mine.width, other.layout, shape, places[rank])
                shared = columns_between(mine.columns, there)
                start = mine.columns.start
                pieces.append((rows if len(shared) else None, shared.start - start, shared.stop - start))
            return BlocksByRank(tuple(pieces), (mine.num_local, len(mine.columns)))

        return Redistribution(
            self.transport(*GRID_AXES, exact=True),
            blocks(rows.send, before, after),
            blocks(rows.receive, after, before),
        )

    def _route(self, before: TileLayout, after: TileLayout) -> RedistributionPlan:
        known = self._routes.get((before, after))
        if known is None:
            known = self._routes[before, after] = redistribution_plan(
                self.orders, self.mesh.grid_shape, self.mesh.rank, before, after
            )
        return known
