"""The picture of docs/performance.md: each product of ``spmm.py`` under the roofs of this machine's memory and cores.

    python benchmarks/roofline.py benchmarks/results/spmm-A.json benchmarks/results/roofline.svg

A product is a point: additions per second over additions per byte that it cannot do without (rows of x and of the
output once, four bytes an edge). The roofs: the copy's bandwidth of the same file, and the matrix product measured
here. Points under the slanted roof move rows more than once, from a cache at best: the distance is what reuse would
still gain.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import matplotlib
import power_law
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLOURS = {"pyg_dist float32": "tab:red", "torch CSR (MKL)": "tab:gray"}


def flops_per_second(num_threads: int) -> float:
    """Of a square matrix product in float32; the best of five, as others may be at work."""
    torch.set_num_threads(num_threads)
    clock = time.process_time if num_threads == 1 else time.perf_counter
    a = torch.randn(2048, 2048)
    seconds = []
    for _ in range(5):
        start = clock()
        a @ a
        seconds.append(clock() - start)
    return 2 * 2048**3 / min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON of spmm.py")
    parser.add_argument("picture", type=Path, help=".svg, .png or .pdf")
    parser.add_argument("--graph", help="the graph of the results, if not the one in the file's name")
    args = parser.parse_args()
    results = json.loads(args.results.read_text())["results"]
    data = power_law.load(args.graph or args.results.stem.removeprefix("spmm-"))
    num_nodes, num_edges = data.num_nodes, data.edge_index.shape[1]

    num_threads = results[0]["threads"]
    chosen = [result for result in results if result["threads"] == num_threads]
    # On one thread the CPU's time is fair even where others had the core in between.
    clock = "cpu_seconds" if num_threads == 1 else "seconds"
    bandwidth = max(8 * num_nodes * r["width"] / min(r["samples"]["copy"][clock]) for r in chosen)
    peak = flops_per_second(num_threads)

    figure, axes = plt.subplots(figsize=(7, 4.5))
    intensities = [0.01, peak / bandwidth, 100]
    axes.plot(intensities, [min(i * bandwidth, peak) / 1e9 for i in intensities], color="black")
    axes.annotate(f"copy, {bandwidth / 1e9:.0f} GB/s", (0.012, 0.016 * bandwidth / 1e9))
    axes.annotate(f"matrix product, {peak / 1e9:.0f} GFLOP/s", (peak / bandwidth, 0.7 * peak / 1e9))
    for name, colour in COLOURS.items():
        points = []
        for result in chosen:
            num_bytes = 8 * num_nodes * result["width"] + 4 * num_edges
            additions = num_edges * result["width"]
            points.append((additions / num_bytes, additions / statistics.median(result["samples"][name][clock]) / 1e9))
        axes.scatter(*zip(*points, strict=True), color=colour, label=name)
        for result, point in zip(chosen, points, strict=True):
            axes.annotate(str(result["width"]), point, textcoords="offset points", xytext=(5, -3), fontsize=8)
    axes.set(xscale="log", yscale="log", xlabel="additions per byte", ylabel="10⁹ additions per second")
    axes.set_title(f"{args.results.stem}, {num_threads} thread{'s' * (num_threads > 1)}; numbers are widths")
    axes.legend(loc="lower right")
    figure.savefig(args.picture, bbox_inches="tight")


if __name__ == "__main__":
    main()
