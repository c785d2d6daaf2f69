"""A checked graph of several types in the halo layout: parts, nodes by type, the graph of each relation, plan.

Hyperedges of a graph with one type are nodes of a second set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.comm.topology import DataGroups
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.backend.session.agreement import on_main
from pyg_dist.data.layout_choice import gathered_plan, known_ranks_per_node, levels_of
from pyg_dist.data.local_graph import LocalGraph, local_rows
from pyg_dist.data.options import Options
from pyg_dist.errors import DataError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.halo.graph import HaloGraph
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.relations import HeteroPlan, Relation, relation_hash, rows_in_order
from pyg_dist.halo.plan.share import HaloShare, halo_share
from pyg_dist.halo.sharding import HaloNodes
from pyg_dist.partition.balance import balanced_by_kind
from pyg_dist.partition.inputs import as_parts, check_given
from pyg_dist.partition.stream import chunks_of
from pyg_dist.plan.parts import PartsOptions, find_parts
from pyg_dist.pricing.model import Model
from pyg_dist.store.graph_input import HeteroInput, as_one_type
from pyg_dist.store.hyperedges import Hyperedges
from pyg_dist.store.manifest import LoopRule


def owners_of_all(hetero: HeteroInput, partition: Mapping[str, object]) -> Tensor:
    """Owners of the nodes of all types, given by type."""
    missing = [kind for kind in hetero.num_nodes if kind not in partition]
    if missing:
        raise DataError(f"Expected the owners of the nodes of each type (got none of {missing[0]!r}): add them")
    parts = [as_parts(partition[kind]) for kind in hetero.num_nodes]
    for (kind, size), owners in zip(hetero.num_nodes.items(), parts, strict=True):
        if owners.numel() != size:
            raise DataError(f"Expected {size} owners, one of each node of type {kind!r} (got {owners.numel()})")
    return torch.cat(parts) if parts else host.empty(0, dtype=torch.int64)


def parts_by_type(hetero: HeteroInput, options: Options) -> dict[str, Tensor]:
    """The owner of each node, by type (collective): found on one rank, since solvers differ from run to run."""
    group, sizes = DataGroups.of(None).part, list(hetero.num_nodes.values())
    method, machines = options.partition, known_ranks_per_node(group)

    def find() -> Tensor:
        if not isinstance(method, str):
            assert not isinstance(method, Plan)
            return check_given(method, sum(sizes), group.size)
        wanted = PartsOptions(
            method, options.epsilon, options.seed, exchange=options.exchange, ranks_per_node=machines,
            hierarchy=options.hierarchy, bits=options.bits_by_direction,
        )  # fmt: skip
        edges = {relation: graph.edge_index for relation, graph in hetero.relations.items()}
        found = find_parts_by_type(edges, hetero.num_nodes, _train_mask(hetero), group.size, wanted)
        return torch.cat(list(found.values()))

    return dict(zip(hetero.num_nodes, torch.split(on_main(find), sizes), strict=True))


def find_parts_by_type(
    relations: Mapping[Relation, Tensor], num_nodes: Mapping[str, int], train_mask: Tensor | None, num_parts: int,
    options: PartsOptions,
) -> dict[str, Tensor]:  # fmt: skip
    """The owner of each node, int32 ``[N]`` by type: of the whole graph, then balanced by type. Not collective.

    ``relations`` are the edges of each, ``train_mask`` is that of the nodes of all types in a row.
    """
    edge_index, sizes = as_one_type(relations, num_nodes), list(num_nodes.values())
    parts = find_parts(edge_index, sum(sizes), num_parts, options, train_mask)
    balanced = balanced_by_kind(chunks_of(edge_index), parts, sizes, num_parts, options.epsilon)
    return dict(zip(num_nodes, torch.split(balanced, sizes), strict=True))


def _train_mask(hetero: HeteroInput) -> Tensor | None:
    masks, is_known = [], False
    for kind, found in hetero.nodes.items():
        mask = found.nodes.get("train_mask")
        if mask is None or mask.dtype != torch.bool or mask.dim() != 1:
            mask = host.zeros(hetero.num_nodes[kind], dtype=torch.bool)
        else:
            is_known = True
        masks.append(mask.cpu())
    return torch.cat(masks) if is_known else None


NodesByType = Mapping[str, HaloNodes]


@dataclass(frozen=True)
class TypedGraph:
    """A graph with types: nodes by type, a graph for each relation, and the plan."""

    nodes: NodesByType
    edges: dict[Relation, HaloGraph]
    plan: HeteroPlan

    @staticmethod
    def of(
        rows: Mapping[str, Tensor], sizes: Mapping[str, int], options: Options, group: Group,
        relations: Iterable[tuple[Relation, HaloShare, LoopRule, Plan]], parts: Tensor | None = None,
    ) -> TypedGraph:  # fmt: skip
        """Lay out shares (collective).

        ``rows`` are this rank's nodes of each type, in the order of their rows, ``sizes`` all nodes of each.
        ``relations`` gives of each, in turn, the share of this rank, the rule of self loops, and its plan; ``parts``,
        on rank 0, the owner of each node, types one after another.
        """
        traffic, nodes, graphs, plans = Traffic(), dict[str, HaloNodes](), {}, {}
        for kind, node_id in rows.items():
            nodes[kind] = HaloNodes(
                group, node_id, sizes[kind], options.exchange, options.bits_by_direction, DataGroups.of(None)
            )
            nodes[kind].traffic = traffic
        for relation, share, loop_rule, plan in relations:
            sources, targets = nodes[relation[0]], nodes[relation[-1]]
            graphs[relation] = HaloGraph(share, targets, loop_rule, plan.messages, sources=sources)
            plans[relation] = plan
        return TypedGraph(nodes, graphs, HeteroPlan({kind: own.counts for kind, own in nodes.items()}, plans, parts))


@dataclass(frozen=True)
class LocalTypes:
    """This rank's part of a graph with types."""

    graph: TypedGraph
    device: torch.device
    others: dict[str, object]  # attributes of the whole
    nodes: dict[str, dict[str, object]]  # attributes by type
    edges: dict[Relation, LocalGraph]

    @staticmethod
    def of(hetero: HeteroInput, graph: TypedGraph) -> LocalTypes:
        """This rank's part of the input (not collective)."""
        device = hetero.device
        edges = {
            relation: LocalGraph.of(given, graph.edges[relation].to(device), graph.plan.relations[relation])
            for relation, given in hetero.relations.items()
        }
        nodes = {
            kind: {name: local_rows(value, graph.nodes[kind], device) for name, value in found.nodes.items()}
            | found.others
            for kind, found in hetero.nodes.items()
        }
        return LocalTypes(graph, device, hetero.others, nodes, edges)


def types_on_halo(hetero: HeteroInput, options: Options, parts: dict[str, Tensor]) -> TypedGraph:
    """The graph and the plan (collective)."""
    group, number = DataGroups.of(None).part, {kind: k for k, kind in enumerate(parts)}
    ends = [(number[s], number[t], given.edge_index) for (s, _, t), given in hetero.relations.items()]
    rows = dict(zip(parts, rows_in_order(list(parts.values()), ends, group.rank), strict=True))

    def shares() -> Iterator[tuple[Relation, HaloShare, LoopRule, Plan]]:
        for (source, name, target), given in hetero.relations.items():
            is_square, edges = source == target, given.edge_index
            owners = parts[target] if is_square else (parts[source], parts[target])
            ids = rows[target] if is_square else (rows[source], rows[target])
            model = partial(Model.of_layers, parts[target].numel(), edges.shape[1], None, None)
            shared_by = levels_of(options, group, edges, owners, model).shared_by
            given_to = (group.rank, group.size, options.exchange)
            share = halo_share(edges, owners, *given_to, ids, shared_by, IdLists(group).send)
            identity = relation_hash(edges, parts[source], parts[target], group.size, options.exchange)
            plan = gathered_plan(share, group, options, options.partition_name, None, identity)
            yield (source, name, target), share, given.form.loop_rule, plan

    whole = torch.cat(list(parts.values())).to(torch.int32) if group.rank == 0 and parts else None
    return TypedGraph.of(rows, hetero.num_nodes, options, group, shares(), whole)


def with_hyperedges(local: LocalGraph, given: Hyperedges, options: Options) -> LocalGraph:
    """A rank's part of a graph and of its hyperedges, each of which is on the rank that has most of its nodes.

    Collective.
    """
    nodes, device = local.graph.node_sharding, local.graph.device
    handle = DistributedEdgeIndex.over(given.incidence, given.size, device, is_kept=False, sources=nodes)
    graph = handle.graph
    attributes: dict[str, object] = {given.key: handle}  # first: the storage finds rows of hyperedges by it
    for rows, found in ((graph.targets, given.attributes), (graph.edge_sharding, given.values)):
        attributes |= {name: local_rows(value, rows, device) for name, value in found.items()}
    return replace(
        local,
        graph_key=local.graph_key if local.graph.edge_sharding.size else None,
        plan=_plan_with_hyperedges(local, graph, given, options),
        attributes=attributes | local.attributes,
    )


def _plan_with_hyperedges(local: LocalGraph, graph: Any, given: Hyperedges, options: Options) -> Any:
    """The plan of the edges, if there are any, and of the incidence (collective)."""
    if not isinstance(local.plan, Plan):
        return local.plan
    nodes, hyperedges = graph.sources, graph.targets
    owners = nodes.parts(), hyperedges.parts()
    identity = relation_hash(given.incidence, *owners, nodes.group.size, nodes.exchange)
    plan = gathered_plan(graph.share, nodes.group, options, local.plan.partition, None, identity)
    plans = {("node", "to", "node"): local.plan} if local.graph.edge_sharding.size else {}
    plans["node", "in", "hyperedge"] = plan
    return HeteroPlan({"node": nodes.counts, "hyperedge": hyperedges.counts}, plans, local.plan.parts)
