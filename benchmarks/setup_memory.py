"""What a set-up takes: how each rank's memory grows while ``DistributedData`` is made, beside the input's size.

    python benchmarks/setup_memory.py                     # 4 million edges, 130 MiB, two ranks
    python benchmarks/setup_memory.py --ranks 4 --partition random
    python benchmarks/setup_memory.py --layout grid

The graph is of clusters, so that METIS finds parts. Every rank holds the whole input while the set-up runs, which does
not count. Growth is resident memory above what stood there before the set-up began; rank 0's also by step. Beside it
stands what METIS takes alone, in a process that holds nothing but the graph that METIS is given.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import socket
import time
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import machine
import resident_memory

RESULTS = Path(__file__).resolve().parent / "results"


def graph(num_nodes: int, num_edges: int, num_features: int) -> Any:
    """Clusters of 1,000 nodes; nine of ten edges stay inside."""
    import torch
    from torch_geometric.data import Data

    rng = torch.Generator().manual_seed(0)
    source = torch.randint(0, num_nodes, (num_edges,), generator=rng)
    near = source // 1000 * 1000 + torch.randint(0, 1000, (num_edges,), generator=rng)
    far = torch.randint(0, num_nodes, (num_edges,), generator=rng)
    target = torch.where(torch.rand(num_edges, generator=rng) < 0.9, near.clamp_(max=num_nodes - 1), far)
    x = torch.randn(num_nodes, num_features, generator=rng)
    return Data(x=x, edge_index=torch.stack([source, target]))


class Steps(logging.Handler):
    """Hears when a step of the set-up has ended, and notes the growth at its largest and at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.before = resident_memory.current_mib()
        self.found: list[tuple[str, float, float]] = []
        resident_memory.forget_peak()

    def emit(self, record: logging.LogRecord) -> None:
        name = record.getMessage().rpartition(": ")[0]
        peak, end = resident_memory.peak_mib(), resident_memory.current_mib()
        self.found.append((name, peak - self.before, end - self.before))
        resident_memory.forget_peak()


def metis_alone(args: argparse.Namespace, answers: Queue[Any]) -> None:
    """What METIS takes above the graph that it is given, as ``DistributedData`` calls it."""
    import pymetis
    import torch

    from pyg_dist.backend.ops.memory import release_free_memory
    from pyg_dist.partition.metis import build_graph_model, metis_parts

    torch.set_num_threads(1)
    taken = []

    def solve(*given: Any, **options: Any) -> Any:
        release_free_memory()
        resident_memory.forget_peak()
        before = resident_memory.current_mib()
        parts = solver(*given, **options)
        taken.append(resident_memory.peak_mib() - before)
        return parts

    solver, pymetis.part_graph = pymetis.part_graph, solve
    model = build_graph_model(graph(args.nodes, args.edges, 1).edge_index, args.nodes)
    metis_parts(model, args.ranks, 0.03, 0, cuts_edges=args.partition == "metis-cut")
    answers.put(max(taken))


def measured(rank: int, port: int, args: argparse.Namespace, answers: Queue[Any]) -> None:
    """One rank."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port)}
    import torch

    import pyg_dist
    from pyg_dist.backend.ops.memory import release_free_memory

    torch.set_num_threads(1)
    pyg_dist.init()
    # Imports and pools of a first set-up are no part of what a graph takes.
    options = {"layout": args.layout} if args.layout == "grid" else {"partition": args.partition}
    pyg_dist.DistributedData(graph(1000, 5000, 4), **options)
    data = graph(args.nodes, args.edges, args.features)
    release_free_memory()
    steps, log = Steps(), logging.getLogger("pyg_dist")
    log.addHandler(steps)
    log.setLevel(logging.INFO)
    began = time.perf_counter()
    kept = pyg_dist.DistributedData(data, **options)
    seconds = time.perf_counter() - began
    peak = max([resident_memory.peak_mib() - steps.before, *(peak for _, peak, _ in steps.found)])
    release_free_memory()
    after = resident_memory.current_mib() - steps.before
    size = sum(t.numel() * t.element_size() for t in data.to_dict().values() if isinstance(t, torch.Tensor)) / 2**20
    answers.put(
        {
            "rank": rank, "input": size, "peak": peak, "after": after, "seconds": seconds, "edges": kept.num_edges,
            "steps": steps.found[:-1],  # the last one is the whole
        }
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=140_000)
    parser.add_argument("--edges", type=int, default=4_000_000)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--partition", default="metis")
    parser.add_argument("--layout", choices=["halo", "grid"], default="halo")
    parser.add_argument("--output", type=Path, default=RESULTS / "setup-memory.json")
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers: Queue[Any] = context.Queue()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    ranks = [context.Process(target=measured, args=(rank, port, args, answers)) for rank in range(args.ranks)]
    for process in ranks:
        process.start()
    results = sorted((answers.get() for _ in ranks), key=lambda found: found["rank"])
    for process in ranks:
        process.join()
    print("rank   input MiB   peak growth        growth after      seconds")
    for r in results:
        peak, after = (f"{r[name]:7.0f} ({r[name] / r['input']:.2f} x)" for name in ("peak", "after"))
        print(f"{r['rank']:>4} {r['input']:>11.0f} {peak:>17} {after:>17} {r['seconds']:>12.1f}")
    size = results[0]["input"]
    print("\nrank 0, step                        peak growth        growth at its end")
    for name, *growths in results[0]["steps"]:
        columns = (f"{mib:7.0f} ({mib / size:.2f} x)" for mib in growths)
        print(f"{name:<28}", *(f"{column:>18}" for column in columns))
    written = {"machine": machine.describe(), "ranks": results}
    if args.layout == "halo" and args.partition.startswith("metis"):
        alone = context.Process(target=metis_alone, args=(args, answers))
        alone.start()
        written["metis"] = found = answers.get()
        alone.join()
        rest = results[0]["peak"] - found
        print(f"\nMETIS alone, above its graph: {found:.0f} ({found / size:.2f} x); all else at that time {rest:.0f} "
              f"({rest / size:.2f} x)")  # fmt: skip
    args.output.write_text(json.dumps(written, indent=2) + "\n")


if __name__ == "__main__":
    main()
