r"""Why training on rescaled uniform batches may end below training on induced ones; one thread, CPU.

    python benchmarks/rescaling.py ../shared/data --graphs amazon_computers rmat

The graphs, splits and the 3-layer SAGE of ``time_to_accuracy.py`` (its header says which), with one thing changed at a
time: nodes in a batch, learning rate, dropout, epochs, a norm, the conv. A run's number is the test accuracy at the
best validation accuracy, on the whole graph.

Two more numbers say what happens. *Noise*: the mean over nodes of ||estimate - mean||^2 over that of ||mean||^2 in the
first layer's aggregation, of the rescaled mean (:math:`\frac{1}{p d} \sum_{u \in S} x_u`) and of the induced one
(:math:`\frac{1}{|N \cap S|} \sum_{u \in S} x_u`). *On batches*: the test accuracy of the model that is best on the
whole graph, on eight batches of either kind, the same for both models of a seed; their test nodes are a sample, which
alone moves it by a point, so compare models on the same batches.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import machine
import torch
import torch.nn.functional as F
from time_to_accuracy import HIDDEN, NUM_LAYERS, load
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import BatchNorm, GCNConv, SAGEConv

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.loader import UniformVertexLoader

RESULTS = Path(__file__).resolve().parent / "results" / "rescaling.json"


class Trial(NamedTuple):
    """How one run trains."""

    batches: float = 8  # N / B; 1: the whole graph
    rate: float = 0.01
    dropout: float = 0.5
    steps: int = 240
    norm: str = "none"
    conv: str = "sage"
    residual: bool = False


TRIALS = {
    "as in time_to_accuracy": Trial(),
    "B = N/4": Trial(batches=4),
    "B = N/2": Trial(batches=2),
    "lr / 3": Trial(rate=0.003),
    "lr / 3, 4 x the steps": Trial(rate=0.003, steps=960),
    "4 x the steps": Trial(steps=960),
    "no dropout": Trial(dropout=0.0),
    "RMSNorm": Trial(norm="rms"),
    "RMSNorm, residual": Trial(norm="rms", residual=True),
    "batch norm": Trial(norm="batch"),
    "no neighbours": Trial(conv="linear"),
    "GCN": Trial(conv="gcn"),
    "GCN, RMSNorm, residual": Trial(conv="gcn", norm="rms", residual=True),
}


class Linear(nn.Linear):
    """Of a node's own row."""

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Rows."""
        return super().forward(x)


CONVS: dict[str, Any] = {"sage": SAGEConv, "gcn": GCNConv, "linear": Linear}


class Model(nn.Module):
    """Layers of a conv, a norm, ReLU and dropout; residuals where the widths agree."""

    def __init__(self, in_channels: int, num_classes: int, trial: Trial) -> None:
        super().__init__()
        widths = (in_channels, *[HIDDEN] * (NUM_LAYERS - 1), num_classes)
        self.projection = nn.Linear(in_channels, HIDDEN) if trial.residual else nn.Identity()
        if trial.residual:
            widths = (HIDDEN, *widths[1:])
        self.convs = nn.ModuleList(CONVS[trial.conv](a, b) for a, b in pairwise(widths))
        norms: dict[str, Any] = {"none": lambda _: nn.Identity(), "rms": nn.RMSNorm, "batch": BatchNorm}
        self.norms = nn.ModuleList(norms[trial.norm](width) for width in widths[1:-1])
        self.trial = trial

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        """Scores."""
        x = self.projection(x)
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            h = F.dropout(norm(conv(x, edge_index)).relu(), self.trial.dropout, self.training)
            x = h + x if self.trial.residual else h
        return self.convs[-1](x, edge_index)  # type: ignore[no-any-return]


def hits(model: nn.Module, data: Any) -> Tensor:
    """Which nodes are classified rightly."""
    return (model(data.x, data.edge_index).argmax(-1) == data.y).float()


def train(graph: Data, trial: Trial, rescale: bool, seed: int) -> dict[str, float]:
    """One run."""
    torch.manual_seed(seed)
    data = DistributedData(graph)
    model = pyg_dist.distribute(Model(graph.num_features, int(graph.y.max()) + 1, trial))
    optimizer = torch.optim.Adam(model.parameters(), lr=trial.rate)
    size = int(data.num_nodes / trial.batches)
    options: dict[str, Any] = {"input_nodes": data.train_mask, "rescale": rescale, "prefetch": False}
    loader = UniformVertexLoader(data, size, seed=seed, **options)
    best = {"validation": 0.0, "test": 0.0, "step": 0.0}
    state: dict[str, Tensor] = {}
    step = 0
    while step < trial.steps:
        model.train()
        for batch in [data] * 5 if trial.batches == 1 else loader:
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)
            loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
            loss.backward()
            optimizer.step()
            step += 1
        model.eval()
        with torch.no_grad():
            right = hits(model, data)
            validation = float(right[data.val_mask].mean())
        if validation > best["validation"]:
            best = {"validation": validation, "test": float(right[data.test_mask].mean()), "step": step}
            state = copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    found = {"test": best["test"], "step of the best": best["step"], "last loss": loss.item()}
    with torch.no_grad():
        for name, of in {"rescaled": True, "induced": False}.items():
            drawn = UniformVertexLoader(data, size, num_steps=8, seed=seed + 1000, **{**options, "rescale": of})
            of_batch = [hits(model, batch)[batch.test_mask] for batch in drawn]
            found[f"test on {name} batches"] = statistics.mean(float(t.mean()) for t in of_batch)
    return {name: round(value, 4) for name, value in found.items()}


def noise(graph: Data, num_batches: float, num_samples: int = 40) -> dict[str, float]:
    """Relative squared errors of the first layer's mean."""
    data = DistributedData(graph)
    mean = SAGEConv(graph.num_features, graph.num_features, bias=False, root_weight=False)
    nn.init.eye_(mean.lin_l.weight)
    mean = pyg_dist.distribute(mean)
    found = {}
    with torch.no_grad():
        exact = mean(data.x, data.edge_index).full_tensor()
        for name, rescale in {"rescaled": True, "induced": False}.items():
            loader = UniformVertexLoader(
                data, int(data.num_nodes / num_batches), num_steps=num_samples, rescale=rescale, prefetch=False
            )
            errors, norms = 0.0, 0.0
            for batch in loader:
                at = exact[batch.n_id.full_tensor()]
                errors += float((mean(batch.x, batch.edge_index).full_tensor() - at).square().sum())
                norms += float(at.square().sum())
            found[name] = round(errors / norms, 3)
    return found


def main() -> None:
    """Run what is missing, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of archives")
    parser.add_argument("--graphs", nargs="*", default=["amazon_computers", "rmat"])
    parser.add_argument("--trials", nargs="*", default=list(TRIALS))
    parser.add_argument("--kinds", nargs="*", default=["rescaled", "induced"], help="or full: the whole graph")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20.0, help="no run begins after them")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(args.results.read_text()) if args.results.exists() else {"runs": []}
    for graph_name in args.graphs:
        of_graph = found.setdefault("noise", {}).setdefault(graph_name, {})
        for num_batches in (2, 4, 8):
            if f"N / {num_batches}" not in of_graph:
                of_graph[f"N / {num_batches}"] = noise(load(args.folder, graph_name, 0), num_batches)
                print(graph_name, of_graph, flush=True)
                args.results.write_text(json.dumps(found) + "\n")
    begin = time.monotonic()
    for seed in range(args.seeds):
        for graph_name in args.graphs:
            for name in args.trials:
                for kind in args.kinds:
                    is_known = any(
                        (run["graph"], run["trial"], run["kind"], run["seed"]) == (graph_name, name, kind, seed)
                        for run in found["runs"]
                    )
                    if is_known or time.monotonic() - begin > 60 * args.minutes:
                        continue
                    trial = TRIALS[name]
                    if kind == "full":
                        trial = trial._replace(batches=1)
                    run = train(load(args.folder, graph_name, seed), trial, kind == "rescaled", seed)
                    found["runs"].append({"graph": graph_name, "trial": name, "kind": kind, "seed": seed, **run})
                    found["machine"] = machine.describe()
                    args.results.write_text(json.dumps(found) + "\n")
                    print(found["runs"][-1], flush=True)


if __name__ == "__main__":
    main()
