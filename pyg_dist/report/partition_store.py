"""``python -m pyg_dist partition GRAPH OUT --parts P``: the store of a graph, which may be larger than memory.

One process, no launch, nothing collective.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

from pyg_dist.errors import OptionError
from pyg_dist.partition import METHODS
from pyg_dist.plan import Machine, Model
from pyg_dist.plan.halo.remote_edges import EXCHANGES
from pyg_dist.report.conversion import StoreOptions, write_halo_store
from pyg_dist.report.output_file import require_drawable
from pyg_dist.report.stored_plan import halo_plan
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.sources import KINDS, open_source

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_LEAST_MEMORY = 1 << 23


def num_bytes(text: str) -> int:
    """The bytes of ``4GiB``, ``500MB``, ``1000000``.

    Raises:
        argparse.ArgumentTypeError: It is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 4GiB (got {text!r})")
    return int(float(found[1]) * _UNITS[found[2] or ""])


def add_command(commands: Any) -> None:
    """Add ``partition`` to the command line."""
    parser = commands.add_parser("partition", help="write the store of a graph, which each rank reads its own part of")
    parser.set_defaults(run=run)
    parser.add_argument("graph", help=KINDS)
    parser.add_argument("out", type=Path, help="folder of the store")
    parser.add_argument("--parts", type=int, required=True, help="as many as ranks, or more: parts are then merged")
    parser.add_argument(
        "--partition", default="metis", help=f"{', '.join(METHODS)}, or a .npy file with a part per node"
    )
    parser.add_argument("--epsilon", type=float, default=0.03, help="how much heavier than the mean a part may be")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", type=num_bytes, default="4GiB", help="to use, such as 4GiB")
    parser.add_argument("--undirected", action="store_true", help="add the reverse of each edge; each then stands once")
    parser.add_argument("--resume", action="store_true", help="go on with what an interrupted run has left")
    parser.add_argument("--force", action="store_true", help="replace a store, or an interrupted run's work")
    parser.add_argument("--json", action="store_true", help="print numbers instead of tables")
    parser.add_argument("--plot", type=Path, help="draw the plan: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> None:
    """Convert, and say what came out."""
    require_drawable(args.plot)
    if args.memory < _LEAST_MEMORY:
        raise OptionError(f"Expected --memory of {_LEAST_MEMORY >> 20} MiB or more (got {args.memory / 2**20:.1f} MiB)")
    if args.resume and args.force:
        raise OptionError("Expected --resume or --force (got both): one goes on, the other starts anew")
    began = time.perf_counter()
    options = StoreOptions(
        args.parts, args.partition, args.epsilon, args.seed, args.memory, args.undirected, args.resume, args.force
    )
    with tqdm(leave=False, disable=None, unit=" edges", unit_scale=True) as bar:

        def progress(step: str, count: int) -> None:
            bar.set_description(step, refresh=False)
            bar.update(count)

        manifest = write_halo_store(open_source(args.graph), args.out, options, progress)
    seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print_store(args, manifest, seconds, peak)


def print_store(args: argparse.Namespace, manifest: Manifest, seconds: float, peak: int) -> None:
    """Sizes, traffic, and what it took."""
    plan = halo_plan(args.out, manifest, "hybrid")
    size = sum(shard.num_bytes for shard in manifest.shards.values())
    if args.json:
        numbers = plan.to_dict() | {"seconds": seconds, "peak_bytes": peak, "store_bytes": size}
        print(json.dumps(numbers | {"num_nodes": manifest.num_nodes, "num_edges": manifest.num_edges}))
    else:
        model = Model.of_layers(manifest.num_nodes, manifest.num_edges, None, None)
        print(plan.describe((), Machine.load(), model))
        rows = ", ".join(f"{kind} {plan.rows[kind]:,}" for kind in EXCHANGES)
        print(
            f"{args.out}: {manifest.num_nodes:,} nodes, {manifest.num_edges:,} edges, {manifest.num_parts} parts, "
            f"{size / 2**20:,.1f} MiB; rows per aggregation: {rows}; {seconds:.1f} s, peak {peak / 2**20:,.0f} MiB"
        )
    if args.plot:
        plan.plot(args.plot)
