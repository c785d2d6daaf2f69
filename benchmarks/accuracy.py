"""What quantized messages cost in accuracy: SuperGCN, Table 3, with emulated ranks, in one process.

    python benchmarks/accuracy.py ../shared/data/pubmed.npz --parts metis8 random64 --seeds 10
    python benchmarks/accuracy.py --report

A 3-layer SAGE, hidden width 256, LayerNorm and dropout 0.5, Adam with lr 0.01, 250 epochs (SuperGCN, Table 2). Every
aggregation is exchanged in every epoch, the first layer's, too: nothing is remembered. Each run is appended to
``benchmarks/results/accuracy.json`` when it ends; runs that are there already are passed over, so that an interrupted
study goes on. In full precision the parts make no difference beyond rounding: one run per seed serves all of them.
Models are evaluated every fifth epoch; a run's score is the test score of the epoch with the best validation score, in
percent: accuracy, or ROC-AUC where there are two classes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
import example_graphs
from emulated import EmulatedMean
from torch_geometric.data import Data

from pyg_dist.backend.comm.codec import EXACT, Codec
from pyg_dist.backend.comm.quantized import quantized
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.halo.aggregate import aggregate
from pyg_dist.nn import MaskedLabelPropagation, NormReLUDropout
from pyg_dist.partition import partition
from pyg_dist.tensor.functions.random import draw_seed

HIDDEN, NUM_LAYERS, DROPOUT, LEARNING_RATE, LABEL_RATE, EVALUATE_EVERY = 256, 3, 0.5, 0.01, 0.5, 5
RESULTS = Path(__file__).parent / "results" / "accuracy.json"


class Setting(NamedTuple):
    """One line of the table."""

    bits: int
    is_stochastic: bool = True
    has_labels: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether ranks make no difference."""
        return self.bits == 32


SETTINGS = {
    "fp32": Setting(32),
    "int8": Setting(8),
    "int4": Setting(4),
    "int2": Setting(2),
    "int2 nearest": Setting(2, is_stochastic=False),
    "fp32 + LP": Setting(32, has_labels=True),
    "int2 + LP": Setting(2, has_labels=True),
}


class Features:
    """Constant features; where they are mostly zeros, ``linear`` costs as much as they have entries."""

    def __init__(self, x: Tensor) -> None:
        row, col = x.nonzero(as_tuple=True)
        self.x = x if row.numel() > 0.15 * x.numel() else None
        self.entries = Matrix(CSR.from_edges(row, col, None, *x.shape), x[row, col])

    def linear(self, weight: Tensor) -> Tensor:
        """``x weight^T``."""
        return _Multiply.apply(weight.t(), self.entries) if self.x is None else F.linear(self.x, weight)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, entries: Matrix) -> Tensor:
        ctx.entries = entries
        return entries.multiply(rows.contiguous())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.entries.transposed.multiply(grad.contiguous()), None


class Step(NamedTuple):
    """A layer's means, and where its input has the rows of its output (None: they are the same)."""

    mean: EmulatedMean
    own: Tensor | None = None


class Pass(NamedTuple):
    """What is computed: three layers' rows, from the rows of the first one's input."""

    steps: list[Step]
    nodes: Tensor
    features: Features

    @classmethod
    def whole(cls, data: Data, mean: EmulatedMean) -> Pass:
        """All nodes."""
        return cls([Step(mean)] * NUM_LAYERS, torch.arange(data.num_nodes), Features(data.x))

    @classmethod
    def towards(cls, data: Data, mean: EmulatedMean, nodes: Tensor) -> Pass:
        """What the outputs of some nodes are made of: for them it is the same, and so are the losses' gradients."""
        steps: list[Step] = []
        for _ in range(NUM_LAYERS):
            restricted, inputs = mean.for_rows(nodes)
            steps.insert(0, Step(restricted, torch.searchsorted(inputs, nodes)))
            nodes = inputs
        return cls(steps, nodes, Features(data.x[nodes]))


class Labels(NamedTuple):
    """Rows of the features that an embedding is added to, their classes, and the embeddings of all classes."""

    rows: Tensor
    classes: Tensor
    embeddings: Tensor


class SAGE(nn.Module):
    """Means over neighbours by emulated ranks; the narrower side of a layer is exchanged, as in the package's convs."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        widths = [channels, *[HIDDEN] * (NUM_LAYERS - 1), num_classes]
        pairs = list(pairwise(widths))
        self.neighbours = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairs)
        self.roots = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.norms = nn.ModuleList(NormReLUDropout(HIDDEN, "layer", p=DROPOUT) for _ in pairs[1:])

    def forward(self, over: Pass, labels: Labels | None, code: Callable[[EmulatedMean], tuple[Codec, Codec]]) -> Tensor:
        """All layers over one pass, with embeddings of ``labels`` added to the features."""
        x = torch.empty(0)
        for k, (neighbour, root) in enumerate(zip(self.neighbours, self.roots, strict=True)):
            mean, own = over.steps[k]
            if k == 0:
                weight = torch.cat([neighbour.weight, root.weight])
                both = over.features.linear(weight)
                if labels is not None:
                    added = F.embedding(labels.classes, F.linear(labels.embeddings, weight))
                    both = both.index_add(0, labels.rows, added)
                left, right = both.split(HIDDEN, 1)
                right = right if own is None else right[own]
            else:
                x = self.norms[k - 1](x)
                left, right = neighbour(x), F.linear(x if own is None else x[own], root.weight)
            x = aggregate(left, mean.operator.coded(code(mean))) + right + root.bias
        return x


def train(data: Data, training: Pass, whole: Pass, setting: Setting, seed: int, num_epochs: int) -> dict[str, Any]:
    """One run: scores by epoch, and the score that counts."""
    torch.manual_seed(seed)
    num_classes = int(data.y.max()) + 1
    model = SAGE(data.num_features, num_classes)
    propagation = MaskedLabelPropagation(num_classes, data.num_features, LABEL_RATE)
    parameters = [*model.parameters(), *(propagation.parameters() if setting.has_labels else ())]
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE)
    zeros = torch.zeros(data.num_nodes, 1)

    def code(mean: EmulatedMean) -> tuple[Codec, Codec]:
        if setting.is_exact or not torch.is_grad_enabled():
            return EXACT, EXACT
        keys = mean.keys if setting.is_stochastic else (None, None)
        return quantized((setting.bits, setting.bits), keys, draw_seed(), lambda: "SAGE")  # type: ignore[arg-type]

    def labels(over: Pass) -> tuple[Labels | None, Tensor]:
        if not setting.has_labels:
            return None, data.train_mask
        # The module's own draw, on a column of zeros, so that no dense features are made.
        propagation.train(model.training)
        _, loss_mask = _Masks.of(propagation, zeros, data)
        embedded = (data.train_mask & ~loss_mask) if model.training else data.train_mask
        rows = embedded[over.nodes].nonzero().view(-1)
        return Labels(rows, data.y[over.nodes[rows]], propagation.weight), loss_mask

    history = []
    for epoch in range(1, num_epochs + 1):
        model.train()
        optimizer.zero_grad()
        given, loss_mask = labels(training)
        out = model(training, given, code)
        F.cross_entropy(out[loss_mask[data.train_mask]], data.y[loss_mask]).backward()
        optimizer.step()
        if epoch % EVALUATE_EVERY:
            continue
        model.eval()
        with torch.no_grad():
            out = model(whole, labels(whole)[0], code)
        history.append([round(_score(out, data, data[name]), 3) for name in ("val_mask", "test_mask")])
    best = max(history, key=lambda scores: scores[0])  # the first of equals
    return {"score": best[1], "curve": [test for _, test in history]}


class _Masks:
    """The loss mask of a label propagation, without its features."""

    @staticmethod
    def of(propagation: MaskedLabelPropagation, zeros: Tensor, data: Data) -> tuple[Tensor, Tensor]:
        narrow = MaskedLabelPropagation(propagation.num_classes, 1, propagation.rate)
        narrow.train(propagation.training)
        return narrow(zeros, data.y, data.train_mask)  # type: ignore[no-any-return]


def _score(out: Tensor, data: Data, mask: Tensor) -> float:
    y = data.y[mask]
    if int(data.y.max()) == 1:
        return 100 * float(roc_auc_score(y, (out[:, 1] - out[:, 0])[mask]))
    return 100 * float((out[mask].argmax(-1) == y).float().mean())


def parts_of(data: Data, name: str) -> tuple[Tensor, int]:
    """``metis8``: eight parts by METIS; ``random64``: 64 random ones."""
    method, num_ranks = name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
    return partition(data.edge_index, data.num_nodes, num_ranks, method, train_mask=data.train_mask), num_ranks


@cache
def prepared(path: str, parts: str) -> tuple[Data, Pass, Pass]:
    """The graph, what its losses need, and everything."""
    data = example_graphs.read_npz(path)
    mean = EmulatedMean.of(data.edge_index, *parts_of(data, parts))
    return data, Pass.towards(data, mean, data.train_mask.nonzero().view(-1)), Pass.whole(data, mean)


def report(runs: list[dict[str, Any]]) -> str:
    """Mean and spread by graph, parts and setting; differences to full precision are paired by seed."""
    lines = ["| graph | parts | setting | seeds | score | difference to fp32 | its standard error |", "|" + "---|" * 7]
    for graph, parts in _places(runs):
        scores = {name: {run["seed"]: run["score"] for run in _chosen(runs, graph, parts, name)} for name in SETTINGS}
        for name, by_seed in scores.items():
            if not by_seed:
                continue
            values = torch.tensor(list(by_seed.values()), dtype=torch.float64)
            base = scores["fp32 + LP" if SETTINGS[name].has_labels else "fp32"]
            paired = torch.tensor([by_seed[s] - base[s] for s in by_seed if s in base], dtype=torch.float64)
            spread = f" ± {values.std():.2f}" if values.numel() > 1 else ""
            difference = f"{paired.mean():+.2f}" if paired.numel() and by_seed is not base else ""
            error = f"{paired.std() / math.sqrt(paired.numel()):.2f}" if difference and paired.numel() > 1 else ""
            line = [graph, parts, name, str(len(by_seed)), f"{values.mean():.2f}{spread}", difference, error]
            lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def _places(runs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Graphs and partitions."""
    return sorted({(run["graph"], run["parts"]) for run in runs if run["parts"] != "any"})


def _chosen(runs: list[dict[str, Any]], graph: str, parts: str, setting: str) -> list[dict[str, Any]]:
    parts = "any" if SETTINGS[setting].is_exact else parts
    return [run for run in runs if (run["graph"], run["parts"], run["setting"]) == (graph, parts, setting)]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """The mean test score by epoch (needs matplotlib)."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    places = _places(runs)
    figure, axes = plt.subplots(1, len(places), figsize=(4.5 * len(places), 3.5), squeeze=False, layout="constrained")
    for axis, place in zip(axes[0], places, strict=True):
        for name in SETTINGS:
            curves = [run["curve"] for run in _chosen(runs, *place, name)]
            if curves:
                mean = torch.tensor(curves).mean(0)
                axis.plot(EVALUATE_EVERY * torch.arange(1, mean.numel() + 1), mean, label=name, linewidth=0.9)
        axis.set(title=" · ".join(place), xlabel="epoch", ylabel="test score, %")
        top = max(max(run["curve"]) for run in runs if run["graph"] == place[0])
        axis.set_ylim(top - 15, top + 1)
    axes[0][0].legend(fontsize=7)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Run what is missing, then report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graphs", nargs="*", metavar="FILE.npz")
    parser.add_argument("--parts", nargs="+", default=["metis8", "random64"], help="metisP or randomP")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0, help="where to begin, for one of several processes")
    parser.add_argument("--epochs", type=int, default=250)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="print the table and draw the curves of what is there")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = json.loads(args.results.read_text()) if args.results.exists() else []
    done = {(r["graph"], r["parts"], r["setting"], r["seed"]) for r in runs}
    seeds = range(args.first_seed, args.seeds)
    for seed, path, parts, setting in product(seeds, args.graphs, args.parts, args.settings):
        graph, place = Path(path).stem, "any" if SETTINGS[setting].is_exact else parts
        if (graph, place, setting, seed) in done:
            continue
        start = time.perf_counter()
        run = train(*prepared(path, parts), SETTINGS[setting], seed, args.epochs)
        runs.append({"graph": graph, "parts": place, "setting": setting, "seed": seed, **run})
        done.add((graph, place, setting, seed))
        args.results.parent.mkdir(exist_ok=True)
        args.results.write_text("[\n" + ",\n".join(json.dumps(r) for r in runs) + "\n]\n")
        seconds = time.perf_counter() - start
        print(f"{graph} {place} {setting} seed {seed}: {run['score']:.2f} ({seconds:.0f} s)", flush=True)
    print(report(runs))
    if args.report and runs:
        draw(runs, args.results.with_suffix(".svg"))


if __name__ == "__main__":
    main()
