"""Hyperedges of a ``DistributedData``: nodes of a second set, each on the rank that has most of its nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pyg_dist.data.layout_choice import gathered_plan
from pyg_dist.data.options import Options
from pyg_dist.data.storage import LocalGraph, local_rows
from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import NO_HYPEREDGES
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.relations import HeteroPlan, relation_hash
from pyg_dist.store.hyperedges import Hyperedges


def options_of_hyperedges(options: Options) -> Options:
    """Those of a graph with hyperedges, whose layout is the halo."""
    if options.layout == "grid":
        raise UnsupportedError(NO_HYPEREDGES)
    return replace(options, layout="halo")


def with_hyperedges(local: LocalGraph, given: Hyperedges, options: Options) -> LocalGraph:
    """A rank's part of a graph, and of its hyperedges (collective)."""
    nodes, device = local.graph.node_sharding, local.graph.device
    handle: Any = DistributedEdgeIndex.over(given.incidence, given.size, device, is_kept=False, sources=nodes)
    graph = handle.graph
    attributes: dict[str, object] = {given.key: handle}  # before the rows that lie as it says
    for rows, found in ((graph.targets, given.attributes), (graph.edge_sharding, given.values)):
        attributes |= {name: local_rows(value, rows, device) for name, value in found.items()}
    return replace(
        local,
        graph_key=local.graph_key if local.graph.edge_sharding.size else None,
        plan=_plan(local, graph, given, options),
        attributes=attributes | local.attributes,
    )


def _plan(local: LocalGraph, graph: Any, given: Hyperedges, options: Options) -> Any:
    """That of the edges, if there are any, and of what goes from nodes to hyperedges (collective)."""
    if not isinstance(local.plan, Plan):
        return local.plan
    nodes, hyperedges = graph.sources, graph.targets
    owners = nodes.parts(), hyperedges.parts()
    identity = relation_hash(given.incidence, *owners, nodes.group.size, nodes.exchange)
    plan = gathered_plan(graph.share, nodes.group, options, local.plan.partition, None, identity)
    plans = {("node", "to", "node"): local.plan} if local.graph.edge_sharding.size else {}
    plans["node", "in", "hyperedge"] = plan
    return HeteroPlan({"node": nodes.counts, "hyperedge": hyperedges.counts}, plans, local.plan.parts)
