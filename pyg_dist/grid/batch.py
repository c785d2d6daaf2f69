"""The nodes and the tiles of a batch on the grid: each rank restricts its own part of the graph, without a message.

With the probabilities of a sample's pairs, the tiles are those of the graph's operators at the sample, ``w_ij / p_ij``
off the diagonal and ``w_ii`` on it (ScaleGNN, III-D, eq. 23-24, and IV-B).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.dense import indexed_rows
from pyg_dist.backend.on_device import copied_to, on_device
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.graph.edge_sets import refuse_learning_weights, refuse_other_weights
from pyg_dist.graph.protocol import Norm
from pyg_dist.graph.sample import Subset
from pyg_dist.grid.adjacency import AdjacencyTile, Entries
from pyg_dist.grid.operator import GridOperator, TiledOperator
from pyg_dist.grid.plan.mesh_shape import WHOLE_ROWS, TileLayout, Tiling
from pyg_dist.grid.plan.node_order import RedistributionPlan, SampledOrder
from pyg_dist.grid.products import GridProducts, learns
from pyg_dist.grid.sharding import Grid, GridNodes, Tile
from pyg_dist.grid.tile_tensor import TileTensor
from pyg_dist.tensor.row_index import PickedNodes, origin_of
from pyg_dist.tensor.row_tensor import EdgeTensor, RowTensor, local_tensors
from pyg_dist.tensor.sharding import lasting


class SampledGrid(Grid):
    """Rows stay on the ranks that have them in the graph, and every rank knows all their counts (ScaleGNN, IV-B).

    Nodes are numbered by their places in the sample, and have their keys of the graph. With several data groups, rows
    are those of the union of all samples, while products stay inside a group. Objects that refer to this grid are held
    weakly, so that it is freed with its last user.
    """

    sample: Subset

    def __init__(self, parent: Grid, sample: Subset) -> None:
        orders = tuple(SampledOrder.at(order, sample.node_id, sample.number) for order in parent.orders)
        super().__init__(parent.mesh, orders, parent.sums, parent.num_blocks, parent.comm_dtype)
        self.parent, self.sample = parent, sample
        self.num_nodes, self.first = sample.size, sample.first
        self.is_union = sample.group is not None
        self._sampled_orders = orders
        self._tiles = weakref.WeakValueDictionary()

    @property
    def node_sharding(self) -> GridNodes:
        nodes = None if self._nodes is None else self._nodes()
        if nodes is None:
            nodes = GridNodes(self)
            self._nodes = weakref.ref(nodes)
        return nodes

    @property
    def num_rng_keys(self) -> int:
        of_groups = self.parent.num_rng_keys * (1 if self.sample.group is None else self.sample.group.index + 1)
        return max(of_groups, self.num_nodes)

    def rng_key(self, node: Tensor) -> Tensor:
        """See :class:`~pyg_dist.grid.sharding.Grid`; a node has another key in each data group."""
        key = node if self.sample.repeats else self.parent.rng_key(self.parent_id(node))
        return key if self.sample.group is None else key + self.sample.group.index * self.parent.num_rng_keys

    def parent_id(self, node: Tensor) -> Tensor:
        """The ids in the graph of some of this data group's nodes."""
        return self.sample.node_id[self.listed(node)]

    def listed(self, node: Tensor) -> Tensor:
        """The places in the subset of some of this data group's nodes."""
        number = self.sample.number
        return node - self.first if number is None else torch.searchsorted(number, node)

    def node_ids(self, layout: TileLayout) -> Tensor:
        """See :class:`~pyg_dist.grid.sharding.Grid`; places in the union of all samples."""
        return super().node_ids(layout) + self.first

    def ranks(self, *axes: str) -> Group:
        """See :class:`~pyg_dist.grid.sharding.Grid`; of all data groups, which hold other rows."""
        return self.mesh.group(*axes) if self.sample.group is None else self.mesh.group(*axes, "data")

    def tile(self, layout: TileLayout, width: int) -> Tile:
        self.parent.asked.note((layout, width), lambda batch, _: batch.tile_ahead(layout, width))
        return super().tile(layout, width)

    def _route(self, before: TileLayout, after: TileLayout) -> RedistributionPlan:
        self.parent.asked.note((before, after), lambda batch, _: batch.route_ahead(before, after))
        return super()._route(before, after)

    def picked(self, device: torch.device) -> PickedTiles:
        """``n_id``: the nodes' global ids, over these rows."""
        source, rows = self.parent.node_sharding, self.node_sharding
        picked = PickedTiles.of(self.parent_id(rows.global_id).to(device), rows, source, self.places(WHOLE_ROWS))
        picked.grid, picked.listed = self, self.listed(rows.global_id)
        picked.replicas = None if self.sample.group is None else self.mesh.group("data")
        return picked

    def places(self, layout: TileLayout) -> Tensor:
        """The graph's local rows in ``layout`` that are in the sample, ascending, int64 (not collective)."""
        (low, high), (first, _) = self.held(layout), self.parent.held(layout)
        return self._sampled_orders[layout.order].parent_position[low:high] - first


class PickedTiles(PickedNodes):
    """``n_id`` of a batch on the grid: picks whole rows, and rows of tiles."""

    grid: SampledGrid

    def on(self, device: torch.device) -> PickedTiles:
        moved = super().on(device)
        moved.grid = self.grid
        return moved

    def fetch(self, x: RowTensor) -> RowTensor:
        if not isinstance(x, TileTensor) or x._sharding.grid is not self.grid.parent:
            return super().fetch(x)
        layout = x._sharding.layout
        with local_tensors():
            local = indexed_rows.select(self.entered(x), copied_to(self.grid.places(layout), x.device))
            return self.noted(RowTensor.from_local(local, self.grid.tile(layout, x._sharding.width)), x)


class ProductsAtSample(GridProducts):
    """The products of a batch; ``parent`` is the whole graph."""

    parent: GridProducts
    _sample: Subset
    _sampled_grid: SampledGrid

    @lasting
    def adjacency(self, layout: TileLayout) -> AdjacencyTile:
        """See :class:`~pyg_dist.grid.graph.GridGraph` (collective where the graph has not used the tile)."""
        tiling = Tiling.of(layout)
        if tiling not in self._adjacency:
            self._adjacency[tiling] = self._tile(tiling, self._entries_at_sample(self.parent.adjacency(layout)))
            # The graph has its own tile now: no messages.
            self.parent.asked.note(layout, lambda batch, _: batch.adjacency(layout).csr.transposed)
        return self._adjacency[tiling]

    def _entries_at_sample(self, whole: AdjacencyTile) -> Entries:
        kept = self._sample.kept
        if kept is None:
            pattern, entry = whole.csr.restricted(*self._tile_places(whole))
            order = torch.argsort(whole.csr.places(entry))  # by ascending id, the order in which values arrive
            return pattern.on_host.row()[order].int(), pattern.on_host.col[order]
        ends = list(zip((kept.target, kept.source), whole.layouts, strict=True))
        row, column = (self.grid.orders[layout.order].positions(node) for node, layout in ends)
        (row_low, row_high), (low, high) = (self.grid.held(layout) for _, layout in ends)
        inside = (row >= row_low) & (row < row_high) & (column >= low) & (column < high)
        return (row[inside] - row_low).int(), (column[inside] - low).int()

    def _tile_places(self, tile: AdjacencyTile) -> tuple[Tensor, Tensor]:
        """The rows and columns of the graph's tile that are in the sample."""
        row, column = map(self._sampled_grid.places, tile.layouts)
        return row, column

    def operator(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> TiledOperator:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.operator`.

        GCN's norm needs the degrees of the whole graph, so it takes no weights that learn or are no attribute of it.
        """
        if self._sample.scale is None:
            return super().operator(norm, weight, dtype)
        known = origin_of(weight)
        origin: Any = None if known is None else known[0]
        if weight is None or (origin is not None and not learns(weight)):
            whole = self.parent.operator(norm, origin, dtype)

            def build(layout: TileLayout) -> GridOperator:
                tile = whole.tile(layout)
                made = self._rescaled(tile, dtype, layout)
                ahead = lambda batch, weight: batch.operator_ahead(norm, tile, weight, dtype, layout)  # noqa: E731
                self.parent.asked.note((norm, dtype, layout), ahead, origin)
                return made

            return TiledOperator(norm, False, self._kept((norm, dtype), weight, build))
        if norm.kind == "gcn":
            raise refuse_learning_weights() if learns(weight) else refuse_other_weights()
        source, target = self._sampled_grid.parent_id(self.edge_index)
        factor = copied_to(self._sample.pairs.factor(source, target, dtype), self.device)
        scaled = EdgeTensor.from_local(weight.to_local().to(dtype) * factor, self.edge_sharding)
        whole = self.parent.operator(norm, None, dtype)
        made = self._tiles((norm, learns(weight), dtype), scaled, dtype, partial(self._own_weights, whole))
        return TiledOperator(norm, learns(weight), made)

    def _kept(
        self, key: object, weight: RowTensor | None, build: Callable[[TileLayout], GridOperator]
    ) -> Callable[[TileLayout], GridOperator]:
        """The operator by layout of x."""

        def of(layout: TileLayout) -> GridOperator:
            return self._operators.get((key, Tiling.of(layout)), weight, lambda: build(layout))

        return of

    def make_ahead(self, weights: Iterable[RowTensor]) -> None:
        of_grid = self._sampled_grid.parent.asked.make_ahead(self)
        self._made_ahead = *of_grid, *self.parent.asked.make_ahead(self, weights)  # tiles go with their last user

    def tile_ahead(self, layout: TileLayout, width: int) -> Tile:
        """Make a tile of the grid, with its keys on the device."""
        tile = self._sampled_grid.tile(layout, width)
        on_device(tile.rng_key, self.device)
        return tile

    def route_ahead(self, before: TileLayout, after: TileLayout) -> None:
        """Make a redistribution, with its rows on the device."""
        route = self._sampled_grid._route(before, after)
        for rows in (*route.send, *route.receive):
            if rows is not None:
                on_device(rows, self.device)

    def operator_ahead(
        self, norm: Norm, whole: GridOperator, weight: RowTensor | None, dtype: torch.dtype, layout: TileLayout
    ) -> None:
        """Make a tile of the graph's operator at the sample, and its transpose."""
        if self._sample.scale is not None:
            operator = self._kept((norm, dtype), weight, partial(self._rescaled, whole, dtype))(layout)
            operator.matrix.value, operator.transposed.matrix.value  # noqa: B018

    def _rescaled(self, whole: GridOperator, dtype: torch.dtype, layout: TileLayout) -> GridOperator:
        """A tile of the graph's operator at the sample."""
        tile = self.parent.adjacency(layout)
        row, column = self._tile_places(tile)
        pattern, entry = whole.matrix.pattern.restricted(row, column)
        row_id, column_id = (ids[at] for ids, at in zip(tile.ids, (row, column), strict=True))
        source, target = column_id[pattern.on_host.col.long()], row_id[pattern.on_host.row()]
        factor = copied_to(self._sample.pairs.factor(source, target, dtype), self.device)
        stored = whole.matrix.storage
        places = on_device(whole.matrix.pattern.places(entry), self.device)
        values = factor if stored is None else stored[places] * factor
        row_scale = None if whole.row_scale is None else whole.row_scale[on_device(row, self.device)]
        col_scale = None if whole.col_scale is None else whole.col_scale[on_device(column, self.device)]
        return GridOperator(Matrix(pattern, values), row_scale, col_scale, whole.divides)

    def _own_weights(self, whole: TiledOperator, tile: AdjacencyTile, values: Tensor | None) -> GridOperator:
        """The tile of sums or means with the batch's own weights, which are rescaled already."""
        assert values is not None
        if whole.norm.kind == "mean":
            layout = TileLayout((tile.tiling.column_axis,), tile.tiling.third_axis, tile.tiling.order)
            degree = whole.tile(layout).row_scale
            assert degree is not None
            row, _ = self._tile_places(self.parent.adjacency(layout))
            values = values / degree[on_device(row, self.device)][on_device(tile.row, self.device)]
        return GridOperator(Matrix(tile.csr, values))
