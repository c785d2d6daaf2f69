"""Accuracy with bfloat16 messages on the grid (ScaleGNN, V-B) against float32: five seeds on each graph.

    python benchmarks/accuracy_bf16.py GRAPH.npz ...          # the format of examples/example_graphs.py

Four ranks, mesh 2 x 1 x 2; a GCN of three layers, hidden 64, dropout 0.5, 150 epochs of Adam at 0.01. Both trainings of
a seed start alike and draw the same dropout masks. Test accuracy of the epoch with the best validation accuracy, in
percent; results go to ``benchmarks/results/accuracy-bf16.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import machine
import torch
import torch.nn.functional as F

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "accuracy-bf16.json"
MESH = {"x": 2, "z": 2}
HIDDEN, EPOCHS = 64, 150


def accuracy(graph: Any, seed: int, comm_dtype: torch.dtype | None) -> float:
    """Test accuracy in percent."""
    import pyg_dist
    from pyg_dist.conv import DistributedGCNConv

    data = pyg_dist.DistributedData(graph, layout="grid", mesh=MESH, comm_dtype=comm_dtype, seed=seed)
    torch.manual_seed(seed)
    widths = (graph.num_features, HIDDEN, HIDDEN, int(graph.y.max()) + 1)
    convs = torch.nn.ModuleList(DistributedGCNConv(a, b) for a, b in pairwise(widths))
    optimizer = torch.optim.Adam(convs.parameters(), lr=0.01, weight_decay=5e-4)

    def forward(is_training: bool) -> Any:
        x = F.dropout(data.x, 0.5, is_training)
        for conv in convs[:-1]:
            x = F.dropout(conv(x, data.edge_index).relu(), 0.5, is_training)
        return convs[-1](x, data.edge_index)

    best = (-1.0, 0.0)
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        F.cross_entropy(forward(True)[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        if epoch % 5 == 4:
            with torch.no_grad():
                right = (forward(False).argmax(-1) == data.y).float()
                best = max(best, tuple(right[data[m]].mean().item() for m in ("val_mask", "test_mask")))
    return 100 * best[1]


def worker(path: Path, seeds: int, output: Path) -> None:
    """All ranks together."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import example_graphs

    import pyg_dist

    torch.set_num_threads(1)
    pyg_dist.init()
    graph = example_graphs.read_npz(str(path))
    pairs = [(accuracy(graph, seed, None), accuracy(graph, seed, torch.bfloat16)) for seed in range(seeds)]
    difference = [low - full for full, low in pairs]
    if pyg_dist.is_main():
        output.write_text(json.dumps({
            "graph": path.stem,
            "taken_on": machine.describe(),
            "float32": [round(full, 3) for full, _ in pairs],
            "bfloat16": [round(low, 3) for _, low in pairs],
            "mean_difference": round(mean(difference), 3),
            "standard_error": round(stdev(difference) / len(difference) ** 0.5, 3),
        }))  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="+", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.graphs[0], args.seeds, args.worker)
        return
    reports = {r["graph"]: r for r in (json.loads(RESULTS.read_text()) if RESULTS.exists() else [])}
    for path in args.graphs:
        with tempfile.TemporaryDirectory() as folder:
            output = Path(folder) / "report.json"
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", __file__]
            rest = [str(path), "--worker", str(output), "--seeds", str(args.seeds)]
            subprocess.run([*launcher, *rest], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
            report = reports[path.stem] = json.loads(output.read_text())
        means = f"float32 {mean(report['float32']):.2f}, bfloat16 {mean(report['bfloat16']):.2f}"
        print(f"{path.stem}: {means}, difference {report['mean_difference']:+.2f} +- {report['standard_error']:.2f}")
        RESULTS.write_text(json.dumps([reports[name] for name in sorted(reports)], indent=1) + "\n")


if __name__ == "__main__":
    main()
