"""Plans of stores, from their manifests alone, and of graphs with types; checking all of a store."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from pyg_dist.cli.inputs import read_parts, require, require_only, require_parts
from pyg_dist.data.grid_data import edges_of_tile, on_mesh, stored_grid_plan
from pyg_dist.data.stored_graph import (
    merged_hash,
    rank_of_part,
    stored_plan,
    stored_rows_across,
    stored_share,
    stored_ways,
)
from pyg_dist.data.stored_types import stored_types_plan
from pyg_dist.data.typed_layout import find_parts_by_type
from pyg_dist.grid.plan.cost import grid_plans
from pyg_dist.grid.plan.plan import GridPlan
from pyg_dist.halo.plan.cover import ExchangeKind
from pyg_dist.halo.plan.levels import Hierarchy, shares_machines
from pyg_dist.halo.plan.plan import Plan, pairs_of
from pyg_dist.halo.plan.relations import HeteroPlan
from pyg_dist.halo.plan.sizes import ShareSizes, rows_between_nodes
from pyg_dist.halo.plan.two_level import Task
from pyg_dist.partition import check_given
from pyg_dist.plan.parts import PartsOptions
from pyg_dist.pricing.base import DistributionPlan
from pyg_dist.pricing.machine import Machine
from pyg_dist.store.graph_input import HeteroInput
from pyg_dist.store.grid_store import GridStore
from pyg_dist.store.halo_reader import HaloStore
from pyg_dist.store.manifest import FILE, Manifest, Shard
from pyg_dist.store.reader import check_shard
from pyg_dist.store.sources import open_types
from pyg_dist.store.typed_store import TypesManifest, is_typed_store


def is_store(graph: str) -> bool:
    """Whether a name is that of a store."""
    return (Path(graph) / FILE).is_file()


def plan_of_store(
    path: Path,
    ranks: int,
    exchange: ExchangeKind,
    ranks_per_node: int | None = None,
    machine: Machine | None = None,
    hierarchy: Hierarchy = "auto",
) -> DistributionPlan:
    """The plan that :meth:`pyg_dist.DistributedData.open` makes on ``ranks`` ranks.

    From the manifest alone for the number of ranks that the store was written for. For another number every rank's part
    is read, one after another: of a halo store merged parts, of a grid store the tiles of the cheapest mesh. Where
    ranks share machines, what crosses these is read, too.

    ``machine`` is to choose a mesh, or levels, by.
    """
    manifest = Manifest.load(path)
    if manifest.layout == "grid":
        return _grid_plan(GridStore(path, manifest), ranks, machine)
    store = HaloStore(path, manifest)
    of_part = rank_of_part(store.path, [store], ranks)
    if ranks == manifest.num_parts:
        plan = stored_plan(store, exchange, (32, 32), ranks_per_node)
    else:
        plan = _counted_plan(store, of_part, exchange, ranks_per_node)
    if ranks_per_node is None or not shares_machines(ranks, ranks_per_node):
        return plan
    hybrid = plan if exchange == "hybrid" else _counted_plan(store, of_part, "hybrid", ranks_per_node)
    one = rows_between_nodes(hybrid.rows_between(), ranks_per_node)
    plan = replace(plan, across=(one, stored_rows_across(store, of_part, ranks_per_node)))
    if hierarchy == "off":
        return plan
    both = _counted_plan(store, of_part, exchange, ranks_per_node, two_levels=True)
    both = replace(both, across=plan.across, hash=plan.hash)
    return both if hierarchy == "on" else min(plan, both, key=lambda plan: plan.price(machine=machine).seconds)


def _counted_plan(
    store: HaloStore, of_part: Tensor, exchange: ExchangeKind, ranks_per_node: int | None, two_levels: bool = False
) -> Plan:
    """By the share of each rank, one after another."""
    ranks, sizes = int(of_part.max()) + 1, []
    rows = torch.zeros(ranks, ranks, dtype=torch.int64)
    for rank in range(ranks):
        ways = None
        if two_levels and ranks_per_node is not None:
            ways = stored_ways(store, Task.alone(rank, ranks, ranks_per_node), of_part, exchange)
        share = stored_share(store, rank, of_part, exchange, ways=ways)
        sizes.append(ShareSizes.of(share))
        rows[rank] = torch.tensor(share.sum_transfer.sent).sum(0)
    return Plan(
        "halo", store.manifest.planned("partition", str), exchange, tuple(sizes), pairs_of(rows),
        merged_hash(store, of_part, exchange), ranks_per_node=ranks_per_node, two_levels=two_levels,
    )  # fmt: skip


def _grid_plan(store: GridStore, ranks: int, machine: Machine | None) -> GridPlan:
    written = stored_grid_plan(store)
    if ranks == written.shape.size:
        return written
    machine = Machine.load() if machine is None else machine
    best = grid_plans(written.model, ranks, machine)[0]
    edges = tuple(edges_of_tile(store, best.shape, best.shape.coordinates(rank)) for rank in range(ranks))
    return on_mesh(written, best.shape, best.sums, best.price, machine, edges)


def parts_of_types(hetero: HeteroInput, num_parts: int, method: str, options: PartsOptions) -> dict[str, torch.Tensor]:
    """The part of each node, int32 ``[N]`` by type; ``method``: by name, or a file with those of all types in a row."""
    sizes = list(hetero.num_nodes.values())
    require_parts("part", num_parts, sum(sizes))
    if method.endswith(".npy"):
        parts = check_given(read_parts(method), sum(sizes), num_parts)
        return dict(zip(hetero.num_nodes, torch.split(parts, sizes), strict=True))
    return find_parts_by_type(hetero, num_parts, replace(options, method=method))


def plans_of_types(args: argparse.Namespace) -> list[HeteroPlan] | None:
    """What the command ``plan`` prints of a graph with types, for each number of ranks; ``None``: of other graphs."""
    is_stored = is_typed_store(args.graph)
    hetero = None if is_stored else open_types(args.graph)
    if hetero is None and not is_stored:
        return None
    of_parts = () if is_stored else ("partition", "epsilon", "seed")
    require_only(args, "several types", "graph", "ranks", "layout", "exchange", "widths", "json", *of_parts)
    require(args.layout in (None, "halo"), f"--layout halo with several types (got {args.layout}): leave it out")
    require(min(args.widths, default=1) >= 1, f"--widths of one column or more (got {min(args.widths, default=1)})")
    require(min(args.ranks) >= 1, f"--ranks of one rank or more (got {min(args.ranks)})")
    if hetero is None:
        return [stored_types_plan(Path(args.graph), ranks, args.exchange) for ranks in args.ranks]
    edges = {relation: graph.edge_index for relation, graph in hetero.relations.items()}
    options = PartsOptions("metis", args.epsilon, args.seed, exchange=args.exchange)
    return [
        HeteroPlan.of(
            edges, parts_of_types(hetero, ranks, args.partition, options), ranks, args.exchange,
            Path(args.partition).name,
        )
        for ranks in args.ranks
    ]  # fmt: skip


def check_store(path: Path) -> tuple[str, list[Shard]]:
    """Check every file of a store by its digests; the manifest's own, the files."""
    if is_typed_store(path):
        whole = TypesManifest.load(path)
        checked = [check_store(store.path) for store in whole.halo_stores(path).all()]
        return whole.digest, [shard for _, shards in checked for shard in shards]
    manifest = Manifest.load(path)
    for shard in manifest.shards.values():
        check_shard(path, shard)
    return manifest.digest, list(manifest.shards.values())
