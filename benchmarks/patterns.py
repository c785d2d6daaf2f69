"""What making patterns of edges costs, and dot products over them: nanoseconds an edge.

    python benchmarks/patterns.py                                 # graphs A and B, one thread and all: two minutes
    python benchmarks/patterns.py --graphs small --threads 1

Patterns: ``CSR.from_edges`` of a graph's edges in random order, and in the order of their rows; beside it the same by a
stable ``torch.argsort``, as it was done before there was a counting sort; and the transpose. Products: ``sddmm_csr``,
one dot product an edge, beside ``spmm_csr``, the sum over each row's edges. Variants take turns in one process, and
disturbed samples are taken again, as in :mod:`spmm`. Results are kept by processor.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import machine
import power_law
import torch
from spmm import RESULTS, Samples, measure
from torch import Tensor
from tqdm import tqdm

from pyg_dist.backend import ops
from pyg_dist.backend.sparse.csr import CSR

FROM_EDGES, ARGSORT = "CSR.from_edges", "torch.argsort"


def by_argsort(row: Tensor, col: Tensor, num_rows: int, num_cols: int) -> CSR:
    """The pattern by a stable sort of all rows, with the same checks."""
    for ends, limit in ((row, num_rows), (col, num_cols)):
        low, high = torch.aminmax(ends)
        if low < 0 or high >= limit:
            raise ValueError(f"expected entries in [0, {limit}), got {low} to {high}")
    order = torch.argsort(row.to(torch.int32), stable=True)  # of 32 bits it takes half the room to sort
    rowptr = torch.zeros(num_rows + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(row, minlength=num_rows), 0, out=rowptr[1:])
    return CSR(rowptr, col.to(torch.int32)[order], order, num_cols)


def pattern_variants(edge_index: Tensor, num_nodes: int) -> dict[str, Callable[[], Any]]:
    """All ways to make the same pattern, and its transpose."""
    source, target = edge_index[:, torch.randperm(edge_index.shape[1])]
    pattern = CSR.from_edges(target, source, None, num_nodes, num_nodes)
    other = by_argsort(target, source, num_nodes, num_nodes)
    assert all(torch.equal(getattr(pattern, name), getattr(other, name)) for name in ("rowptr", "col", "edge"))
    row, col = pattern.row(), pattern.col.long()
    return {
        FROM_EDGES: lambda: CSR.from_edges(target, source, None, num_nodes, num_nodes),
        ARGSORT: lambda: by_argsort(target, source, num_nodes, num_nodes),
        "CSR.from_edges, in order": lambda: CSR.from_edges(row, col, None, num_nodes, num_nodes),
        "CSR.transposed": lambda: replace(pattern).transposed,  # of one that has made none yet
    }


def product_variants(pattern: CSR, width: int) -> dict[str, Callable[[], Any]]:
    """The product and the dot products of the same rows, which are its derivative by the values."""
    pattern = replace(pattern)  # one that has chosen no form yet
    a, b = torch.randn(pattern.num_rows, width), torch.randn(pattern.num_cols, width)
    pattern.choose_form(b)
    some = torch.randint(pattern.num_entries, (1000,))
    found = ops.sddmm_csr(pattern.rowptr, pattern.col, a, b)[some]
    torch.testing.assert_close(found, (a[pattern.row()[some]] * b[pattern.col[some].long()]).sum(1))
    return {
        f"spmm_csr, width {width}": lambda: pattern.multiply(b),
        f"sddmm_csr, width {width}": lambda: ops.sddmm_csr(pattern.rowptr, pattern.col, a, b),
    }


def summary(samples: dict[str, Samples], num_edges: int) -> dict[str, Any]:
    """Nanoseconds an edge, by the clock and of the CPU, and how many times as long a sort takes as from_edges."""
    nanoseconds = {
        name: [round(1e9 * seconds / num_edges, 2) for seconds in (taken.median, taken.median_cpu)]
        for name, taken in samples.items()
    }
    ratio = [samples[ARGSORT].median / samples[FROM_EDGES].median]
    ratio += [samples[ARGSORT].median_cpu / samples[FROM_EDGES].median_cpu]
    return {"nanoseconds_per_edge": nanoseconds, "argsort_over_from_edges": [round(value, 2) for value in ratio]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", nargs="+", default=["A", "B"], help=f"{', '.join(power_law.SIZES)}, .npz files")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 64], help="of the products")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=int, default=3, help="samples of each variant")
    parser.add_argument("--retries", type=int, default=5, help="tries for each sample")
    parser.add_argument("--max-waited", type=float, default=0.03, help="share of a sample that may be spent waiting")
    parser.add_argument(
        "--output", type=Path, help="the JSON file (default: benchmarks/results/patterns-PROCESSOR.json)"
    )
    args = parser.parse_args()
    description = machine.describe()
    results = []
    for graph in args.graphs:
        data = power_law.load(graph)
        source, target = data.edge_index
        pattern = CSR.from_edges(target, source, None, data.num_nodes, data.num_nodes)
        for num_threads in tqdm(args.threads, desc=graph, disable=None):
            torch.set_num_threads(num_threads)
            variants = pattern_variants(data.edge_index, data.num_nodes)
            for width in args.widths:
                variants |= product_variants(pattern, width)
            samples = measure(variants, args.rounds, args.retries, args.max_waited)
            found = summary(samples, data.num_edges)
            print(f"{graph}: {data.num_nodes} nodes, {data.num_edges} edges, {num_threads} threads")
            for name, (clock, cpu) in found["nanoseconds_per_edge"].items():
                waited = max(samples[name].waited)
                print(f"  {name:26}{clock:>8.2f} ns an edge {cpu:>8.2f} ns CPU, waited {waited:.0%}")
            clock, cpu = found["argsort_over_from_edges"]
            print(f"  argsort takes {clock:.2f} times as long as from_edges, {cpu:.2f} by CPU time", flush=True)
            samples_of = {name: asdict(taken) for name, taken in samples.items()}
            sizes = {"graph": Path(graph).stem, "nodes": data.num_nodes, "edges": data.num_edges}
            results.append({**sizes, "threads": num_threads, **found, "samples": samples_of})
    output = args.output or RESULTS / f"patterns-{machine.processor()}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python", "benchmarks/patterns.py", *sys.argv[1:]])
    output.write_text(json.dumps({"command": command, "machine": description, "results": results}, indent=2) + "\n")
    print(f"written: {output}")


if __name__ == "__main__":
    main()
