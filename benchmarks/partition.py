"""Partitions compared: rows, messages, balance, seconds and memory of every method, and rows of mini-batches.

    python benchmarks/partition.py GRAPH.npz ... --parts 8 --output benchmarks/results/partition.json
    python benchmarks/partition.py GRAPH.npz ... --parts 8 --batches 10000     # mini-batches of a tenth, fresh ones

Each line runs in a process of its own, since memory is measured per process. Results are added to those in the file: a
line with the same graph, parts, method, preset and epsilon takes the place of the older one.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import time
from pathlib import Path
from typing import Any

import machine
import numpy as np
import torch

METHODS = ("random", "metis-cut", "metis", "metis-cover", "hypergraph", "cover", "stream")


def measure(path: Path, num_parts: int, method: str, epsilon: float, preset: str | None) -> dict[str, Any]:
    """One line."""
    from pyg_dist.cli.inputs import read_planned_graph
    from pyg_dist.cli.partitioning import measured, options_for
    from pyg_dist.plan.parts import PartsOptions, solve
    from pyg_dist.pricing.machine import Machine
    from pyg_dist.pricing.model import Model

    graph = read_planned_graph(path)
    num_edges = graph.edge_index.shape[1]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    options = options_for(PartsOptions("random", epsilon, preset=preset), method)  # type: ignore[arg-type]
    began, cpu = time.perf_counter(), time.process_time()
    parts = solve(graph.edge_index, graph.num_nodes, num_parts, options, graph.train_mask)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    model = Model.of_layers(graph.num_nodes, num_edges, None, None)
    line = measured(graph.edge_index, parts, num_parts, method, seconds, model, Machine())
    return {
        "graph": path.stem,
        "nodes": graph.num_nodes,
        "edges": num_edges,
        "epsilon": epsilon,
        "preset": preset,
        "cpu_seconds": cpu,
        "solver_mib": peak / 1024,
        **vars(line),
    }


def expected(path: Path, num_parts: int, epsilon: float, preset: str | None, count: int) -> dict[str, Any]:
    """Mean rows of fresh mini-batches of N/10 nodes: the stochastic model's parts, the plain model's, METIS' cut."""
    from pyg_dist.cli.inputs import read_planned_graph
    from pyg_dist.cli.partitioning import options_for
    from pyg_dist.partition import Batches
    from pyg_dist.partition.hypergraph import _batch_nets, uniform_batch
    from pyg_dist.plan.parts import PartsOptions, solve

    graph = read_planned_graph(path)
    options = PartsOptions("random", epsilon, preset=preset, batches=Batches(theta=0.1, delta=0.5))  # type: ignore[arg-type]
    methods = ("metis-cut", "hypergraph", "stochastic")
    found = {
        m: solve(graph.edge_index, graph.num_nodes, num_parts, options_for(options, m), graph.train_mask).numpy()
        for m in methods
    }
    source, target = graph.edge_index.numpy()
    order = np.argsort(source, kind="stable")
    first = np.searchsorted(source[order], np.arange(graph.num_nodes + 1))
    rows = dict.fromkeys(methods, 0)
    for step in range(count):
        ids = np.sort(uniform_batch(12345, step, graph.num_nodes, -(-graph.num_nodes // 10)))
        start, pin = _batch_nets(ids, first, target[order], graph.num_nodes)
        net = np.repeat(np.arange(start.size - 1), np.diff(start))
        for m in methods:
            rows[m] += np.unique(net * num_parts + found[m][pin]).size - (start.size - 1)
    return {
        "graph": path.stem,
        "parts": num_parts,
        "epsilon": epsilon,
        "preset": preset,
        "batches": count,
        "rows_by_batch": {m: rows[m] / count for m in methods},
        "stochastic_over_hypergraph": rows["stochastic"] / rows["hypergraph"],
    }


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def summary(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ratios by number of parts and epsilon: geometric means over the graphs that have all the methods."""
    found = []
    for parts, epsilon in sorted({(line["parts"], line["epsilon"]) for line in lines}):
        by_graph: dict[str, dict[str, dict[str, Any]]] = {}
        for line in lines:
            if (line["parts"], line["epsilon"]) == (parts, epsilon):
                by_graph.setdefault(line["graph"], {})[line["method"]] = line
        whole = {name: of for name, of in by_graph.items() if set(METHODS) <= set(of)}
        if not whole:
            continue
        others = {name: min(of[m]["hybrid"] for m in METHODS if m != "cover") for name, of in whole.items()}
        found.append(
            {
                "parts": parts,
                "epsilon": epsilon,
                "graphs": sorted(whole),
                "cover_over_best_other_hybrid": {n: whole[n]["cover"]["hybrid"] / others[n] for n in sorted(whole)},
                "mean_cover_over_best_other": geometric_mean(
                    [o["cover"]["hybrid"] / others[n] for n, o in whole.items()]
                ),
                "mean_cover_over_metis": geometric_mean(
                    [o["cover"]["hybrid"] / o["metis"]["hybrid"] for o in whole.values()]
                ),
                "mean_hypergraph_over_metis_post": geometric_mean(
                    [o["hypergraph"]["volume"] / o["metis"]["volume"] for o in whole.values()]
                ),
                "mean_hypergraph_over_cut_post": geometric_mean(
                    [o["hypergraph"]["volume"] / o["metis-cut"]["volume"] for o in whole.values()]
                ),
                "cover_cpu_over_hypergraph": {
                    n: o["cover"]["cpu_seconds"] / o["hypergraph"]["cpu_seconds"] for n, o in sorted(whole.items())
                },
                "cover_imbalance_over_metis": {
                    n: o["cover"]["imbalance"] / o["metis"]["imbalance"] for n, o in sorted(whole.items())
                },
                "cover_sender_over_metis": {
                    n: o["cover"]["largest_sender"] / o["metis"]["largest_sender"] for n, o in sorted(whole.items())
                },
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", type=Path)
    parser.add_argument("--parts", type=int, nargs="+", default=[8])
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=[*METHODS, "stochastic"])
    parser.add_argument("--epsilon", type=float, default=0.03)
    parser.add_argument("--preset", help="of Mt-KaHyPar; default: each method's own")
    parser.add_argument("--batches", type=int, help="compare expected rows by so many fresh mini-batches instead")
    parser.add_argument("--output", type=Path, help="add the results to this JSON file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    content = (args.output and machine.earlier_results(args.output)) or {"results": [], "expected": []}
    key = ("graph", "parts", "method", "preset", "epsilon")
    tasks: list[tuple[Any, ...]] = [
        (measure, (path, parts, method, args.epsilon, args.preset))
        for path in args.graphs for parts in args.parts for method in args.methods
    ]  # fmt: skip
    if args.batches:
        tasks = [
            (expected, (path, n, args.epsilon, args.preset, args.batches)) for path in args.graphs for n in args.parts
        ]
    for function, arguments in tasks:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            line = pool.apply(function, arguments)
        print(json.dumps(line), flush=True)
        kind = "expected" if args.batches else "results"
        identity = [line.get(name) for name in key]
        content[kind] = [old for old in content[kind] if [old.get(name) for name in key] != identity] + [line]
        if args.output:
            content["machine"] = machine.describe()
            content["summary"] = summary(content["results"])
            args.output.write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(summary(content["results"]), indent=2))


if __name__ == "__main__":
    main()
