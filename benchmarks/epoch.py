"""One full-batch training epoch, pyg_dist against stock PyG on the same two cores: time and peak memory.

    python benchmarks/epoch.py                    # a few minutes
    python benchmarks/epoch.py --graph A          # 170,000 nodes, 2.3 million edges; within 12 GiB

An epoch is forward, loss, backward and Adam's step. Stock PyG runs in one process with two threads, on ``edge_index``
and on ``adj_t`` (a torch CSR tensor); pyg_dist on one rank with two threads and on two ranks with one thread each. GCN
runs with ``cached=True`` everywhere, so that stock PyG does not compute its norm anew in each epoch. The table goes to
the terminal, everything measured to a JSON file.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import graphs
import machine
import torch
import torch.nn.functional as F
from measure import Epoch, Measurement, Variant, interleaved
from torch import Tensor
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.transforms import ToSparseTensor
from tqdm import tqdm

from pyg_dist import DistributedData
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv

BASELINE = "stock PyG, edge_index"
RESULTS = Path(__file__).resolve().parent / "results"


class Model(torch.nn.Module):
    def __init__(self, convs: list[torch.nn.Module], norms: list[torch.nn.Module], dropout: float) -> None:
        super().__init__()
        self.convs, self.norms, self.dropout = torch.nn.ModuleList(convs), torch.nn.ModuleList(norms), dropout

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = norm(conv(x, edges)).relu()
            x = F.dropout(x, p=self.dropout, training=self.training)
        return self.convs[-1](x, edges)


def sage(in_channels: int, out_channels: int, conv: type) -> Model:
    """GraphSAGE, hidden 256, LayerNorm, ReLU, dropout 0.5."""
    widths = (in_channels, 256, 256, out_channels)
    convs = [conv(a, b) for a, b in pairwise(widths)]
    return Model(convs, [torch.nn.LayerNorm(256) for _ in range(2)], dropout=0.5)


def gcn(in_channels: int, out_channels: int, conv: type) -> Model:
    """GCN, hidden 128, ReLU, dropout 0.5."""
    widths = (in_channels, 128, 128, out_channels)
    convs = [conv(a, b, cached=True) for a, b in pairwise(widths)]
    return Model(convs, [torch.nn.Identity() for _ in range(2)], dropout=0.5)


MODELS = {"sage": (sage, SAGEConv, DistributedSAGEConv), "gcn": (gcn, GCNConv, DistributedGCNConv)}


def training_epoch(graph: str, model_name: str, form: str) -> Epoch:
    """Return a function that trains for one epoch.

    Args:
        graph: name or path, see :func:`graphs.load`.
        model_name: key of ``MODELS``.
        form: "edge_index" or "adj_t" for stock PyG, "distributed".
    """
    torch.manual_seed(0)
    data = graphs.load(graph)
    num_classes = int(data.y.max()) + 1
    if form == "adj_t":
        data = ToSparseTensor(layout=torch.sparse_csr)(data)
    elif form == "distributed":
        data = DistributedData(data)
    make, stock_conv, distributed_conv = MODELS[model_name]
    model = make(data.num_features, num_classes, distributed_conv if form == "distributed" else stock_conv)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    edges = data.adj_t if form == "adj_t" else data.edge_index

    def epoch() -> float:
        optimizer.zero_grad()
        out = model(data.x, edges)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def variants(graph: str, model_name: str) -> list[Variant]:
    """The four ways to train that are compared; each has two cores."""

    def variant(name: str, form: str, num_ranks: int) -> Variant:
        return Variant(name, training_epoch, (graph, model_name, form), num_ranks, num_threads=2 // num_ranks)

    return [
        variant(BASELINE, "edge_index", 1),
        variant("stock PyG, adj_t", "adj_t", 1),
        variant("pyg_dist, 1 rank", "distributed", 1),
        variant("pyg_dist, 2 ranks", "distributed", 2),
    ]


def table(results: dict[str, dict[str, Measurement]]) -> str:
    """Return the results for people; ratios are to stock PyG's ``edge_index`` path, larger is better."""
    lines = [f"{'':28}{'epoch':>10}{'(min .. max)':>20}{'speed-up':>10}{'peak MiB by rank':>20}{'memory':>9}"]
    for model_name, measured in results.items():
        base = measured[BASELINE]
        for name, m in measured.items():
            spread = f"({1000 * min(m.seconds):.1f} .. {1000 * max(m.seconds):.1f})"
            peaks = " + ".join(f"{mib:.0f}" for mib in m.peak_mib)
            lines.append(
                f"{model_name + ': ' + name:28}{1000 * m.median:>7.1f} ms{spread:>20}{base.median / m.median:>9.2f}x"
                f"{peaks:>20}{max(m.peak_mib) / max(base.peak_mib):>8.2f}x"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="small", help=f"{', '.join(graphs.SIZES)}, or a .npz file")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each variant that count")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in a turn")
    parser.add_argument("--warmup", type=int, default=1, help="turns that do not count")
    parser.add_argument("--output", type=Path, help="the JSON file (default: benchmarks/results/epoch-GRAPH.json)")
    args = parser.parse_args()

    description = machine.describe()
    results = {}
    for model_name in args.models:
        bar = lambda turns, name=model_name: tqdm(turns, desc=name, unit="turn", disable=None)  # noqa: E731
        chosen = variants(args.graph, model_name)
        results[model_name] = interleaved(chosen, args.rounds, args.epochs, args.warmup, bar)
    print(table(results))

    output = args.output or RESULTS / f"epoch-{Path(args.graph).stem}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "command": " ".join(["python", "benchmarks/epoch.py", *sys.argv[1:]]),
        "machine": description,
        "results": {model: {name: asdict(m) for name, m in by_name.items()} for model, by_name in results.items()},
    }
    output.write_text(json.dumps(content, indent=2) + "\n")
    print(f"written: {output}")


if __name__ == "__main__":
    main()
