"""What a set-up takes: how each rank's memory grows while ``DistributedData`` is made, beside the input's size.

    python benchmarks/setup_memory.py                     # 4 million edges, 135 MiB, two ranks
    python benchmarks/setup_memory.py --ranks 4 --partition random

The graph is of clusters, so that METIS finds parts. Every rank holds the whole input while the set-up runs, which does
not count. Growth is resident memory above what stood there before the set-up began.
"""

from __future__ import annotations

import argparse
import json
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
    pyg_dist.DistributedData(graph(1000, 5000, 4), partition=args.partition)
    data = graph(args.nodes, args.edges, args.features)
    release_free_memory()
    resident_memory.forget_peak()
    before, began = resident_memory.current_mib(), time.perf_counter()
    kept = pyg_dist.DistributedData(data, partition=args.partition)
    seconds, peak = time.perf_counter() - began, resident_memory.peak_mib() - before
    release_free_memory()
    after = resident_memory.current_mib() - before
    size = sum(t.numel() * t.element_size() for t in data.to_dict().values() if isinstance(t, torch.Tensor)) / 2**20
    answers.put(
        {"rank": rank, "input": size, "peak": peak, "after": after, "seconds": seconds, "edges": kept.num_edges}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--nodes", type=int, default=140_000)
    parser.add_argument("--edges", type=int, default=4_000_000)
    parser.add_argument("--features", type=int, default=128)
    parser.add_argument("--partition", default="metis")
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
    args.output.write_text(json.dumps({"machine": machine.describe(), "ranks": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
