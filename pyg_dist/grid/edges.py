"""The grid's edges as the code of a conv may look at them, where they are stored; and the nodes at their ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.redistribution import Redistribution
from pyg_dist.graph.edges import Edges, End, SelectedEdges, require_sum
from pyg_dist.graph.self_loops import put_loop_values
from pyg_dist.grid.plan.mesh_shape import GRID_AXES
from pyg_dist.grid.sharding import Grid
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor, by_row_mask
from pyg_dist.tensor.sharding import lasting


@dataclass(frozen=True)
class EdgeEnds:
    """The nodes at one end of the edges that a rank stores: products with an incidence matrix of the grid, both ways.

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


class OperatorEdges(Edges):
    """The edges of a graph on the grid, each on the rank that stores it.

    Sums over them are the graph's products, and no rank needs an edge's ends for these. Whoever looks at ends has
    their rows brought here; whoever needs all in-edges of a node gets :attr:`by_target_rank`.
    Edges without self loops, and with one for each node, are those of another graph over the same nodes.
    """

    graph: Any  # the GridGraph, which makes them

    @staticmethod
    def of_graph(graph: Any, weight: RowTensor | None) -> OperatorEdges:
        """See the class."""
        rows = graph.edge_sharding
        edges: Any = torch.empty(2, rows.size, dtype=torch.int64, device="meta").as_subclass(OperatorEdges)
        edges.graph, edges.rows, edges.weight = graph, rows, weight
        return edges  # type: ignore[no-any-return]

    @cached_property
    @lasting
    def _global_ids(self) -> tuple[Tensor, Tensor]:
        source, target = self.graph.edge_index.to(self.graph.device, copy=True)
        return source, target

    def fetch(self, x: NodeTensor, end: End) -> EdgeTensor:
        """See :class:`Edges` (collective)."""
        return self.tensor(self.graph.ends[end].fetch(x.to_rows().to_local()))

    def reduce(self, values: Tensor, end: End, reduce: str) -> Tensor:
        """See :class:`Edges` (collective)."""
        if reduce in ("sum", "add"):
            return self.graph.ends[end].sum(values)  # type: ignore[no-any-return]
        if end == 0:
            require_sum(reduce)
        return self.by_target_rank.reduce(self._sent(values), end, reduce)

    def with_loop_values(self, filled: Tensor, values: Tensor, rule: LoopRule) -> Tensor:
        """See :class:`Edges` (collective)."""
        home, row = self.graph.loops
        return put_loop_values(filled, row, apply(home, values), rule)

    def softmax_by_target(self, values: Tensor) -> Tensor:
        """See :class:`Edges` (collective)."""
        there = self.by_target_rank
        found = there.rows.to_sharding(there.softmax_by_target(self._sent(values)), self.rows)
        assert found is not None
        return found

    def full_tensor(self) -> Tensor:
        """See :class:`Edges`."""
        return self.graph.full_edge_index()  # type: ignore[no-any-return]

    @property
    def by_target_rank(self) -> Edges:
        """See :class:`Edges` (collective at the first use; with values that learn, which move, at each)."""
        is_fixed = self.weight is None or not self.weight.requires_grad
        return self._by_target_rank if is_fixed else Edges.all_of(self.graph.edge_view, self.weight)

    @cached_property
    def _by_target_rank(self) -> Edges:
        return Edges.all_of(self.graph.edge_view, self.weight)

    def _sent(self, values: Tensor) -> Tensor:
        """Values of these edges, where :attr:`by_target_rank` has them (collective)."""
        moved = self.by_target_rank.rows.from_sharding(values, self.rows)
        assert moved is not None
        return moved

    @cached_property
    def without_loops(self) -> SelectedEdges:
        """See :class:`Edges`; the graph keeps them."""
        graph, places = self.graph.without_loops
        return SelectedEdges(OperatorEdges.of_graph(graph, None), places)

    @cached_property
    def with_loops(self) -> OperatorEdges:
        """See :class:`Edges`; the graph keeps them."""
        return OperatorEdges.of_graph(self.graph.with_loops, None)

    def selected(self, mask: RowTensor) -> OperatorEdges:
        """See :class:`Edges`."""
        graph: Any = self.graph
        return OperatorEdges.of_graph(graph.select(by_row_mask(self.rows, mask)), None)
