"""A checked input graph in the halo layout: parts, this rank's share, plan."""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend.comm.data_groups import DataGroups
from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.backend.session.agreement import on_main
from pyg_dist.data.options import Options, ranks_per_node
from pyg_dist.halo.graph import HaloGraph
from pyg_dist.halo.plan.plan import Plan, pairs_of, plan_hash
from pyg_dist.halo.plan.share import HaloShare, halo_share
from pyg_dist.halo.plan.sizes import ShareSizes
from pyg_dist.halo.sharding import HaloNodes
from pyg_dist.plan.parts import PartsOptions, find_parts
from pyg_dist.store.graph_input import GraphInput


def on_halo(
    graph_input: GraphInput, options: Options, parts: Tensor, groups: DataGroups | None = None
) -> tuple[HaloGraph, Plan]:
    """The runtime form and the plan (collective); ``None``: one data group."""
    groups = DataGroups.of(None) if groups is None else groups
    group = groups.part
    share = halo_share(graph_input.edge_index, parts, group.rank, group.size, options.halo.exchange)
    identity = plan_hash(graph_input.edge_index, parts, group.size, options.halo.exchange)
    kept = parts.to(torch.int32) if group.rank == 0 else None
    plan = gathered_plan(share, group, options, options.halo.partition_name, kept, identity)
    bits = options.halo.bits_by_direction
    nodes = HaloNodes(group, share.node_id, share.num_nodes, options.halo.exchange, bits, groups)
    graph = HaloGraph(share, nodes, graph_input.loop_rule, plan.messages)
    return graph, plan


def node_parts(graph_input: GraphInput, options: Options, group: Group) -> Tensor:
    """The owner of each node: computed on one rank, since solvers differ from run to run, and sent to all."""
    method = options.halo.partition
    if isinstance(method, Plan):  # a data.plan has its parts on rank 0 alone
        return on_main(
            lambda: method.parts_for(
                graph_input.edge_index,
                graph_input.num_nodes,
                group.size,
                options.halo.exchange,
                options.halo.bits_by_direction,
            )
        )
    train_mask = graph_input.node_attributes.get("train_mask")
    if train_mask is not None and (train_mask.dtype != torch.bool or train_mask.dim() != 1):
        train_mask = None
    found_by = PartsOptions(
        method,
        options.halo.epsilon,
        options.seed,
        exchange=options.halo.exchange,
        ranks_per_node=known_ranks_per_node(group),
    )
    return on_main(lambda: find_parts(graph_input.edge_index, graph_input.num_nodes, group.size, found_by, train_mask))


def gathered_plan(
    share: HaloShare, group: Group, options: Options, partition: str, parts: Tensor | None, identity: str
) -> Plan:
    """The plan, from every rank's numbers (collective)."""
    mine = [*vars(ShareSizes.of(share)).values(), *share.sum_transfer.send_counts]
    table = group.gather_rows(torch.tensor([mine]), [1] * group.size)
    sizes, rows = table[:, : -group.size].tolist(), table[:, -group.size :]
    shares = tuple(ShareSizes(*size) for size in sizes)
    return Plan(
        options.layout, partition, options.halo.exchange, shares, pairs_of(rows), identity, parts,
        options.halo.bits_by_direction, known_ranks_per_node(group),
    )  # fmt: skip


def known_ranks_per_node(group: Group) -> int | None:
    """:func:`ranks_per_node`, unknown where there are several data groups (collective over all ranks)."""
    found = ranks_per_node()
    return found if group.size == world_group().size else None
