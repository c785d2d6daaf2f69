"""The grid of a sample of nodes: its ranges are the parts of the sample in the whole graph's ranges."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.dense import large_tensors
from pyg_dist.layout.grid.sharding import Grid, GridNodes
from pyg_dist.layout.grid.tile_tensor import TileTensor
from pyg_dist.plan.grid.node_order import SampledOrder
from pyg_dist.plan.grid.redistribution_plan import held_positions
from pyg_dist.plan.grid.tiling import TileLayout
from pyg_dist.plan.sample import Sample
from pyg_dist.tensor.picked_rows import PickedNodes
from pyg_dist.tensor.row_tensor import RowTensor, local_tensors


class SampledGrid(Grid):
    """Rows lie where the graph's rows lie, and every rank knows how many there are on the others (ScaleGNN, IV-B).

    Nodes are numbered by their places in the sample, and keyed as in the graph. Nothing here keeps what refers to the
    grid: it goes with its last user.

    Args:
        parent: the grid of the whole graph.
        sample: the nodes. Where data groups have samples of their own, the rows are those of the union of all, while
            products stay inside a group.
    """

    sample: Sample

    def __init__(self, parent: Grid, sample: Sample) -> None:
        orders = tuple(SampledOrder.at(order, sample.node_id) for order in parent.orders)
        super().__init__(parent.mesh, orders, parent.sums, parent.num_blocks, parent.comm_dtype)
        self.parent, self.sample = parent, sample
        self.num_nodes = self.num_nodes if sample.group is None else sample.group.size
        self.first = 0 if sample.group is None else sample.group.first
        self.is_union = sample.group is not None
        self._sampled_orders = orders
        self._tiles = weakref.WeakValueDictionary()

    @property
    def node_sharding(self) -> GridNodes:
        """See :class:`~pyg_dist.layout.grid.sharding.Grid`."""
        nodes = None if self._nodes is None else self._nodes()
        if nodes is None:
            nodes = GridNodes(self)
            self._nodes = weakref.ref(nodes)
        return nodes

    @property
    def num_rng_keys(self) -> int:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding`."""
        return self.parent.num_rng_keys * (1 if self.sample.group is None else self.sample.group.index + 1)

    def rng_key(self, node: Tensor) -> Tensor:
        """See :class:`~pyg_dist.layout.grid.sharding.Grid`: data groups draw other numbers for a node."""
        key = self.parent.rng_key(self.parent_id(node))
        return key if self.sample.group is None else key + self.sample.group.index * self.parent.num_rng_keys

    def parent_id(self, node: Tensor) -> Tensor:
        """The numbers in the graph of some of this group's nodes."""
        return self.sample.node_id[node - self.first]

    def node_ids(self, layout: TileLayout) -> Tensor:
        """See :class:`~pyg_dist.layout.grid.sharding.Grid`: places in the union of all groups' samples."""
        return super().node_ids(layout) + self.first

    def ranks(self, *axes: str) -> Group:
        """See :class:`~pyg_dist.layout.grid.sharding.Grid`: those of all groups, which hold other rows."""
        return self.mesh.group(*axes) if self.sample.group is None else self.mesh.group(*axes, "data")

    def places(self, layout: TileLayout) -> Tensor:
        """Which of the graph's local rows in ``layout`` are the sample's, ascending, int64 (not collective)."""
        shape, here = self.mesh.grid_shape, self.mesh.coordinates
        low, high = held_positions(self.orders, layout, shape, here)
        first, _ = held_positions(self.parent.orders, layout, shape, here)
        return self._sampled_orders[layout.order].parent_position[low:high] - first


class PickedTiles(PickedNodes):
    """``n_id`` of a batch on the grid: picks whole rows, and rows of tiles."""

    grid: SampledGrid

    def on(self, device: torch.device) -> PickedTiles:
        """See :class:`~pyg_dist.tensor.picked_rows.PickedRows`."""
        moved = super().on(device)
        moved.grid = self.grid
        return moved

    def fetch(self, x: RowTensor) -> RowTensor:
        """See :class:`~pyg_dist.tensor.picked_rows.PickedRows`."""
        if not isinstance(x, TileTensor) or x._sharding.grid is not self.grid.parent:
            return super().fetch(x)
        layout = x._sharding.layout
        with local_tensors():
            local = large_tensors.select(self.entered(x), self.grid.places(layout).to(x.device))
            return self.noted(RowTensor.from_local(local, self.grid.tile(layout, x._sharding.width)), x)
