"""Accuracy with bfloat16 messages on the grid (ScaleGNN, V-B), or dense products, against float32: some seeds a graph.

    python benchmarks/accuracy_bf16.py GRAPH.npz ...          # the format of examples/example_graphs.py
    python benchmarks/accuracy_bf16.py GRAPH.npz --seeds 10   # goes on where it ended
    python benchmarks/accuracy_bf16.py GRAPH.npz --products   # dense products instead of messages

Messages: four ranks, mesh 2 x 1 x 2. Products: one process, and what matrix units compute under
``torch.backends.mkldnn.matmul.fp32_precision = "bf16"``, forward and backward, on any processor: factors rounded to
bfloat16, float32 sums. A GCN of three layers, hidden 64, dropout 0.5, 100 epochs of Adam at 0.01. Both trainings of
a seed start alike and draw the same dropout masks, so their difference is what counts. Accuracy on the test nodes in
percent, twice: of the epoch that is best on the validation nodes, and the mean of the last ten epochs looked at (every
fifth), which jumps less. Results go to ``benchmarks/results/accuracy-bf16.json`` or ``accuracy-bf16-products.json``,
seed by seed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import machine
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
MESH = {"x": 2, "z": 2}
HIDDEN, EPOCHS = 64, 100
FORMS = {"float32": None, "bfloat16": torch.bfloat16}
METRICS = ("best_validation", "last_ten")
FIRST_FACTOR = {torch.ops.aten.mm: 0, torch.ops.aten.addmm: 1, torch.ops.aten.bmm: 0, torch.ops.aten.linear: 0}


class BF16Products(TorchDispatchMode):
    """Rounds both factors of each dense product of float32 matrices to bfloat16; sums stay float32."""

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        first = FIRST_FACTOR.get(function.overloadpacket)
        if first is not None and args[first].dtype == torch.float32:
            factors = (factor.bfloat16().float() for factor in args[first : first + 2])
            args = (*args[:first], *factors, *args[first + 2 :])
        return function(*args, **(kwargs or {}))


def accuracy_of_messages(graph: Any, seed: int, dtype: torch.dtype | None) -> tuple[float, float]:
    """On the grid, with messages of a dtype."""
    import pyg_dist

    return accuracy(pyg_dist.DistributedData(graph, layout="grid", mesh=MESH, comm_dtype=dtype, seed=seed), graph, seed)


def accuracy_of_products(graph: Any, seed: int, dtype: torch.dtype | None) -> tuple[float, float]:
    """On one process, with dense products of a dtype."""
    import pyg_dist

    with nullcontext() if dtype is None else BF16Products():
        return accuracy(pyg_dist.DistributedData(graph, seed=seed), graph, seed)


def accuracy(data: Any, graph: Any, seed: int) -> tuple[float, float]:
    """Test accuracy in percent: at the best validation accuracy, and late."""
    from pyg_dist.conv import DistributedGCNConv

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


def worker(path: Path, seed: int, products: bool, output: Path) -> None:
    """All ranks together: one seed in both forms."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    import example_graphs

    import pyg_dist

    torch.set_num_threads(1)
    pyg_dist.init()
    graph = example_graphs.read_npz(str(path))
    measure = accuracy_of_products if products else accuracy_of_messages
    runs = {name: measure(graph, seed, dtype) for name, dtype in FORMS.items()}
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
    parser.add_argument("--products", action="store_true", help="bfloat16 dense products instead of messages")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(args.graphs[0], args.seeds, args.products, args.worker)
        return
    results = RESULTS / ("accuracy-bf16-products.json" if args.products else "accuracy-bf16.json")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={math.prod(MESH.values())}"]
    launcher, option = ([], ["--products"]) if args.products else (torchrun, [])
    reports = {r["graph"]: r for r in (json.loads(results.read_text()) if results.exists() else [])}
    for path in args.graphs:
        report = reports.get(path.stem, {"graph": path.stem})
        for seed in range(len(report.get(METRICS[0], {}).get("float32", [])), args.seeds):
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "run.json"
                rest = [__file__, str(path), "--worker", str(output), "--seeds", str(seed), *option]
                command = [sys.executable, *launcher, *rest]
                subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
                report = reports[path.stem] = with_seed(report, json.loads(output.read_text()))
            results.write_text(json.dumps([reports[name] for name in sorted(reports)], indent=1) + "\n")
        for metric in METRICS:
            r = report[metric]
            print(f"{path.stem}, {metric}: float32 {mean(r['float32']):.2f}, bfloat16 {mean(r['bfloat16']):.2f}, "
                  f"difference {r['mean_difference']:+.2f} +- {r['standard_error'] or math.nan:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
