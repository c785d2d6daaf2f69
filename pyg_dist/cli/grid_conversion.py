"""From an input graph to a grid store: read, choose a mesh and node orders, cut into tiles. Nothing collective."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from pyg_dist.backend.session.agreement import digest
from pyg_dist.cli.conversion import (
    Progress,
    StoreOptions,
    identity_of,
    nan_counts,
    read_edges,
    space_needed,
    watched,
    write_others,
)
from pyg_dist.errors import OptionError
from pyg_dist.grid.plan.cost import grid_plans
from pyg_dist.grid.plan.mesh_shape import MeshShape
from pyg_dist.grid.plan.plan import GridPlan
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.store.folder import StoreFolder, explained_disk_errors, require_space
from pyg_dist.store.grid_store import write_grid
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.source import SourceInfo
from pyg_dist.store.sources import Source
from pyg_dist.store.spool import Spool

_CHUNK = 1 << 20


def write_grid_store(
    source: Source,
    out: Path,
    options: StoreOptions,
    tiles: tuple[int, int],
    mesh: dict[str, int] | None = None,
    layers: tuple[int, int] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Write the grid store of a graph, in bounded memory.

    Args:
        source: the input.
        out: the folder.
        options: of these, ``parts`` is the number of ranks that the mesh is chosen for.
        tiles: rows and columns of tiles; ranks read those that their rectangles overlap.
        mesh: for which the node orders are balanced; None: the planner's choice.
        layers: of the model that it chooses for.
        progress: called with the step and the number of further edges that are done.

    Raises:
        DataError: The input is not valid; the message names file and line.
        OptionError: Tiles or a mesh that do not fit.
        StoreError: Something is in the way in ``out``, or the disk is full.
    """
    if min(tiles) < 1:
        raise OptionError(f"Expected --tiles of one or more (got {tiles[0]} {tiles[1]})")
    if options.parts < 1:
        raise OptionError(f"Expected one rank or more (got {options.parts})")
    wanted = None if mesh is None else MeshShape.of(mesh, options.parts)  # raises before there is a folder
    tell = progress or (lambda step, count: None)
    info = source.info()
    require_space(out, space_needed(info))
    identity = identity_of(source, info, options, repr(("grid", tiles, mesh, layers)))
    with explained_disk_errors(out), StoreFolder(out, identity, options.resume, options.force) as folder:
        edges = read_edges(source, info, folder, options, tell)
        edge_digest = edges.digest()
        model = Model.of_layers(edges.num_nodes, edges.num_edges, *model_columns(info), layers)
        machine = Machine.load()
        best = next(c for c in grid_plans(model, options.parts, machine) if wanted in (None, c.shape))
        plan, orders = GridPlan.of(
            lambda: _pieces(edges), model, best.shape, best.sums, best.price, machine, options.seed,
            digest(repr((edge_digest, options.seed))),
        )  # fmt: skip
        known = folder.known("nan")
        nan: dict[str, tuple[int, ...]] = {} if known is None else known["counts"]
        attributes = tuple(watched(a, nan) for a in info.nodes)
        shards = write_others(folder, info) | write_grid(
            folder, edges, attributes, [order.node_id.numpy() for order in orders], tiles, options.memory,
            lambda count: tell("sorting", count),
        )  # fmt: skip
        folder.note("nan", {"counts": nan})
        stored = {k: v for k, v in asdict(plan).items() if k not in ("layout", "tries")}
        stored |= {
            "tries": [asdict(balance) for balance in plan.tries], "tiles": list(tiles), "edge_digest": edge_digest,
            "seed": options.seed, "nan": nan_counts(nan, edges),
        }  # fmt: skip
        manifest = Manifest(
            "grid", edges.num_nodes, edges.num_edges, options.parts, info.graph,
            {a.name: (a.dtype, a.shape) for a in info.nodes}, {a.name: (a.dtype, a.shape) for a in info.edges},
            info.other, stored, shards,
        )  # fmt: skip
        folder.commit(manifest)
    return manifest


def _pieces(edges: Spool) -> Iterator[tuple[Tensor, Tensor]]:
    for _, source, target, _ in edges.chunks(_CHUNK):
        yield torch.from_numpy(source), torch.from_numpy(target)


def model_columns(info: SourceInfo) -> tuple[int | None, int | None]:
    """Columns of x and classes of y, as ``DistributedData`` sees them."""
    in_channels = out_channels = None
    for attribute in info.nodes:
        if attribute.name == "x" and len(attribute.shape) == 1:
            in_channels = attribute.shape[0]
        if attribute.name == "y" and attribute.dtype in ("I64", "I32", "I16", "I8", "U8"):
            largest = [int(rows.max()) for rows in attribute.rows(1 << 22) if rows.size]
            out_channels = max(max(largest) + 1, 1) if largest else None
    return in_channels, out_channels
