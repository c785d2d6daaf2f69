"""``python -m pyg_dist partition GRAPH OUT --parts P``: the store of a graph, which may be larger than memory.

One process, no launch, nothing collective.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from pyg_dist.errors import OptionError
from pyg_dist.partition.memory import parse_bytes
from pyg_dist.partition.solvers.options import Preset, Solver
from pyg_dist.plan import Machine
from pyg_dist.plan.parts import METHODS
from pyg_dist.report.conversion import StoreOptions, write_halo_store
from pyg_dist.report.grid_conversion import write_grid_store
from pyg_dist.report.output_file import require_drawable
from pyg_dist.report.stored_plan import plan_of_store
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.sources import KINDS, open_source

_LEAST_MEMORY = 1 << 23


def add_command(commands: Any) -> None:
    """Add ``partition`` to the command line."""
    parser = commands.add_parser("partition", help="write the store of a graph, which each rank reads its own part of")
    parser.set_defaults(run=run)
    parser.add_argument("graph", help=KINDS)
    parser.add_argument("out", type=Path, help="folder of the store")
    parser.add_argument("--parts", type=int, required=True, help="as many as ranks, or more: parts are then merged")
    parser.add_argument(
        "--model", default="metis", help=f"of the parts: {', '.join(METHODS)}, or a .npy file with a part per node"
    )
    parser.add_argument("--solver", choices=get_args(Solver), default="mt-kahypar", help="of hypergraphs")
    parser.add_argument("--preset", choices=get_args(Preset), help="of Mt-KaHyPar")
    parser.add_argument("--layout", choices=["halo", "grid"], default="halo")
    parser.add_argument("--tiles", type=int, nargs=2, metavar=("R", "C"), default=[16, 16], help="of a grid store")
    parser.add_argument(
        "--mesh", type=int, nargs=3, metavar=("X", "Y", "Z"), help="of a grid store; default: the planner's choice"
    )
    parser.add_argument("--epsilon", type=float, default=0.03, help="how much heavier than the mean a part may be")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", default="4GiB", help="to use, such as 4GiB")
    parser.add_argument("--undirected", action="store_true", help="add the reverse of each edge; each then stands once")
    parser.add_argument("--resume", action="store_true", help="go on with what an interrupted run has left")
    parser.add_argument("--force", action="store_true", help="replace a store, or an interrupted run's work")
    parser.add_argument("--json", action="store_true", help="print numbers instead of tables")
    parser.add_argument("--plot", type=Path, help="draw the plan: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> None:
    """Convert, and say what came out."""
    require_drawable(args.plot)
    memory = parse_bytes(args.memory)
    if memory < _LEAST_MEMORY:
        raise OptionError(f"Expected --memory of {_LEAST_MEMORY >> 20} MiB or more (got {args.memory})")
    if args.resume and args.force:
        raise OptionError("Expected --resume or --force (got both): one goes on, the other starts anew")
    began = time.perf_counter()
    options = StoreOptions(
        args.parts, args.model, args.epsilon, args.seed, memory, args.solver, args.preset, args.undirected,
        args.resume, args.force,
    )  # fmt: skip
    with tqdm(leave=False, disable=None, unit=" edges", unit_scale=True) as bar:

        def progress(step: str, count: int) -> None:
            bar.set_description(step, refresh=False)
            bar.update(count)

        source = open_source(args.graph)
        if args.layout == "grid":
            mesh = None if args.mesh is None else dict(zip("xyz", args.mesh, strict=True))
            tiles = (args.tiles[0], args.tiles[1])
            manifest = write_grid_store(source, args.out, options, tiles, mesh, progress=progress)
        else:
            manifest = write_halo_store(source, args.out, options, progress)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print_store(args, manifest, seconds, peak)


def print_store(args: argparse.Namespace, manifest: Manifest, seconds: float, peak: int) -> None:
    """Sizes, traffic, and what it took."""
    plan = plan_of_store(args.out, manifest.num_parts, "hybrid")
    size = sum(shard.num_bytes for shard in manifest.shards.values())
    if args.json:
        numbers = plan.to_dict() | {"seconds": seconds, "peak_bytes": peak, "store_bytes": size}
        print(json.dumps(numbers | {"num_nodes": manifest.num_nodes, "num_edges": manifest.num_edges}))
    else:
        print(plan.describe((), Machine.load()))
        print(
            f"{args.out}: {manifest.num_nodes:,} nodes, {manifest.num_edges:,} edges, {len(manifest.shards)} files, "
            f"{size / 2**20:,.1f} MiB; {seconds:.1f} s, peak {peak / 2**20:,.0f} MiB"
        )
    if args.plot:
        plan.plot(args.plot)
