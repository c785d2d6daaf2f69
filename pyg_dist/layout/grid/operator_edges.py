"""``OperatorEdges``: the edges of the grid as the code of a conv may look at them, where they are stored."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.layout.edges import Edges, End, SelectedEdges, require_sum
from pyg_dist.layout.self_loops import LoopRule, put_loop_values
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor, by_row_mask
from pyg_dist.tensor.sharding import lasting


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
        return self.tensor(self.graph.at_edges(x.to_rows().to_local(), end))

    def reduce(self, values: Tensor, end: End, reduce: str) -> Tensor:
        """See :class:`Edges` (collective)."""
        if reduce in ("sum", "add"):
            return self.graph.sum_edges(values, end)  # type: ignore[no-any-return]
        if end == 0:
            require_sum(reduce)
        return self.by_target_rank.reduce(self._sent(values), end, reduce)

    def with_loop_values(self, filled: Tensor, values: Tensor, rule: LoopRule) -> Tensor:
        """See :class:`Edges` (collective)."""
        row, found = self.graph.loop_values(values)
        return put_loop_values(filled, row, found, rule)

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
