"""Rows that cross machines: covers by pairs of ranks and of machines, of several kinds of parts.

    python benchmarks/crossing.py GRAPH.npz ...                    # 8 ranks on 2 machines, 32 on 4
    python benchmarks/crossing.py hubs A --machines 8 4            # generated graphs (power_law.py)
    python benchmarks/crossing.py GRAPH.npz --machines 8 4 --output benchmarks/results/crossing.json

Plain parts are those of ``pymetis.part_graph(P, graph)`` alone: as many nodes in each, whatever their edges. A file may
have each edge of an undirected graph once. Training sends along both of its directions, and so rows are counted; beside
them stands what they are if an edge counts once, as it is stored.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import power_law
import torch
from torch import Tensor

from pyg_dist.cli.inputs import read_planned_graph
from pyg_dist.halo.plan.levels import LevelCounts
from pyg_dist.halo.plan.sizes import renumbered
from pyg_dist.partition.metis import build_graph_model
from pyg_dist.plan.parts import PartsOptions, find_parts
from pyg_dist.pricing.machine import Machine

KINDS = ("plain METIS", "plan", "metis-cover")


def plain_parts(edge_index: Tensor, num_nodes: int, num_ranks: int, ranks_per_machine: int) -> Tensor:
    """METIS' own, placed on machines."""
    import pymetis

    graph = build_graph_model(edge_index, num_nodes)
    adjacency = pymetis.CSRAdjacency(graph.start.astype(np.int64), graph.neighbor.astype(np.int64))
    parts = torch.tensor(pymetis.part_graph(num_ranks, adjacency)[1])
    return renumbered(edge_index, parts, num_ranks, ranks_per_machine, "hybrid")


def measure(name: str, num_ranks: int, ranks_per_machine: int) -> list[dict[str, Any]]:
    """A line for each kind of parts."""
    graph: Any
    if name in power_law.SIZES:
        graph = power_law.load(name)
        stored = graph.edge_index
    else:
        graph = read_planned_graph(Path(name))
        with np.load(name) as file:
            stored = torch.from_numpy(file["edge_index"].astype(np.int64))
    edge_index, num_nodes = graph.edge_index, graph.num_nodes
    lines = []
    for kind in KINDS:
        began = time.perf_counter()
        if kind != KINDS[0]:
            method = "metis" if kind == "plan" else kind
            options = PartsOptions(method, ranks_per_node=ranks_per_machine, machine=Machine())
            parts = find_parts(edge_index, num_nodes, num_ranks, options, graph.train_mask)
        else:
            parts = plain_parts(edge_index, num_nodes, num_ranks, ranks_per_machine)
        seconds = time.perf_counter() - began
        (of_ranks, of_machines), (of_ranks_once, of_machines_once) = (
            LevelCounts.of(edges, parts, num_ranks, ranks_per_machine).across or (0, 0)
            for edges in (edge_index, stored)
        )
        load = [torch.bincount(owner, minlength=num_ranks) for owner in (parts[edge_index[1]], parts)]
        edges, nodes = (float(found.max() * num_ranks / found.sum()) for found in load)
        lines.append({
            "graph": Path(name).stem, "ranks": num_ranks, "ranks_per_machine": ranks_per_machine, "parts": kind,
            "rank_pairs": of_ranks, "machine_pairs": of_machines, "rank_pairs_once": of_ranks_once,
            "machine_pairs_once": of_machines_once, "edges": edges, "nodes": nodes, "seconds": seconds,
        })  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+")
    parser.add_argument("--machines", type=int, nargs=2, action="append", metavar=("RANKS", "RANKS_PER_MACHINE"))
    parser.add_argument("--output", type=Path, help="write the results to this JSON file")
    args = parser.parse_args()
    names = {"graph": 18, "ranks": 6, "parts": 13, "by ranks": 10, "by machines": 13, "ratio": 7, "once": 16,
             "edges": 7, "nodes": 7, "seconds": 9}  # fmt: skip
    print("".join(f"{name:>{width}}" for name, width in names.items()))
    lines = []
    for name in args.graphs:
        for ranks, on_each in args.machines or [(8, 4), (32, 8)]:
            lines += measure(name, ranks, on_each)
            for m in lines[-len(KINDS) :]:
                cells = (
                    m["graph"], ranks, m["parts"], f"{m['rank_pairs']:,}", f"{m['machine_pairs']:,}",
                    f"{m['machine_pairs'] / max(1, m['rank_pairs']):.2f}",
                    f"{m['rank_pairs_once']:,} {m['machine_pairs_once']:,}", f"{m['edges']:.2f}", f"{m['nodes']:.2f}",
                    f"{m['seconds']:.1f}",
                )  # fmt: skip
                print("".join(f"{cell:>{w}}" for cell, w in zip(cells, names.values(), strict=True)), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"machine": machine.describe(), "results": lines}, indent=2) + "\n")


if __name__ == "__main__":
    main()
