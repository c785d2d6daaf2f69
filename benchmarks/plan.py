"""Time and memory of planning: by number of edges, or of a graph in a file.

    python benchmarks/plan.py                                       # up to 4 million edges, a minute
    python benchmarks/plan.py --edges 1000000 10000000 50000000     # within 12 GiB
    python benchmarks/plan.py --graph GRAPH.npz --ranks 512         # METIS, counted in the seconds
    python benchmarks/plan.py --ranks 512 --ranks-per-node 8        # one level, two, and the cheaper of both
    python benchmarks/plan.py --ranks 512 --ranks-per-node 8 --shares  # what each rank does of it when training starts

Edges are those of R-MAT graphs with random parts, so that nearly every edge is remote: the worst case for a plan. Each
size runs in a process of its own, since memory is measured per process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import machine
import numpy as np
import resident_memory
import torch

# Probabilities of the four quadrants (Chakrabarti, Zhan and Faloutsos, "R-MAT", 2004; these values: Graph500).
QUADRANTS = (0.57, 0.19, 0.19, 0.05)
T = TypeVar("T")


def r_mat(num_nodes_log2: int, num_edges: int, seed: int = 0) -> torch.Tensor:
    """Return a power-law edge_index int64 ``[2, E]`` over ``2**num_nodes_log2`` nodes, with duplicates."""
    rng = np.random.default_rng(seed)
    edge_index = np.zeros((2, num_edges), dtype=np.int64)
    a, b, c, _ = QUADRANTS
    for _ in range(num_nodes_log2):
        draw = rng.random(num_edges, dtype=np.float32)
        edge_index <<= 1
        edge_index[0] += draw >= a + b
        edge_index[1] += ((draw >= a) & (draw < a + b)) | (draw >= a + b + c)
    return torch.from_numpy(edge_index)


def measure(num_edges: int, num_ranks: int, path: Path | None, on_each: int | None, hierarchy: Any) -> dict[str, Any]:
    """Plan once; the peak is of the whole process, the graph included."""
    from pyg_dist.cli.inputs import read_planned_graph
    from pyg_dist.halo.plan.plan import Plan
    from pyg_dist.partition import partition

    if path is None:
        num_nodes = 2 ** max(4, (num_edges // 16).bit_length())
        edge_index = r_mat(num_nodes.bit_length() - 1, num_edges)
        parts = partition(edge_index, num_nodes, num_ranks, "random")
    else:
        edge_index, num_nodes, *_ = read_planned_graph(path)
    graph_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    start, start_cpu = time.perf_counter(), time.process_time()
    if path is not None:
        parts = partition(edge_index, num_nodes, num_ranks, "metis")
    plan = Plan.of(edge_index, parts, num_ranks, ranks_per_node=on_each, hierarchy=hierarchy)
    return {
        "graph": "R-MAT" if path is None else path.stem,
        "partition": "random" if path is None else "metis",
        "ranks": num_ranks,
        "ranks_per_node": on_each,
        "hierarchy": hierarchy,
        "edges": edge_index.shape[1],
        "nodes": num_nodes,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        "graph_mib": graph_mib,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "rows": plan.rows,
    }


def random_graph(num_edges: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """An R-MAT graph and random parts."""
    from pyg_dist.partition import partition

    torch.set_num_threads(1)
    num_nodes = 2 ** max(4, (num_edges // 16).bit_length())
    edge_index = r_mat(num_nodes.bit_length() - 1, num_edges)
    return edge_index, partition(edge_index, num_nodes, num_ranks, "random")


def arriving_rows(num_edges: int, num_ranks: int, on_each: int, rank: int) -> np.ndarray[Any, Any]:
    """What all ranks send one of them when they plan together."""
    from pyg_dist.halo.plan.share import halo_share

    edge_index, parts = random_graph(num_edges, num_ranks)
    arriving: list[torch.Tensor] = []

    def keep(rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        arriving.append(rows.split(counts)[rank].clone())
        raise InterruptedError  # the sender's share is of no use

    for sender in range(num_ranks):
        with suppress(InterruptedError):
            halo_share(edge_index, parts, sender, num_ranks, ranks_per_machine=on_each, send=keep)
    return torch.cat(arriving).numpy()


def measure_share(
    num_edges: int, num_ranks: int, rank: int, on_each: int | None, arriving: np.ndarray[Any, Any] | None
) -> tuple[float, float]:
    """Seconds of one rank's share, the best of five, and the MiB that the first takes above the graph and its parts.

    ``on_each``: in two levels; ``arriving``: what the others send a rank that plans together with them.
    """
    from pyg_dist.backend.ops.memory import release_free_memory
    from pyg_dist.halo.plan.share import halo_share

    edge_index, parts = random_graph(num_edges, num_ranks)
    options: dict[str, Any] = {"ranks_per_machine": on_each}
    if arriving is not None:
        whole = torch.from_numpy(arriving)
        options["send"] = lambda rows, counts: whole.clone()
    halo_share(edge_index[:, :1000], parts, rank, num_ranks)  # loads what planning needs
    release_free_memory()
    resident_memory.forget_peak()
    before, seconds, mib = resident_memory.current_mib(), [], 0.0
    for _ in range(5):
        start = time.perf_counter()
        halo_share(edge_index, parts, rank, num_ranks, **options)
        seconds.append(time.perf_counter() - start)
        mib = mib or resident_memory.peak_mib() - before
    return min(seconds), mib


def shares(args: argparse.Namespace) -> None:
    """Each in a process of its own, which has freed nothing before that the C library might keep."""

    def apply(function: Callable[..., T], *given: Any) -> T:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(function, given)

    rank, on_each = min(3, args.ranks_per_node - 1), args.ranks_per_node
    print(f"{'edges':>12}{'ranks':>8}{'ms':>10}{'MiB':>10}  way")
    for num_edges in args.edges:
        arriving = apply(arriving_rows, num_edges, args.ranks, on_each, rank)
        ways = (("one level", None, None), ("alone", on_each, None), ("together", on_each, arriving))
        for way, *options in ways:
            seconds, mib = apply(measure_share, num_edges, args.ranks, rank, *options)
            print(f"{num_edges:>12,}{args.ranks:>8}{1e3 * seconds:>10.1f}{mib:>10.1f}  {way}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edges", type=int, nargs="+", default=[250_000, 1_000_000, 4_000_000])
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--ranks-per-node", type=int, help="also in two levels, on machines of so many ranks")
    parser.add_argument("--shares", action="store_true", help="a rank's share instead, in one level and in two")
    parser.add_argument("--graph", type=Path, help="plan this .npz instead")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    if args.shares:
        shares(args)
        return
    if not args.json:
        names = {"edges": 12, "nodes": 12, "seconds": 10, "us/edge": 10, "peak MiB": 10, "B/edge": 9, "hybrid/post": 13}
        print("".join(f"{name:>{width}}" for name, width in (names | {"levels": 8}).items()))
    results = []
    levels = [(None, "off")]
    if args.ranks_per_node:
        levels += [(args.ranks_per_node, "on"), (args.ranks_per_node, "auto")]
    for num_edges, (on_each, hierarchy) in itertools.product([0] if args.graph else args.edges, levels):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            m = pool.apply(measure, (num_edges, args.ranks, args.graph, on_each, hierarchy))
        results.append(m)
        if args.json:
            print(json.dumps(m))
            continue
        print(
            f"{m['edges']:>12,}{m['nodes']:>12,}{m['seconds']:>10.1f}{1e6 * m['seconds'] / m['edges']:>10.2f}"
            f"{m['peak_mib']:>10.0f}{m['peak_mib'] * 2**20 / m['edges']:>9.0f}"
            f"{m['rows']['hybrid'] / m['rows']['post']:>13.2f}{m['hierarchy']:>8}",
            flush=True,
        )
    if args.output:
        content = machine.earlier_results(args.output) or {"results": []}
        content["machine"] = machine.describe()
        content["results"] += results
        args.output.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
