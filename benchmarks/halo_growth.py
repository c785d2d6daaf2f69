"""How the rows of an exchange grow with the number of ranks: the exponent that ``simulate`` extrapolates with.

    python benchmarks/halo_growth.py GRAPH.npz ...     # as for `pyg_dist plan`

METIS parts; ``rows = c ranks^a`` by least squares of logarithms, over all numbers of ranks that leave a part 60 nodes.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

from pyg_dist.cli.planned_graph import read_planned_graph
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.partition import partition


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256])
    args = parser.parse_args()
    print(f"{'graph':<20}{'ranks':>6}{'post / node':>13}{'hybrid / post':>15}{'pairs':>8}{'max/mean work':>15}")
    for path in args.graphs:
        graph = read_planned_graph(path)
        points = []
        for ranks in (r for r in args.ranks if graph.num_nodes >= 60 * r):
            parts = partition(graph.edge_index, graph.num_nodes, ranks, "metis")
            plan = Plan.of(graph.edge_index, parts, ranks)
            points.append((math.log(ranks), math.log(plan.rows["post"])))
            share, pairs = plan.rows["hybrid"] / plan.rows["post"], plan.messages / (ranks * (ranks - 1))
            work = plan.imbalance([s.work for s in plan.sizes])
            print(f"{path.stem:<20}{ranks:>6}{plan.rows['post'] / graph.num_nodes:>13.3f}{share:>15.3f}{pairs:>8.2f}"
                  f"{work:>15.2f}", flush=True)  # fmt: skip
        if len(points) > 1:
            print(f"{path.stem:<20} rows ~ ranks^{np.polyfit(*zip(*points, strict=True), 1)[0]:.2f}")


if __name__ == "__main__":
    main()
