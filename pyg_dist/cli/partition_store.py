"""The store of a graph, which may be larger than memory: ``python -m pyg_dist partition GRAPH OUT --parts P``.

One process, no launch, nothing collective.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path

from tqdm import tqdm

from pyg_dist.cli.conversion import StoreOptions, write_halo_store
from pyg_dist.cli.graph_options import reading_of
from pyg_dist.cli.grid_conversion import write_grid_store
from pyg_dist.cli.stored_plan import plan_of_store
from pyg_dist.errors import OptionError
from pyg_dist.partition import Batches
from pyg_dist.partition.memory import parse_bytes
from pyg_dist.pricing.machine import Machine
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.sources import open_source

_LEAST_MEMORY = 1 << 23
_TILES = (16, 16)


def run(args: argparse.Namespace, parts: int, method: str, batches: Batches | None) -> None:
    """Convert, and say what came out.

    Raises:
        OptionError: Options that do not go together, or out of range.
    """
    memory = parse_bytes(args.memory or "4GiB")
    if memory < _LEAST_MEMORY:
        raise OptionError(f"Expected --memory of {_LEAST_MEMORY >> 20} MiB or more (got {args.memory})")
    if args.resume and args.force:
        raise OptionError("Expected --resume or --force (got both): one goes on, the other starts anew")
    began = time.perf_counter()
    options = StoreOptions(
        parts, method, args.epsilon, args.seed, memory, args.solver, args.preset, args.undirected,
        args.resume, args.force, batches,
    )  # fmt: skip
    out = Path(args.out)
    with tqdm(leave=False, disable=None, unit=" edges", unit_scale=True) as bar:

        def progress(step: str, count: int) -> None:
            bar.set_description(step, refresh=False)
            bar.update(count)

        source = open_source(args.graph, reading_of(args))
        if args.layout == "grid":
            mesh = None if args.mesh is None else dict(zip("xyz", args.mesh, strict=True))
            rows, columns = args.tiles or _TILES
            manifest = write_grid_store(source, out, options, (rows, columns), mesh, progress=progress)
        else:
            manifest = write_halo_store(source, out, options, progress)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print_store(args, out, manifest, seconds, peak)


def print_store(args: argparse.Namespace, out: Path, manifest: Manifest, seconds: float, peak: int) -> None:
    """Sizes, traffic, and what it took."""
    plan = plan_of_store(out, manifest.num_parts, "hybrid")
    size = sum(shard.num_bytes for shard in manifest.shards.values())
    if args.json:
        numbers = plan.to_dict() | {"seconds": seconds, "peak_bytes": peak, "store_bytes": size}
        print(json.dumps(numbers | {"num_nodes": manifest.num_nodes, "num_edges": manifest.num_edges}))
    else:
        print(plan.describe((), Machine.load()))
        print(
            f"{out}: {manifest.num_nodes:,} nodes, {manifest.num_edges:,} edges, {len(manifest.shards)} files, "
            f"{size / 2**20:,.1f} MiB; {seconds:.1f} s, peak {peak / 2**20:,.0f} MiB"
        )
    if args.plot:
        plan.plot(args.plot)
