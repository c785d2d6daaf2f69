"""Milliseconds an epoch on small graphs, where Python decides: pyg_dist in one process against stock PyG.

    python benchmarks/small.py                                     # 3 minutes
    python benchmarks/small.py --convs gat pna --nodes 34 2000
    python benchmarks/small.py --convs gcn sage gat --nodes 2708 --words 1433 --dropout 0.5

Karate (34 nodes, 156 edges), and random graphs of 300, 2,000 and 5,000 nodes with six in-edges each. With ``--words``
the features are bags of words, as those of citation graphs (Cora: 2,708 nodes, 1,433 words): 18 of the elements of a
row are one, the others zero. Two layers of 32 columns and then a column a class, dropout before each, ReLU between
them; an epoch is forward, loss on a mask, backward and Adam's step.
Each side is a process of one thread; they take turns. The figure is the median of the turns, each the median of its
epochs. Goals: at most 1.3 times stock PyG's time at 34 nodes, at most its time at 2,000.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
import torch
import torch.nn.functional as F
from epoch import RESULTS
from measure import Epoch, Measurement, Schedule, Variant, interleaved
from torch import nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.datasets import KarateClub
from tqdm import tqdm

HIDDEN, FEATURES, CLASSES, IN_DEGREE = 32, 32, 4, 6
WORDS_OF_A_NODE = 18
KARATE = 34

_PNA = {
    "aggregators": ["mean", "max", "std"],
    "scalers": ["identity", "amplification"],
    "deg": torch.tensor([1, 2, 3, 4, 5, 6, 7]),
}

CONVS: dict[str, Callable[[int, int], nn.Module]] = {
    "gcn": gnn.GCNConv,
    "sage": gnn.SAGEConv,
    "gat": gnn.GATConv,
    "gin": lambda a, b: gnn.GINConv(nn.Linear(a, b)),
    "transformer": gnn.TransformerConv,
    "pna": lambda a, b: gnn.PNAConv(a, b, **_PNA),
    "gatv2": gnn.GATv2Conv,
    "tag": gnn.TAGConv,
    "cheb": lambda a, b: gnn.ChebConv(a, b, K=2),
    "edge": lambda a, b: gnn.EdgeConv(nn.Linear(2 * a, b)),
    "gated": gnn.ResGatedGraphConv,
    "film": gnn.FiLMConv,
}


def graph(num_nodes: int, num_words: int) -> Data:
    """Karate, or a random graph of that many nodes; ``num_words`` > 0: with bags of words."""
    if num_nodes == KARATE:
        return KarateClub()[0]
    rng = torch.Generator().manual_seed(num_nodes)
    x = torch.randn(num_nodes, FEATURES, generator=rng)
    if num_words:
        words = torch.randint(0, num_words, (num_nodes, WORDS_OF_A_NODE), generator=rng)
        x = torch.zeros(num_nodes, num_words).scatter_(1, words, 1.0)
    return Data(
        x=x,
        edge_index=torch.randint(0, num_nodes, (2, IN_DEGREE * num_nodes), generator=rng),
        y=torch.randint(0, CLASSES, (num_nodes,), generator=rng),
        train_mask=torch.rand(num_nodes, generator=rng) < 0.5,
    )


def training_epoch(conv: str, num_nodes: int, is_ours: bool, num_words: int = 0, dropout: float = 0.0) -> Epoch:
    """Return a function that trains for one epoch."""
    torch.manual_seed(0)
    data: Any = graph(num_nodes, num_words)
    make = CONVS[conv]
    model: Any = nn.ModuleList([make(data.num_features, HIDDEN), make(HIDDEN, CLASSES)])
    if is_ours:
        import pyg_dist  # whose hooks are none of stock PyG's time

        data, model = pyg_dist.DistributedData(data), pyg_dist.distribute(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def epoch() -> float:
        optimizer.zero_grad()
        h = model[0](F.dropout(data.x, dropout), data.edge_index).relu()
        out = model[1](F.dropout(h, dropout), data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def ratio(measured: dict[str, Measurement]) -> float:
    """Our time over stock PyG's."""
    stock, ours = measured.values()
    return round(ours.median / stock.median, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--convs", nargs="+", choices=CONVS, default=CONVS)
    parser.add_argument("--nodes", nargs="+", type=int, default=[KARATE, 300, 2000, 5000])
    parser.add_argument("--words", type=int, default=0, help="columns of features that are bags of words; 0: dense")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each side that count")
    parser.add_argument("--epochs", type=int, default=40, help="epochs in a turn")
    parser.add_argument("--output", type=Path, default=RESULTS / "small.json", help="the JSON file")
    args = parser.parse_args()
    schedule = Schedule(args.rounds, args.epochs, num_warmup=1, max_foreign=0.25, num_retakes=3, pause_seconds=0.2)
    description, results = machine.describe(), {}
    print(f"{'conv':12}{'nodes':>8}{'stock PyG':>12}{'pyg_dist':>12}{'ratio':>8}")
    for num_nodes in args.nodes:
        for conv in tqdm(args.convs, desc=f"{num_nodes} nodes", unit="conv", disable=None, leave=False):
            sides = {"stock PyG": False, "pyg_dist": True}
            variants = [
                Variant(name, training_epoch, (conv, num_nodes, ours, args.words, args.dropout))
                for name, ours in sides.items()
            ]
            measured = interleaved(variants, schedule)
            times = "".join(f"{1000 * m.median:>9.2f} ms" for m in measured.values())
            print(f"{conv:12}{num_nodes:>8}{times}{ratio(measured):>8.2f}", flush=True)
            results[f"{conv} {num_nodes}"] = {
                "ratio": ratio(measured),
                "results": {name: asdict(m) for name, m in measured.items()},
            }
    content = {
        "command": " ".join(["python", "benchmarks/small.py", *sys.argv[1:]]),
        "machine": description,
        "schedule": asdict(schedule),
        "results": results,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(content, indent=1) + "\n")
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
