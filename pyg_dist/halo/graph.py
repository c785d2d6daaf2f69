"""A graph in the halo layout, ready to run, and the graphs that are made from it."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.session.settings import STOCK_ELEMENTS
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.edge_sets import ListedEdges, SampledEdges, in_layout_of, sampled_nodes
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import NodeSharding, the_one
from pyg_dist.graph.sample import CrossingEdges, KeptEdges, Subset
from pyg_dist.halo.batch import ProductsAtSample
from pyg_dist.halo.plan.cover import BothEnds
from pyg_dist.halo.plan.restriction import Restriction, restricted, restricted_to
from pyg_dist.halo.plan.share import halo_share
from pyg_dist.halo.products import HaloProducts
from pyg_dist.halo.sharding import HaloNodes, SampledNodes
from pyg_dist.halo.transfer import HaloTransfer
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.row_index import PickedEdges, PickedNodes
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.selection import Selection
from pyg_dist.tensor.sharding import RowSharding, lasting


class HaloGraph(HaloProducts):
    """The graph of a :class:`~pyg_dist.halo.plan.share.HaloShare`; its arguments are those of the view."""

    needs_whole_subsets = False

    @property
    def edge_view(self) -> HaloGraph:
        return self

    @cached_property
    @lasting
    def one_rank_columns(self) -> float:
        is_exact = self.group.size == 1 and self.targets.bits == (32, 32)
        return STOCK_ELEMENTS.value() / max(self.share.num_edges, 1) if is_exact else 0.0

    @cached_property
    @lasting
    def one_rank_edges(self) -> Tensor:
        return torch.stack(self.ends())

    def edges(self, weight: RowTensor | None = None) -> Edges:
        return Edges.all_of(self, weight)

    def induced(self, sample: Subset) -> HaloBatch:
        if sample.kept is None:
            return HaloBatch.of(self, sample)
        nodes = self.node_sharding.sampled(sample)
        return self.between(nodes, nodes, sample.kept)

    @lasting
    def among(self, nodes: NodeSharding) -> HaloBatch:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.among`: each rank cuts its own edges."""
        assert isinstance(nodes, SampledNodes)
        of_all, targets, group = self.edge_sharding, self.node_sharding, self.exchange_group
        neighbour, target = self._ends_on_host()
        ends = self._neighbour_id_on_host[neighbour], targets.global_id[target]
        kept = KeptEdges.between(nodes.sample.node_id, targets.size, ends, of_all.position, of_all.size)
        if group.size > 1:
            rank = self.neighbour_rank[neighbour[kept.place]]
            inside, arriving = (host.flatnonzero(mask) for mask in (rank == group.rank, rank != group.rank))
            arriving = arriving[rank[arriving].argsort(stable=True)]
            kept = replace(kept, crossing=CrossingEdges(inside, arriving, rank[arriving], IdLists(group).exchange))
        return self.between(nodes, nodes, kept)

    def between(self, sources: SampledNodes, targets: SampledNodes, kept: KeptEdges) -> HaloBatch:
        """A batch of a relation: some of its edges, between sampled nodes of its types. Not collective, if ready."""
        load = host.tensor(self.edge_sharding.counts)
        cut = restricted_to(self.share, kept, sources.rows, targets.rows, load)
        return HaloBatch(self, cut, targets, sources, replace(targets.sample, kept=kept))

    def select(self, chosen: Selection) -> HaloGraph:
        share = self.share.selected(chosen.local_index.cpu())
        return HaloGraph(
            share, self.targets, self.loop_rule, self.num_messages, chosen.rows, self.exchange_group, self.device,
            self.sources,
        )  # fmt: skip

    def attribute_sharding(self, name: str, value: Tensor) -> RowSharding:
        return self.node_sharding

    def full_edge_index(self) -> Tensor:
        return Edges.all_of(self).full_tensor()

    @property
    def data_group(self) -> tuple[int, int]:
        return self.targets.groups.index, self.targets.groups.count

    @property
    def ranks_per_machine(self) -> int | None:
        return self.share.ranks_per_machine

    def prepare_subgraphs(self) -> None:
        the_one(self.sources, self.targets)
        self.links, self.loops_exist, self.edge_sharding.counts  # noqa: B018


class HaloBatch(ProductsAtSample, HaloGraph):
    """The subgraph that a sample of nodes induces, and its operators. The graph's rows stay where they are.

    Not collective, given the links of the graph; :meth:`operator` may be.
    """

    one_rank_columns = 0.0  # sums are scaled, which the code of PyG does not know

    def __init__(
        self, parent: HaloGraph, cut: Restriction, targets: SampledNodes, sources: SampledNodes, sample: Subset
    ) -> None:
        self.parent, self.restriction, share = parent, cut, cut.share
        of_edges = parent.edge_sharding
        is_known = of_edges.rng_key is parent.share.edge_id  # but for a graph with loops or of a batch
        key = share.edge_id if is_known else of_edges.rng_key.index_select(0, cut.edge)
        rows = SampledEdges(of_edges, cut.edge, key, targets.group, sample, cut.which)
        self._replicas = None if sample.group is None else targets.parent.groups.data
        ranks, device = parent.exchange_group, parent.device
        super().__init__(share, targets, parent.loop_rule, parent.num_messages, rows, ranks, device, sources)
        self._sample = sample

    @staticmethod
    def of(parent: HaloGraph, sample: Subset) -> HaloBatch:
        """The one that a sample of the nodes of a square graph induces."""
        links = parent.links
        cut = restricted(parent.share, links.links, sample, links.of_machine, parent.device)
        nodes = SampledNodes(parent.node_sharding, cut.rows, sample)
        return HaloBatch(parent, cut, nodes, nodes, sample)

    @cached_property
    @lasting
    def csr(self) -> CSR:
        self.parent.asked.edges.add(("csr",))
        return super().csr

    @cached_property
    @lasting
    def row_transfer(self) -> HaloTransfer:
        self.parent.asked.note("rows", lambda batch, _: batch.row_transfer)
        return super().row_transfer

    def edges(self, weight: RowTensor | None = None) -> Edges:
        edges = super().edges(weight)
        edges.asked = self.parent.asked
        return edges

    def pick_nodes(self) -> PickedNodes:
        nodes = self.node_sharding
        assert isinstance(nodes, SampledNodes)
        return nodes.picked(self.device)

    def pick_edges(self) -> PickedEdges:
        edges: Any = self.edge_sharding
        ids = edges.parent_key.to(self.device, copy=True)
        picked = PickedEdges.of(ids, edges, self.parent.edge_sharding, self.restriction.edge)
        picked.replicas = self._replicas
        return picked


@sampled_nodes.register
def _(nodes: HaloNodes, subset: Subset, device: torch.device) -> PickedNodes:
    return nodes.sampled(subset).picked(device)


@in_layout_of.register
def _(targets: HaloNodes, edge_index: Tensor, loop_rule: LoopRule, sources: NodeSharding) -> HaloGraph:
    group = targets.group
    parts: BothEnds = targets.parts()
    node_id: BothEnds = targets.global_id
    if sources is not targets:
        parts, node_id = (sources.parts(), targets.parts()), (sources.global_id, targets.global_id)
    share = halo_share(
        edge_index, parts, group.rank, group.size, targets.exchange, node_id, targets.ranks_per_machine,
        IdLists(group).send,
    )  # fmt: skip
    messages = sum(group.gather_counts(sum(count > 0 for count in share.sum_transfer.send_counts)))
    rows = ListedEdges(group, "edge", share.num_edges, share.edge_id)
    return HaloGraph(share, targets, loop_rule, messages, rows, sources=sources)
