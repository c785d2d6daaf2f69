"""A graph in the halo layout, ready to run, and the graphs that are made from it."""

from __future__ import annotations

import copy
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_dist.backend.session.settings import STOCK_ELEMENTS
from pyg_dist.graph.edge_sets import ListedEdges, in_layout_of
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.sample import Sample
from pyg_dist.graph.sampled_edges import SampledEdges
from pyg_dist.halo.batch import ProductsAtSample, SampledNodes
from pyg_dist.halo.plan.plan import is_dense
from pyg_dist.halo.plan.restriction import Restriction, restricted
from pyg_dist.halo.plan.share import halo_share
from pyg_dist.halo.products import HaloProducts
from pyg_dist.halo.sharding import HaloNodes
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.row_index import PickedEdges, PickedNodes
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.selection import Selection
from pyg_dist.tensor.sharding import RowSharding, lasting

G = TypeVar("G", bound="HaloGraph")
B = TypeVar("B", bound="HaloBatch")


class HaloGraph(HaloProducts):
    """The graph of a :class:`~pyg_dist.halo.plan.share.HaloShare`; its arguments are those of the view."""

    @property
    def edge_view(self) -> HaloGraph:
        """Itself."""
        return self

    @cached_property
    @lasting
    def one_rank_edges(self) -> Tensor | None:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.one_rank_edges`."""
        if self.group.size > 1 or self.bits != (32, 32) or self.share.num_edges > STOCK_ELEMENTS.value():
            return None
        return torch.stack(self.ends())

    def edges(self, weight: RowTensor | None = None) -> Edges:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.edges`."""
        return Edges.all_of(self, weight)

    def induced(self, sample: Sample) -> HaloBatch:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.induced`."""
        return HaloBatch(self, sample)

    def to(self, device: torch.device | str) -> HaloGraph:
        """The same edges over the same nodes on another device."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = self._copy_on(device)
        return self._elsewhere[device]  # type: ignore[no-any-return]

    def _copy_on(self: G, device: torch.device) -> G:
        moved = copy.copy(self)
        moved._lie_on(device)
        return moved

    def select(self, chosen: Selection) -> HaloGraph:
        """The graph of some of the edges, over the same nodes; no communication.

        Args:
            chosen: of :attr:`edge_sharding`.
        """
        share = self.share.selected(chosen.local_index.cpu())
        nodes, ranks = self.node_sharding, self.exchange_group
        return HaloGraph(share, nodes, self.loop_rule, self.is_dense, chosen.rows, ranks, self.device)

    def attribute_sharding(self, name: str, value: Tensor) -> RowSharding:
        """The sharding of a new node attribute."""
        return self.node_sharding

    def place_attribute(self, name: str, value: RowTensor) -> RowTensor:
        """An attribute as it is kept."""
        return value

    def full_edge_index(self) -> Tensor:
        """All edges by global ids in the input's order, int64 ``[2, E]``, on every rank (collective)."""
        return Edges.all_of(self).full_tensor()

    def has_isolated_nodes(self) -> bool:
        """Whether some node has no edge other than self loops (collective)."""
        row = self.local.row()
        linked = torch.zeros(self.num_local, dtype=torch.bool, device=self.device)
        other = row != self.local.col
        linked[row[other]] = True
        linked[self.local.col[other].long()] = True
        linked[self.num_local - self.num_boundary + self.halo.row()] = True
        linked[self._feeds_halos] = True
        return not self.group.all_true(bool(linked.all()))

    @property
    def data_group(self) -> tuple[int, int]:
        """See :class:`~pyg_dist.graph.protocol.DistributedGraph`."""
        return self.node_sharding.groups.index, self.node_sharding.groups.count

    def prepare_subgraphs(self) -> None:
        """See :class:`~pyg_dist.graph.protocol.DistributedGraph`."""
        self.links, self.loops_exist  # noqa: B018


class HaloBatch(ProductsAtSample, HaloGraph):
    """The subgraph that a sample of nodes induces. The graph's rows stay where they are.

    Not collective, given the links of the graph; :meth:`operator` may be.

    Args:
        parent: the graph.
        sample: of its nodes.
    """

    parent: HaloGraph

    def __init__(self, parent: HaloGraph, sample: Sample) -> None:
        self.parent = parent
        self.restriction: Restriction = restricted(parent.share, parent.links.links, sample.node_id)
        share = self.restriction.share
        of_graph = parent.node_sharding
        nodes = SampledNodes(of_graph, self.restriction.row, share.node_id, sample)
        of_edges, edge = parent.edge_sharding, self.restriction.edge
        is_known = of_edges.rng_key is parent.share.edge_id  # but for a graph with loops or of a batch
        key = share.edge_id if is_known else of_edges.rng_key.index_select(0, edge)
        rows = SampledEdges(of_edges, edge, key, nodes.group, sample.group)
        self._replicas = None if sample.group is None else of_graph.groups.data
        super().__init__(share, nodes, parent.loop_rule, parent.is_dense, rows, parent.exchange_group, parent.device)
        self._sample = sample

    @property
    def one_rank_edges(self) -> None:
        """None: its sums are scaled, which the code of PyG does not know."""

    def _copy_on(self: B, device: torch.device) -> B:
        moved = super()._copy_on(device)
        moved.parent = self.parent.to(device)
        return moved

    def pick_nodes(self) -> PickedNodes:
        """``n_id``: the nodes' global ids; ``t[n_id]`` is a node tensor of the graph at the sample."""
        nodes = self.node_sharding
        ids = self.parent.node_sharding.global_id.index_select(0, self.restriction.row)
        picked = PickedNodes.of(ids.to(self.device), nodes, self.parent.node_sharding, self.restriction.row)
        picked.replicas = self._replicas
        return picked

    def pick_edges(self) -> PickedEdges:
        """``e_id``: the edges' places in the input; ``t[e_id]`` is an edge tensor of the graph at the sample."""
        edges: Any = self.edge_sharding
        ids = edges.parent_key.to(self.device, copy=True)
        picked = PickedEdges.of(ids, edges, self.parent.edge_sharding, self.restriction.edge)
        picked.replicas = self._replicas
        return picked


@in_layout_of.register
def _(nodes: HaloNodes, edge_index: Tensor, loop_rule: LoopRule) -> HaloGraph:
    group = nodes.group
    share = halo_share(edge_index, nodes.parts(), group.rank, group.size, nodes.exchange, nodes.global_id)
    messages = sum(group.gather_counts(sum(count > 0 for count in share.sum_transfer.send_counts)))
    rows = ListedEdges(group, "edge", share.num_edges, share.edge_id)
    return HaloGraph(share, nodes, loop_rule, is_dense(messages, group.size), rows)
