"""A graph in the halo layout, ready to run, and the graphs that are made from it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.comm.transport import Traffic, Transport
from pyg_dist.backend.on_device import copied_to, on_device
from pyg_dist.backend.session.settings import STOCK_ELEMENTS
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.graph.edge_sets import (
    ListedEdges,
    SampledEdges,
    in_layout_of,
    refuse_learning_weights,
    refuse_other_weights,
    sampled_nodes,
)
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import NodeSharding, Norm, the_one
from pyg_dist.graph.sample import CrossingEdges, KeptEdges, PairProbability, Subset
from pyg_dist.halo.exchange import exchange_of
from pyg_dist.halo.operator import LearningOperator, LinearOperator
from pyg_dist.halo.plan.cover import BothEnds
from pyg_dist.halo.plan.links import MachineLinks, RemoteLinks
from pyg_dist.halo.plan.restriction import Restriction, restricted, restricted_to
from pyg_dist.halo.plan.share import HaloShare, halo_share
from pyg_dist.halo.products import HaloProducts
from pyg_dist.halo.sharding import HaloNodes, SampledNodes
from pyg_dist.halo.transfer import HaloTransfer
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.row_index import PickedEdges, PickedNodes, origin_of
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.selection import Selection
from pyg_dist.tensor.sharding import RowSharding, lasting


class HaloGraph(HaloProducts):
    """The graph of a :class:`~pyg_dist.halo.plan.share.HaloShare`; its arguments are those of the view."""

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

    def place_attribute(self, name: str, value: RowTensor) -> RowTensor:
        return value

    def full_edge_index(self) -> Tensor:
        return Edges.all_of(self).full_tensor()

    def has_isolated_nodes(self) -> bool:
        the_one(self.sources, self.targets)
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
        return self.targets.groups.index, self.targets.groups.count

    @cached_property
    def links(self) -> HaloLinks:
        """What subgraphs are cut from (collective at the first use)."""
        return HaloLinks(self.share, self.group)

    @property
    def needs_whole_subsets(self) -> bool:
        return False

    @property
    def ranks_per_machine(self) -> int | None:
        return self.share.ranks_per_machine

    def prepare_subgraphs(self) -> None:
        the_one(self.sources, self.targets)
        self.links, self.loops_exist, self.edge_sharding.counts  # noqa: B018


class HaloLinks:
    """The edges between this rank and others, with both ends; one exchange with the other ranks (collective).

    ``links`` are the edges; ``of_machine``, in two levels, those between this rank's machine and others.
    """

    @lasting
    def __init__(self, share: HaloShare, group: Group) -> None:
        incoming = share.row_transfer.incoming
        slot, target = incoming.col.long(), share.node_id[incoming.row() + share.num_inner]
        sender_of_slot = share.halo_owner.long()
        order = torch.argsort(sender_of_slot[slot], stable=True)
        slot, target, place = slot[order], target[order], incoming.edge.long()[order]
        sender, source = sender_of_slot[slot], share.halo_id[slot]
        mine = torch.stack([share.edge_id[place], source, target, place], dim=1)

        counts = torch.bincount(sender, minlength=share.num_ranks)
        from_rank = group.gather_rows(counts.view(1, -1), [1] * group.size)[:, share.rank]
        lists = tuple(counts.tolist()), tuple(from_rank.tolist())
        self._place = place
        self._exchange = exchange_of(Transport(group, Traffic()), *lists, num_messages=group.size**2)
        theirs = self._exchange.start(mine[:, :3]).wait()
        load = host.tensor(group.gather_counts(share.edge_id.numel()))
        receiver = torch.repeat_interleave(host.arange(share.num_ranks), from_rank)
        self.links = RemoteLinks.of(share, mine, theirs, sender, receiver, load)
        self.of_machine = None
        if share.ranks_per_machine is not None:
            into, out_of = torch.cat([mine[:, :3], sender.view(-1, 1)], 1), torch.cat([theirs, receiver.view(-1, 1)], 1)
            self.of_machine = _links_of_machine(share, group, into, out_of, load)
        self._remote_weights: WeakKeyDictionary[LinearOperator, Tensor] = WeakKeyDictionary()

    @lasting
    def remote_weights(self, operator: LinearOperator, values: Tensor) -> Tensor:
        """The operator's ``values``, by edge storage, of the edges that begin here (collective at the first use)."""
        if operator not in self._remote_weights:
            places = on_device(self._place, values.device)
            self._remote_weights[operator] = self._exchange.start(values[places]).wait()
        return self._remote_weights[operator]


def _links_of_machine(share: HaloShare, group: Group, into: Tensor, out_of: Tensor, load: Tensor) -> MachineLinks:
    """The edges between all ranks of this machine and other machines (collective).

    ``into`` and ``out_of`` are this rank's remote edges: id, source, target, and the other rank, int64 ``[m, 4]``.
    """
    on_each, own = share.ranks_per_machine, share.rank
    assert on_each is not None
    edges = torch.cat([into, out_of])
    ends = host.full((2, len(edges)), own)
    ends[0, : len(into)], ends[1, len(into) :] = into[:, 3], out_of[:, 3]
    crosses = ends[0] // on_each != ends[1] // on_each
    mine = torch.cat([edges[crosses, :3], ends[:, crosses].T], 1)
    shares = [q // on_each == own // on_each for q in range(group.size)]
    whole = IdLists(group).send(mine.repeat(sum(shares), 1), [len(mine) * is_near for is_near in shares])
    edge, source, target, sender, receiver = whole.unbind(1)
    return MachineLinks.of(edge, (source, target), (sender, receiver), share, load)


class HaloBatch(HaloGraph):
    """The subgraph that a sample of nodes induces, and its operators. The graph's rows stay where they are.

    Not collective, given the links of the graph; :meth:`operator` may be. With the probabilities of a sample's pairs
    operators are those of the whole graph at the sample, ``w_ij / p_ij`` off the diagonal and ``w_ii`` on it (ScaleGNN,
    III-D, eq. 23-24): GCN keeps the norm of the whole graph, a mean its degree, and the mean over all samples that hold
    a node is the full aggregation.
    """

    may_send_weights = False  # to know whether that pays, ranks would have to communicate for each batch

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

    @property
    def one_rank_columns(self) -> float:
        """Zero: sums are scaled, which the code of PyG does not know."""
        return 0.0

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

    def operator(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> Any:
        """See :meth:`~pyg_dist.graph.protocol.DistributedGraph.operator`.

        GCN's norm needs the degrees of the whole graph: with weights that learn, or that are no attribute of it, it
        raises.
        """
        if self._sample.scale is None:
            if weight is None and norm.kind != "gcn":  # whose norm needs messages
                self.parent.asked.note(("exact", norm, dtype), lambda batch, _: batch._exact_ahead(norm, dtype))
            return super().operator(norm, weight, dtype)
        if weight is not None and weight.requires_grad and torch.is_grad_enabled():
            return self._learning_at_sample(norm, weight.to_local(), dtype)
        return self._operators.get((norm, dtype), weight, lambda: self._at_sample(norm, weight, dtype))

    def operator_over(self, edges: Any, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> Any:
        return super().operator_over(edges, norm, weight, dtype) if self._sample.scale is None else None

    def _at_sample(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> LinearOperator:
        origin = origin_of(weight)
        if weight is not None and origin is None:
            if norm.kind == "gcn":
                raise refuse_other_weights()
            return self._own_weights(norm, weight, dtype)
        of_graph: Any = None if origin is None else origin[0]
        whole = self._operator_of_graph(norm, of_graph, dtype)
        made = self._restricted(whole, norm, weight, dtype)
        ahead = lambda batch, weight: batch._restricted_ahead(whole, norm, weight, dtype)  # noqa: E731
        self.parent.asked.note(("at a sample", norm, dtype), ahead, of_graph)
        return made

    def make_ahead(self, weights: Iterable[RowTensor]) -> None:
        self.parent.asked.make_ahead(self, weights)
        if self.parent.asked.edges:
            self._remote_patterns_ahead()

    def _exact_ahead(self, norm: Norm, dtype: torch.dtype) -> None:
        if self._sample.scale is None:
            _make_values(HaloGraph.operator(self, norm, None, dtype))

    def _restricted_ahead(
        self, whole: LinearOperator, norm: Norm, weight: RowTensor | None, dtype: torch.dtype
    ) -> None:
        if self._sample.scale is not None:
            make = partial(self._restricted, whole, norm, weight, dtype)
            _make_values(self._operators.get((norm, dtype), weight, make))

    def _remote_patterns_ahead(self) -> None:
        for matrix in (self.row_transfer.outgoing, self.row_transfer.incoming):
            matrix.pattern.edge, matrix.pattern.transposed.edge  # noqa: B018

    def _patterns_ahead(self) -> None:
        self.local.edge, self.local.transposed.edge  # noqa: B018
        self._remote_patterns_ahead()

    def _restricted(
        self, whole: LinearOperator, norm: Norm, weight: RowTensor | None, dtype: torch.dtype
    ) -> LinearOperator:
        """The graph's operator at the sample (collective where an earlier batch had no such one)."""
        p = self._pairs.uniform_p
        if p is not None and weight is None and not norm.add_self_loops and not self.parent.loops_exist:
            return self._divided_by(p, whole, dtype)
        values = whole.halo.incoming.storage
        local = self._with_loops(whole.local, dtype) if norm.kind == "gcn" and norm.add_self_loops else None
        if values is None:
            return self._rescaled(local, None, None, whole, dtype)
        remote = self.parent.links.remote_weights(whole, values)
        edge, remote_edge = (on_device(x, self.device) for x in (self.restriction.edge, self.restriction.remote_edge))
        return self._rescaled(local, values[edge], remote[remote_edge], whole, dtype)

    def _divided_by(self, p: float, whole: LinearOperator, dtype: torch.dtype) -> LinearOperator:
        """The batch's operator where every edge has the same factor: rows are scaled, and edges have no values."""
        of_rows, of_cols = self._scales(whole)
        if of_rows is None:
            of_rows = torch.ones(self.num_local, dtype=dtype, device=self.device)
        of_rows = of_rows * p if whole.divides else of_rows / p
        return LinearOperator(Matrix(self.local), self._sum_transfer, of_rows, of_cols, whole.divides)

    def _scales(self, whole: LinearOperator) -> tuple[Tensor | None, Tensor | None]:
        row = on_device(self.restriction.rows.row, self.device)
        of_rows, of_cols = (None if s is None else s[row] for s in (whole.row_scale, whole.col_scale))
        return of_rows, of_cols

    def _operator_of_graph(self, norm: Norm, weight: RowTensor | None, dtype: torch.dtype) -> LinearOperator:
        operator = self.parent.operator(norm, weight, dtype)
        assert isinstance(operator, LinearOperator), "weights that learn go another way"
        return operator

    def _own_weights(self, norm: Norm, weight: RowTensor, dtype: torch.dtype) -> LinearOperator:
        whole = self._operator_of_graph(norm, None, dtype)
        values = weight.to_local().detach().to(dtype)
        sent = self._weighted(self.local, values)[1].outgoing.storage
        return self._rescaled(None, values, None if sent is None else sent[:-1], whole, dtype)

    def _rescaled(
        self,
        local: Matrix | None,
        values: Tensor | None,
        remote_weights: Tensor | None,
        whole: LinearOperator,
        dtype: torch.dtype,
    ) -> LinearOperator:
        """The batch's operator: with the scales of the ``whole`` graph's.

        ``local`` is made by ``values`` where there is none. ``values``, of the edges, and ``remote_weights``, of those
        that are summed here for other ranks, may be ones (``None``).
        """
        one = torch.ones(1, dtype=dtype, device=self.device)
        storage = torch.cat([self._factors(dtype) if values is None else values * self._factors(dtype), one])
        source, target = self.restriction.remote_ends
        factor = copied_to(self._pairs.factor(source, target, dtype), self.device)
        sent = torch.cat([factor if remote_weights is None else remote_weights * factor, one])
        halo = self._sum_transfer.weighted(sent, storage)
        local = Matrix(self.local, storage) if local is None else local
        return LinearOperator(local, halo, *self._scales(whole), whole.divides)

    def _with_loops(self, whole: Matrix, dtype: torch.dtype) -> Matrix:
        """The local matrix of the graph, loops of the norm included, at the sample."""
        row = self.restriction.rows.row
        pattern, entry = whole.pattern.restricted(row, row)
        ids = self.parent.node_sharding.global_id[row]
        ends = pattern.on_host.col.long(), pattern.on_host.row()
        factor = copied_to(self._pairs.factor(*ends, dtype, ids), self.device)
        return Matrix(pattern, factor if whole.value is None else whole.value[on_device(entry, self.device)] * factor)

    def _learning(self, norm: Norm, weight: Tensor) -> LearningOperator:
        self.parent.asked.note("patterns", lambda batch, _: batch._patterns_ahead())
        return super()._learning(norm, weight)

    def _learning_at_sample(self, norm: Norm, weight: Tensor, dtype: torch.dtype) -> LearningOperator:
        if norm.kind == "gcn":
            raise refuse_learning_weights()
        factor = self._factors(weight.dtype)
        if norm.kind == "mean":
            degree = self.parent.in_degree(weight.dtype)[on_device(self.restriction.rows.row, self.device)].clamp_(
                min=1
            )
            factor = factor / degree[self.ends()[1]]
        return self._learning(Norm.SUM, weight * factor)

    @property
    def _pairs(self) -> PairProbability:
        assert self._sample.scale is not None
        return self._sample.scale

    @lasting
    def _factors(self, dtype: torch.dtype) -> Tensor:
        """One over the probability of each edge's source, by edge storage, ``[e]``."""
        source, target = self._ends_on_host()
        ids = self._sample.node_id[self._neighbour_id_on_host - self.node_sharding.first]
        return copied_to(self._pairs.factor(source, target, dtype, ids), self.device)


def _make_values(operator: Any) -> None:
    """Those of a constant operator's matrices, and of their transposes."""
    for matrix in (operator.local, operator.halo.outgoing, operator.halo.incoming):
        matrix.value, matrix.transposed.value  # noqa: B018


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
