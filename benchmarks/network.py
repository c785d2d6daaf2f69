"""The rates that plans are priced with: messages between ranks, and the aggregation of one rank.

    torchrun --standalone --nproc-per-node 4 benchmarks/network.py [--output machine.json]
    python -m pyg_dist plan GRAPH --ranks 64 --machine machine.json

Every rank sends to every other one. A line per size: a message per neighbour (what few neighbours use) and one
all-to-all-v (what many use). Latency and bandwidth are the least-squares line through the times of the messages; the
aggregation rate is that of a random graph of average degree 16. Medians; the slowest rank counts.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import machine
import numpy as np
import torch

import pyg_dist
from pyg_dist.backend import ops
from pyg_dist.backend.axis import Axis, world_axis
from pyg_dist.backend.csr import CSR
from pyg_dist.backend.exchange import Exchange

WIDTH = 256


def seconds_of(action: Callable[[], object], axis: Axis, repeats: int) -> float:
    """Median over the repeats of the slowest rank's time."""
    times = []
    for repeat in range(repeats + 3):
        axis.reduce_(torch.zeros(1))  # start together
        start = time.perf_counter()
        action()
        taken = time.perf_counter() - start
        slowest = float(axis.reduce_(torch.tensor([taken], dtype=torch.float64), "max"))
        if repeat >= 3:
            times.append(slowest)
    return median(times)


def exchange_seconds(axis: Axis, rows: int, is_dense: bool, repeats: int) -> float:
    counts = tuple(0 if rank == axis.rank else rows for rank in range(axis.size))
    exchange, x = Exchange(axis, counts, counts, is_dense=is_dense), torch.randn(sum(counts), WIDTH)
    return seconds_of(lambda: exchange.start(x).land(), axis, repeats)


def aggregation_rate(axis: Axis, repeats: int, num_nodes: int = 50_000, degree: int = 16) -> float:
    row, col = (torch.randint(num_nodes, (num_nodes * degree,)) for _ in range(2))
    csr = CSR.from_edges(row, col, torch.zeros_like(row), num_nodes, num_nodes)
    x = torch.randn(num_nodes, WIDTH)
    return num_nodes * degree * WIDTH / seconds_of(lambda: ops.spmm_csr(csr.rowptr, csr.col, x), axis, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 256, 4096], help=f"of {WIDTH} floats, per pair")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--output", type=Path, help="JSON for `pyg_dist plan --machine`")
    args = parser.parse_args()

    pyg_dist.init()
    axis = world_axis()
    if axis.size < 2:
        parser.error("expected two ranks or more: torchrun --standalone --nproc-per-node 4 benchmarks/network.py")
    lines, per_message = [], []
    for rows in args.rows:
        messages, together = (exchange_seconds(axis, rows, dense, args.repeats) for dense in (False, True))
        per_message.append(messages / (axis.size - 1))
        lines.append(f"{4 * WIDTH * rows:>12,} B{1e6 * messages:>14,.0f} us{1e6 * together:>14,.0f} us"
                     f"{messages / together:>8.2f}")  # fmt: skip
    num_bytes = np.array([4.0 * WIDTH * rows for rows in args.rows])
    # Weighted by 1 / time: the line has to fit small messages as well as large ones.
    slope, latency = np.polyfit(num_bytes, per_message, 1, w=1 / np.array(per_message))
    rates = {"latency": float(latency), "bandwidth": float(1 / slope), "aggregation": aggregation_rate(axis, 5)}
    if pyg_dist.is_main():
        print(f"{axis.size} ranks, {machine.describe()}")
        print(f"{'per pair':>14}{'messages':>17}{'all-to-all-v':>17}{'ratio':>8}", *lines, sep="\n")
        print(json.dumps(rates))
        if args.output:
            args.output.write_text(json.dumps(rates) + "\n")


if __name__ == "__main__":
    main()
