"""Accuracy with bfloat16 messages on the grid (ScaleGNN, V-B) against float32: some seeds on each graph.

    python benchmarks/accuracy_bf16.py GRAPH.npz ...          # the format of examples/example_graphs.py
    python benchmarks/accuracy_bf16.py GRAPH.npz --seeds 10   # goes on where it ended

Four ranks, mesh 2 x 1 x 2; a GCN of three layers, hidden 64, dropout 0.5, 100 epochs of Adam at 0.01. Both trainings of
a seed start alike and draw the same dropout masks, so their difference is what counts. Accuracy on the test nodes in
percent, twice: of the epoch that is best on the validation nodes, and the mean of the last ten epochs looked at (every
fifth), which jumps less. Results go to ``benchmarks/results/accuracy-bf16.json``, seed by seed.
"""

from __future__ import annotations

import argparse
import json
import math
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
HIDDEN, EPOCHS = 64, 100
FORMS = {"float32": None, "bfloat16": torch.bfloat16}
METRICS = ("best_validation", "last_ten")


def accuracy(graph: Any, seed: int, comm_dtype: torch.dtype | None) -> tuple[float, float]:
    """Test accuracy in percent: at the best validation accuracy, and late."""
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

    seen: list[tuple[float, float]] = []
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        F.cross_entropy(forward(True)[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
        if epoch % 5 == 4:
            with torch.no_grad():
                right = (forward(False).argmax(-1) == data.y).float()
                seen.append((right[data.val_mask].mean().item(), right[data.test_mask].mean().item()))
    return 100 * max(seen)[1], 100 * mean(test for _, test in seen[-10:])


def worker(path: Path, seed: int, output: Path) -> None:
    """All ranks together: one seed in both forms."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import example_graphs

    import pyg_dist

    torch.set_num_threads(1)
    pyg_dist.init()
    graph = example_graphs.read_npz(str(path))
    runs = {name: accuracy(graph, seed, dtype) for name, dtype in FORMS.items()}
    if pyg_dist.is_main():
        output.write_text(json.dumps({"taken_on": machine.describe(), "runs": runs}))


def with_seed(report: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """The report with one more seed."""
    report = report | {"taken_on": run["taken_on"]}
    for kind, metric in enumerate(METRICS):
        known = report.get(metric, {})
        found = {name: [*known.get(name, []), round(run["runs"][name][kind], 3)] for name in FORMS}
        difference = [b - a for a, b in zip(found["float32"], found["bfloat16"], strict=True)]
        error = stdev(difference) / len(difference) ** 0.5 if len(difference) > 1 else None
        report[metric] = found | {
            "mean_difference": round(mean(difference), 3),
            "standard_error": None if error is None else round(error, 3),
        }
    return report


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
        report = reports.get(path.stem, {"graph": path.stem})
        for seed in range(len(report.get(METRICS[0], {}).get("float32", [])), args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "run.json"
                launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
                rest = [__file__, str(path), "--worker", str(output), "--seeds", str(seed)]
                subprocess.run([*launcher, *rest], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                report = reports[path.stem] = with_seed(report, json.loads(output.read_text()))
            RESULTS.write_text(json.dumps([reports[name] for name in sorted(reports)], indent=1) + "\n")
        for metric in METRICS:
            r = report[metric]
            print(f"{path.stem}, {metric}: float32 {mean(r['float32']):.2f}, bfloat16 {mean(r['bfloat16']):.2f}, "
                  f"difference {r['mean_difference']:+.2f} +- {r['standard_error'] or math.nan:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
