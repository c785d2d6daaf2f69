"""The grid of a sample of nodes: its ranges are the parts of the sample in the whole graph's ranges."""

from __future__ import annotations

import weakref

from torch import Tensor

from pyg_dist.layout.grid.sharding import Grid, GridNodes
from pyg_dist.plan.grid.node_order import SampledOrder
from pyg_dist.plan.grid.redistribution_plan import held_positions
from pyg_dist.plan.grid.tiling import TileLayout


class SampledGrid(Grid):
    """Rows lie where the graph's rows lie, and every rank knows how many there are on the others (ScaleGNN, IV-B).

    Nodes are numbered by their places in the sample, and keyed as in the graph. Nothing here keeps what refers to the
    grid: it goes with its last user.

    Args:
        parent: the grid of the whole graph.
        node_id: the sample, ascending ids.
    """

    def __init__(self, parent: Grid, node_id: Tensor) -> None:
        orders = tuple(SampledOrder.at(order, node_id) for order in parent.orders)
        super().__init__(parent.mesh, orders, parent.sums, parent.num_blocks, parent.comm_dtype)
        self.parent, self.node_id = parent, node_id
        self._sampled_orders = orders
        self._tiles = weakref.WeakValueDictionary()

    @property
    def node_sharding(self) -> GridNodes:
        """See :class:`~pyg_dist.layout.grid.sharding.Grid`."""
        nodes = None if self._nodes is None else self._nodes()
        if nodes is None:
            nodes = GridNodes(self)
            self._nodes = weakref.ref(nodes)
        return nodes  # type: ignore[no-any-return]

    @property
    def num_rng_keys(self) -> int:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding`."""
        return self.parent.num_rng_keys

    def rng_key(self, node: Tensor) -> Tensor:
        """See :class:`~pyg_dist.layout.grid.sharding.Grid`."""
        return self.parent.rng_key(self.node_id[node])

    def places(self, layout: TileLayout) -> Tensor:
        """Which of the graph's local rows in ``layout`` are the sample's, ascending, int64 (not collective)."""
        shape, here = self.mesh.grid_shape, self.mesh.coordinates
        low, high = held_positions(self.orders, layout, shape, here)
        first, _ = held_positions(self.parent.orders, layout, shape, here)
        return self._sampled_orders[layout.order].parent_position[low:high] - first
