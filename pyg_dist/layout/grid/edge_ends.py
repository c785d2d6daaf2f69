"""Sources and targets of the edges that a rank stores: products with an incidence matrix of the grid, both ways."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.redistribution import Redistribution
from pyg_dist.backend.grid.mesh import GRID_AXES
from pyg_dist.layout.grid.sharding import Grid


@dataclass(frozen=True)
class EdgeEnds:
    """Each rank stores some edges, by their numbers, and has some nodes: their rows meet by messages.

    Attributes:
        nodes: fetches the rows of the distinct nodes, u of them.
        slot: which of these each edge has, int64 ``[e]``.
    """

    nodes: Redistribution
    slot: Tensor

    @staticmethod
    def of(grid: Grid, node: Tensor, device: torch.device) -> EdgeEnds:
        """Those of the nodes at one end (collective).

        Args:
            grid: the grid.
            node: of each edge, counted from the first one of the data group, int64 ``[e]``, on the host.
            device: where rows lie.
        """
        distinct, slot = torch.unique(node, return_inverse=True)
        owner, row = grid.owners(distinct)
        transport = grid.transport(*GRID_AXES, exact=True)
        num_rows = grid.node_sharding.num_local
        return EdgeEnds(Redistribution.of_requests(transport, owner, row, num_rows), slot.to(device))

    def fetch(self, rows: Tensor) -> Tensor:
        """Each edge's row of whole rows; differentiable (collective). Shapes: ``[n, ...] -> [e, ...]``."""
        return apply(self.nodes, rows).index_select(0, self.slot)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the values of each node's edges; differentiable (collective). Shapes: ``[e, ...] -> [n, ...]``."""
        sums = values.new_zeros(self.nodes.receive.num_rows, *values.shape[1:])  # type: ignore[union-attr]
        return apply(self.nodes.transposed, sums.index_add(0, self.slot, values))
