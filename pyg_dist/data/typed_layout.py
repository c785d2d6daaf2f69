"""A checked graph of several types in the halo layout: parts, nodes by type, the graph of each relation, plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.comm.data_groups import DataGroups
from pyg_dist.backend.comm.transport import Traffic
from pyg_dist.backend.session.agreement import on_main
from pyg_dist.data.layout_choice import gathered_plan, known_ranks_per_node
from pyg_dist.data.options import Options
from pyg_dist.errors import DataError
from pyg_dist.halo.graph import HaloGraph
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.relations import HeteroPlan, Relation, relation_hash, rows_in_order
from pyg_dist.halo.plan.share import halo_share
from pyg_dist.halo.sharding import HaloNodes
from pyg_dist.partition.balance import balanced_by_kind
from pyg_dist.partition.inputs import as_parts, check_given
from pyg_dist.plan.parts import PartsOptions, find_parts
from pyg_dist.store.hetero_input import HeteroInput


def owners_of_all(hetero: HeteroInput, partition: Mapping[str, Any]) -> Tensor:
    """Owners of the nodes of all types, given by type."""
    missing = [kind for kind in hetero.num_nodes if kind not in partition]
    if missing:
        raise DataError(f"Expected the owners of the nodes of each type (got none of {missing[0]!r}): add them")
    parts = [as_parts(partition[kind]) for kind in hetero.num_nodes]
    for (kind, size), owners in zip(hetero.num_nodes.items(), parts, strict=True):
        if owners.numel() != size:
            raise DataError(f"Expected {size} owners, one of each node of type {kind!r} (got {owners.numel()})")
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


def parts_by_type(hetero: HeteroInput, options: Options) -> dict[str, Tensor]:
    """The owner of each node, by type (collective): found on one rank, since solvers differ from run to run."""
    group, sizes = DataGroups.of(None).part, list(hetero.num_nodes.values())
    method, machines = options.partition, known_ranks_per_node(group)

    def find() -> Tensor:
        if not isinstance(method, str):
            assert not isinstance(method, Plan)
            return check_given(method, sum(sizes), group.size)
        wanted = PartsOptions(method, options.epsilon, options.seed, exchange=options.exchange, ranks_per_node=machines)
        return torch.cat(list(find_parts_by_type(hetero, group.size, wanted).values()))

    return dict(zip(hetero.num_nodes, torch.split(on_main(find), sizes), strict=True))


def find_parts_by_type(hetero: HeteroInput, num_parts: int, options: PartsOptions) -> dict[str, Tensor]:
    """The owner of each node, int32 ``[N]`` by type: of the whole graph, then balanced by type. Not collective."""
    edge_index, sizes = hetero.homogeneous_edge_index(), list(hetero.num_nodes.values())
    parts = find_parts(edge_index, sum(sizes), num_parts, options, _train_mask(hetero))
    balanced = balanced_by_kind(edge_index, parts, sizes, num_parts, options.epsilon)
    return dict(zip(hetero.num_nodes, torch.split(balanced, sizes), strict=True))


def _train_mask(hetero: HeteroInput) -> Tensor | None:
    """Which nodes train, of all types; ``None``: it is not known."""
    masks, is_known = [], False
    for kind, found in hetero.nodes.items():
        mask = found.nodes.get("train_mask")
        if mask is None or mask.dtype != torch.bool or mask.dim() != 1:
            mask = torch.zeros(hetero.num_nodes[kind], dtype=torch.bool)
        else:
            is_known = True
        masks.append(mask.cpu())
    return torch.cat(masks) if is_known else None


def types_on_halo(
    hetero: HeteroInput, options: Options, parts: dict[str, Tensor]
) -> tuple[dict[str, HaloNodes], dict[Relation, HaloGraph], HeteroPlan]:
    """Nodes by type, the graph of each relation, and the plan (collective)."""
    groups = DataGroups.of(None)
    group, number = groups.part, {kind: k for k, kind in enumerate(parts)}
    ends = [(number[s], number[t], given.edge_index) for (s, _, t), given in hetero.relations.items()]
    rows = rows_in_order(list(parts.values()), ends, group.rank)
    traffic, nodes = Traffic(), {}
    for (kind, size), node_id in zip(hetero.num_nodes.items(), rows, strict=True):
        nodes[kind] = HaloNodes(group, node_id, size, options.exchange, options.bits_by_direction, groups)
        nodes[kind].traffic = traffic
    graphs, plans = {}, {}
    for relation, given in hetero.relations.items():
        source, _, target = relation
        sources, targets = nodes[source], nodes[target]
        owners: Any = parts[target] if source == target else (parts[source], parts[target])
        ids: Any = targets.global_id if source == target else (sources.global_id, targets.global_id)
        share = halo_share(given.edge_index, owners, group.rank, group.size, options.exchange, ids)
        identity = relation_hash(given.edge_index, parts[source], parts[target], group.size, options.exchange)
        plan = gathered_plan(share, group, options, options.partition_name, None, identity)
        graphs[relation] = HaloGraph(share, targets, given.loop_rule, plan.messages, sources=sources)
        plans[relation] = plan
    whole = torch.cat(list(parts.values())).to(torch.int32) if group.rank == 0 and parts else None
    return nodes, graphs, HeteroPlan({kind: rows.counts for kind, rows in nodes.items()}, plans, whole)
