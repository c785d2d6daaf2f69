"""How long mini-batches take to the accuracy of full-batch training, in one process; runs in parts.

    python benchmarks/time_to_accuracy.py ../shared/data/pubmed.npz ../shared/data/amazon_computers.npz --seeds 5
    python benchmarks/time_to_accuracy.py --report

A 3-layer SAGE (hidden 128, ReLU, dropout 0.5, Adam with lr 0.01), batches of N / 8 nodes; splits are those of the
graph, or 60 / 20 / 20 drawn by the seed. *full*: the whole graph in each step. *uniform*: ``UniformVertexLoader``, with
unbiased sums; *induced*: the same without rescaling; *random node*: PyG's ``RandomNodeLoader``, a partition of the
nodes in each epoch. Each run is appended to ``results/time_to_accuracy.json`` when it ends, and runs that are there are
passed over. A run notes its seconds, evaluations excluded, and its accuracies on the whole graph after each epoch of
batches (full batch: after every fifth step). The target is 99 % of what full batch reaches, a mean over seeds of the
test accuracy at the best validation accuracy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import SAGEConv

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import example_graphs
import machine

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.loader import UniformVertexLoader

RESULTS = Path(__file__).resolve().parent / "results" / "time_to_accuracy.json"
HIDDEN, NUM_LAYERS, DROPOUT, LEARNING_RATE, NUM_BATCHES, FULL_STEPS_PER_POINT = 128, 3, 0.5, 0.01, 8, 5
METHODS = ("full", "uniform", "induced", "random node")


class SAGE(nn.Module):
    """Layers with ReLU and dropout."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        widths = (in_channels, *[HIDDEN] * (NUM_LAYERS - 1), num_classes)
        self.convs = nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Scores."""
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).relu(), DROPOUT, self.training)
        return self.convs[-1](x, edge_index)  # type: ignore[no-any-return]


def epochs(method: str, data: DistributedData, seed: int) -> Iterable[Iterable[Any]]:
    """Batches up to the next evaluation, again and again."""
    size = data.num_nodes // NUM_BATCHES
    if method == "full":
        while True:
            yield [data] * FULL_STEPS_PER_POINT
    loader: Any
    if method == "random node":
        loader = RandomNodeLoader(data, NUM_BATCHES, shuffle=True)
    else:
        loader = UniformVertexLoader(data, size, seed=seed, input_nodes=data.train_mask, rescale=method == "uniform")
    while True:
        yield loader


@torch.no_grad()
def accuracies(model: nn.Module, data: DistributedData) -> tuple[float, float]:
    """On the nodes that validate and on those that test, whole graph."""
    model.eval()
    hits = model(data.x, data.edge_index).argmax(-1) == data.y
    return hits[data.val_mask].float().mean().item(), hits[data.test_mask].float().mean().item()


def train(path: Path, method: str, seed: int, num_points: int) -> dict[str, Any]:
    """One run."""
    torch.manual_seed(seed)
    data = DistributedData(example_graphs.read_npz(str(path), seed))
    model = pyg_dist.distribute(SAGE(data.num_features, int(data.y.max()) + 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    steps, seconds, points = 0, 0.0, []
    for batches in epochs(method, data, seed):
        model.train()
        begin = time.perf_counter()
        for batch in batches:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)
            F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask]).backward()
            optimizer.step()
            steps += 1
        seconds += time.perf_counter() - begin
        points.append([steps, round(seconds, 3), *(round(a, 5) for a in accuracies(model, data))])
        if len(points) == num_points:
            break
    return {"graph": path.stem, "method": method, "seed": seed, "points": points}


def best(run: dict[str, Any]) -> float:
    """Test accuracy at the best validation accuracy."""
    return float(max(run["points"], key=lambda point: point[2])[3])


def report(found: dict[str, Any]) -> None:
    """A line for each graph and method."""
    for graph in sorted({run["graph"] for run in found["runs"]}):
        of_graph = [run for run in found["runs"] if run["graph"] == graph]
        target = 0.99 * statistics.mean(best(run) for run in of_graph if run["method"] == "full")
        print(f"{graph}: target {target:.4f}")
        for method in METHODS:
            runs = [run for run in of_graph if run["method"] == method]
            if not runs:
                continue
            scores = [best(run) for run in runs]
            reached = [next((p for p in run["points"] if p[3] >= target), None) for run in runs]
            there = [point for point in reached if point is not None]
            error = statistics.stdev(scores) / len(scores) ** 0.5 if len(scores) > 1 else 0.0
            line = (
                f"  {method:12} best {statistics.mean(scores):.4f} +- {error:.4f}, reached by {len(there)}/{len(runs)}"
            )
            if there:
                steps, seconds = (statistics.median(point[k] for point in there) for k in (0, 1))
                line += f", median {steps:.0f} steps, {seconds:.2f} s"
            print(line)


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--points", type=int, default=60, help="evaluations of a run")
    parser.add_argument("--minutes", type=float, default=20.0, help="no run begins after them")
    parser.add_argument("--report", action="store_true", help="print what is stored")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    found: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {"runs": []}
    torch.set_num_threads(1)
    known = {(run["graph"], run["method"], run["seed"]) for run in found["runs"]}
    begin = time.monotonic()
    for seed in range(args.seeds):
        for path in args.graphs:
            for method in METHODS:
                is_late = time.monotonic() - begin > 60 * args.minutes
                if args.report or is_late or (path.stem, method, seed) in known:
                    continue
                found["runs"].append(train(path, method, seed, args.points))
                found["machine"] = machine.describe()
                args.results.write_text(json.dumps(found) + "\n")
    report(found)


if __name__ == "__main__":
    main()
