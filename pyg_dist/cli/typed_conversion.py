"""Graphs with types on the command line: writing their store, making their plan. One process, nothing collective."""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from pyg_dist.backend.session.agreement import digest
from pyg_dist.cli.conversion import Progress, StoreOptions, write_halo_store
from pyg_dist.cli.inputs import read_parts, require, require_parts
from pyg_dist.data.stored_types import stored_types_plan
from pyg_dist.data.typed_layout import find_parts_by_type
from pyg_dist.errors import StoreError
from pyg_dist.halo.plan.relations import HeteroPlan
from pyg_dist.partition import check_given
from pyg_dist.plan.parts import PartsOptions
from pyg_dist.store.folder import replace_text
from pyg_dist.store.hetero_input import WHOLE, HeteroInput, edges_key, nodes_key
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.sources.saved_graph import GraphInMemory
from pyg_dist.store.sources.typed import open_types
from pyg_dist.store.typed_store import FILE, TypesManifest, is_typed_store, joined


def parts_of_types(hetero: HeteroInput, num_parts: int, method: str, options: PartsOptions) -> dict[str, torch.Tensor]:
    """The part of each node, int32 ``[N]`` by type; ``method``: by name, or a file with those of all types in a row."""
    sizes = list(hetero.num_nodes.values())
    require_parts("part", num_parts, sum(sizes))
    if method.endswith(".npy"):
        parts = check_given(read_parts(method), sum(sizes), num_parts)
        return dict(zip(hetero.num_nodes, torch.split(parts, sizes), strict=True))
    return find_parts_by_type(hetero, num_parts, replace(options, method=method))


def write_types_store(
    path: Path, hetero: HeteroInput, out: Path, options: StoreOptions, progress: Progress | None = None
) -> TypesManifest:
    """Write the store of a graph that was read from ``path``; it appears whole. The graph is in memory."""
    is_plain = not (options.undirected or options.resume or options.batches is not None)
    require(is_plain, "no --undirected, --resume or --model stochastic with several types (got one): leave it out")
    if out.exists() and not (options.force and (out / FILE).is_file()) and (not out.is_dir() or any(out.iterdir())):
        raise StoreError(f"Expected nothing in {out} (got files): choose another name, or --force replaces a store")
    found_by = PartsOptions("metis", options.epsilon, options.seed, options.solver, options.preset, options.memory)
    parts = parts_of_types(hetero, options.parts, options.method, found_by)
    new = out.with_name(out.name + ".new")
    shutil.rmtree(new, ignore_errors=True)
    owners = {WHOLE: torch.empty(0, dtype=torch.int32)}
    owners |= {nodes_key(k): owner for k, owner in enumerate(parts.values())}
    pieces = hetero.pieces()
    for k, relation in enumerate(hetero.relations):
        source, _, target = relation
        owners[edges_key(k)] = parts[target] if source == target else torch.cat([parts[source], parts[target]])
        pieces[edges_key(k)] = joined(pieces[edges_key(k)], relation, hetero.num_nodes)
    stores = {}
    for key, piece in pieces.items():
        write_halo_store(GraphInMemory(path, piece), new / key, options, progress, owners[key])
        stores[key] = Manifest.load(new / key).digest
    manifest = TypesManifest(
        options.parts, "given" if options.method.endswith(".npy") else options.method, hetero.num_nodes,
        list(hetero.relations), [digest(graph.edge_index) for graph in hetero.relations.values()],
        {kind: digest(owner.to(torch.int32)) for kind, owner in parts.items()}, stores,
    )  # fmt: skip
    replace_text(new / FILE, manifest.to_json())
    if out.exists():
        shutil.rmtree(out)
    os.replace(new, out)
    return TypesManifest.load(out)


def plans_of_types(args: argparse.Namespace) -> list[HeteroPlan] | None:
    """What the command ``plan`` prints of a graph with types, for each number of ranks; ``None``: of other graphs."""
    is_stored = is_typed_store(args.graph)
    hetero = None if is_stored else open_types(args.graph)
    if hetero is None and not is_stored:
        return None
    for option in ("save", "plot", "html", "batch_size", "model", "undirected"):
        name = option.replace("_", "-")
        require(not getattr(args, option), f"no --{name} with several types (got one): leave it out")
    is_plain = args.layout in (None, "halo") and args.bits == [32]
    require(is_plain, "--layout halo and --bits 32 with several types (got others): leave them out")
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
