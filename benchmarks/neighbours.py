"""Neighbour sampling: edges a second and core, a whole batch, and the bytes of ids.

    python benchmarks/neighbours.py
    torchrun --standalone --nproc-per-node 2 benchmarks/neighbours.py
    SCRATCH/bin/python benchmarks/neighbours.py --dgl      # an environment with DGL: its sampler on the same graph

One thread a process, medians of CPU time; on several ranks each has its own part of a batch of ``--batch-size`` seeds,
parts are random, and the slowest rank counts. The graph has skewed sources: node ``u^2 N`` for a uniform u.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

SKIPPED = 2


def graph_of(num_nodes: int, num_edges: int) -> torch.Tensor:
    """Edges, int64 ``[2, E]``; the same on every rank."""
    rng = torch.Generator().manual_seed(0)
    source = torch.rand(num_edges, generator=rng, dtype=torch.float64).square_().mul_(num_nodes).long()
    return torch.stack([source, torch.randint(0, num_nodes, (num_edges,), generator=rng)])


def cpu_seconds(call: Callable[[int], Any], rounds: int) -> float:
    """Median CPU seconds of a call, which gets the number of the round."""
    times = []
    for k in range(SKIPPED + rounds):
        begin = time.process_time()
        call(k)
        times.append(time.process_time() - begin)
    return statistics.median(times[SKIPPED:])


def of_dgl(edge_index: torch.Tensor, args: argparse.Namespace) -> None:
    """DGL's sampler, blocks included."""
    import dgl

    graph = dgl.graph((edge_index[0], edge_index[1]), num_nodes=args.nodes).formats(["csc"])
    graph.create_formats_()
    seeds = torch.randperm(args.nodes, generator=torch.Generator().manual_seed(0)).split(args.batch_size)
    for fan_out in args.fan_outs:
        sampler, counts = dgl.dataloading.NeighborSampler(fan_out[::-1]), []

        def draw(k: int, sampler: Any = sampler, counts: list[int] = counts) -> None:
            counts.append(sum(block.num_edges() for block in sampler.sample_blocks(graph, seeds[k])[2]))

        seconds = cpu_seconds(draw, args.rounds)
        print(f"{fan_out}: DGL {statistics.mean(counts) / seconds / 1e6:.2f} M edges/s, {1e3 * seconds:.1f} ms a batch")


def of_pyg_dist(edge_index: torch.Tensor, args: argparse.Namespace) -> None:
    """The sampler, and the batch of it."""
    from torch_geometric.data import Data

    import pyg_dist
    from pyg_dist import DistributedData
    from pyg_dist.backend.comm.group import world_group
    from pyg_dist.loader import NeighborLoader

    graph = Data(edge_index=edge_index, x=torch.ones(args.nodes, 16))
    data = DistributedData(graph, partition="random")
    for fan_out in args.fan_outs:
        loader = NeighborLoader(data, fan_out, batch_size=args.batch_size, shuffle=True, prefetch=False)
        lists, counts = loader.sampler.ranks.part, []

        def draw(k: int, loader: Any = loader, counts: list[int] = counts) -> None:
            counts.append(sum(loader.sampler.sample(k).attributes["num_sampled_edges"]))

        before = lists.num_bytes
        draw_seconds = cpu_seconds(draw, args.rounds)
        num_bytes = (lists.num_bytes - before) / len(counts)
        batch_seconds = cpu_seconds(loader._batches.take, args.rounds)
        times = torch.tensor([draw_seconds, batch_seconds, num_bytes], dtype=torch.float64)
        draw_seconds, batch_seconds, num_bytes = world_group().all_reduce_(times, "max").tolist()
        edges = statistics.mean(counts)
        if pyg_dist.is_main():
            print(
                f"{fan_out}: {edges / draw_seconds / pyg_dist.world_size() / 1e6:.2f} M edges/s and core, drawn in "
                f"{1e3 * draw_seconds:.1f} ms, with the plan {1e3 * batch_seconds:.1f} ms; {edges:,.0f} edges, "
                f"{num_bytes / 1e6:.2f} MB of ids a rank"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=500_000)
    parser.add_argument("--edges", type=int, default=10_000_000)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--dgl", action="store_true")
    args = parser.parse_args()
    args.fan_outs = [[15, 10, 5], [10, 10]]
    torch.set_num_threads(1)
    (of_dgl if args.dgl else of_pyg_dist)(graph_of(args.nodes, args.edges), args)


if __name__ == "__main__":
    main()
