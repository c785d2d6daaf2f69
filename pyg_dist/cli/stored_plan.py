"""Plans of stores, from their manifests alone, and of graphs with types; checking all of a store."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from pyg_dist.cli.inputs import read_parts, require, require_only, require_parts, train_mask_of
from pyg_dist.data.grid_data import edges_of_tile, on_mesh, stored_grid_plan
from pyg_dist.data.stored_graph import StoreOnRanks, rank_of_part, stored_plan
from pyg_dist.data.stored_types import stored_types_plan
from pyg_dist.data.typed_layout import find_parts_by_type
from pyg_dist.grid.plan.cost import grid_plans
from pyg_dist.grid.plan.plan import GridPlan
from pyg_dist.halo.plan.cover import ExchangeKind
from pyg_dist.halo.plan.levels import Hierarchy
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.halo.plan.relations import HeteroPlan
from pyg_dist.partition import check_given
from pyg_dist.plan.parts import PartsOptions
from pyg_dist.pricing.base import DistributionPlan
from pyg_dist.pricing.machine import Machine
from pyg_dist.store.grid_store import GridStore
from pyg_dist.store.halo_reader import HaloStore
from pyg_dist.store.manifest import FILE, Manifest, Shard
from pyg_dist.store.reader import check_shard
from pyg_dist.store.sources import open_types
from pyg_dist.store.typed_store import TypesManifest, is_typed_store


def is_store(graph: str) -> bool:
    """Whether ``graph`` is the folder of a store."""
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

    For the number of ranks that the store was written for, the manifest is enough. For another number every rank's
    files are read, one rank after another: merged parts of a halo store, or tiles of the cheapest mesh. Where ranks
    share machines, the rows that cross machines are read, too. ``machine`` prices meshes and levels.
    """
    manifest = Manifest.load(path)
    if manifest.layout == "grid":
        return _grid_plan(GridStore(path, manifest), ranks, machine)
    store = HaloStore(path, manifest)
    placed = StoreOnRanks(store, rank_of_part(store.path, [store], ranks), exchange)
    if ranks == manifest.num_parts:
        plan = stored_plan(store, exchange, (32, 32), ranks_per_node)
    else:
        name = manifest.planned("partition", str)
        plan = placed.counted(Plan("halo", name, exchange, (), (), placed.hash, ranks_per_node=ranks_per_node))
    return placed.in_cheaper_levels(plan, hierarchy, machine)


def _grid_plan(store: GridStore, ranks: int, machine: Machine | None) -> GridPlan:
    written = stored_grid_plan(store)
    if ranks == written.shape.size:
        return written
    machine = Machine.load() if machine is None else machine
    best = grid_plans(written.model, ranks, machine)[0]
    edges = tuple(edges_of_tile(store, best.shape, best.shape.coordinates(rank)) for rank in range(ranks))
    return on_mesh(written, best, machine, edges)


def plans_of_types(args: argparse.Namespace, machine: Machine) -> list[HeteroPlan] | None:
    """The plans of a graph with types, for each number of ranks; ``None`` for other graphs."""
    is_stored = is_typed_store(args.graph)
    source = None if is_stored else open_types(args.graph)
    if source is None and not is_stored:
        return None
    of_parts = () if is_stored else ("partition", "epsilon", "seed")
    of_levels = ("hierarchy", "machine", "device", "ranks_per_node")
    require_only(args, "several types", "graph", "ranks", "layout", "exchange", "widths", "json", *of_levels, *of_parts)
    require(args.layout in (None, "halo"), f"--layout halo with several types (got {args.layout}): leave it out")
    levels = args.ranks_per_node, args.hierarchy, machine
    if source is None:
        return [stored_types_plan(Path(args.graph), ranks, args.exchange, *levels) for ranks in args.ranks]
    edges, sizes = {relation: source.edge_index(relation) for relation in source.relations}, source.num_nodes
    require_parts("rank", max(args.ranks), sum(sizes.values()))
    plans = []
    for ranks in args.ranks:
        if args.partition.endswith(".npy"):
            owners = check_given(read_parts(args.partition), sum(sizes.values()), ranks)
            parts = dict(zip(sizes, torch.split(owners, list(sizes.values())), strict=True))
        else:
            options = PartsOptions(
                args.partition, args.epsilon, args.seed, exchange=args.exchange, ranks_per_node=args.ranks_per_node,
                hierarchy=args.hierarchy, machine=machine,
            )  # fmt: skip
            parts = find_parts_by_type(edges, sizes, train_mask_of(source.homogeneous()), ranks, options)
        plans.append(HeteroPlan.of(edges, parts, ranks, args.exchange, Path(args.partition).name, *levels))
    return plans


def check_store(path: Path) -> tuple[str, list[Shard]]:
    """Check every file of a store by its digests; return the manifest's digest, and the files."""
    if is_typed_store(path):
        whole = TypesManifest.load(path)
        checked = [check_store(store.path) for store in whole.halo_stores(path).all()]
        return whole.digest, [shard for _, shards in checked for shard in shards]
    manifest = Manifest.load(path)
    for shard in manifest.shards.values():
        check_shard(path, shard)
    return manifest.digest, list(manifest.shards.values())
