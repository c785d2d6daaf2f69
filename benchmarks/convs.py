"""One training epoch of convs with messages, pyg_dist on one rank against stock PyG on the same two cores.

    python benchmarks/convs.py                               # a few minutes
    python benchmarks/convs.py --graph A --convs gat         # 170,000 nodes, 2.3 million edges; within 12 GiB

Two layers, 4 heads of 32 columns and then one head a class, ReLU and dropout between them; an epoch is forward, loss,
backward and Adam's step. Both sides run the same script, stock PyG on ``edge_index``. Memory is the peak of the epochs
above the imports. Results of other graphs and convs stay in the JSON file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import machine
import power_law
import torch
import torch.nn.functional as F
from epoch import NUM_CORES, RESULTS, ratios, table
from measure import Epoch, Schedule, Variant, interleaved
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, TransformerConv
from tqdm import tqdm

import pyg_dist

CONVS: dict[str, Any] = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}
HEADS, COLUMNS = 4, 32


class Model(torch.nn.Module):
    """Two layers of attention."""

    def __init__(self, conv: Any, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.first = conv(in_channels, COLUMNS, heads=HEADS)
        self.second = conv(HEADS * COLUMNS, num_classes, heads=1)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        x = F.dropout(self.first(x, edge_index).relu(), p=0.5, training=self.training)
        return self.second(x, edge_index)  # type: ignore[no-any-return]


def training_epoch(graph: str, conv: str, is_stock: bool) -> Epoch:
    """Return a function that trains for one epoch."""
    torch.manual_seed(0)
    data: Any = power_law.load(graph)
    model = Model(CONVS[conv], data.num_features, int(data.y.max()) + 1)
    if not is_stock:
        data, model = pyg_dist.DistributedData(data), pyg_dist.distribute(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> float:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def variants(graph: str, conv: str) -> list[Variant]:
    """Both sides, on the same cores."""
    return [
        Variant("stock PyG, edge_index", training_epoch, (graph, conv, True), num_threads=NUM_CORES),
        Variant("pyg_dist, 1 rank", training_epoch, (graph, conv, False), num_threads=NUM_CORES),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="small", help=f"{', '.join(power_law.SIZES)}, or a .npz file")
    parser.add_argument("--convs", nargs="+", choices=CONVS, default=list(CONVS))
    parser.add_argument("--rounds", type=int, default=5, help="turns of each variant that count")
    parser.add_argument("--epochs", type=int, default=1, help="epochs in a turn")
    parser.add_argument("--warmup", type=int, default=1, help="turns that do not count")
    parser.add_argument(
        "--max-foreign", type=float, default=0.05, help="repeat a turn if others had more of the machine"
    )
    parser.add_argument("--retakes", type=int, default=5, help="repeat a turn at most so often")
    parser.add_argument("--output", type=Path, default=RESULTS / "convs.json", help="the JSON file")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):  # all variants on the same cores; processes inherit this
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_CORES])
    schedule = Schedule(args.rounds, args.epochs, args.warmup, args.max_foreign, args.retakes)
    known = json.loads(args.output.read_text()) if args.output.exists() else {}
    for conv in args.convs:
        bar = lambda turns, name=conv: tqdm(turns, desc=name, unit="turn", disable=None)  # noqa: E731
        description = machine.describe()
        measured = interleaved(variants(args.graph, conv), schedule, bar)
        print(table({conv: measured}), flush=True)
        known[f"{Path(args.graph).stem} {conv}"] = {
            "command": " ".join(["python", "benchmarks/convs.py", *sys.argv[1:]]),
            "machine": description,
            "schedule": asdict(schedule),
            "ratios": ratios(measured),
            "results": {name: asdict(m) for name, m in measured.items()},
        }
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(known, indent=2) + "\n")
    print(f"written: {args.output}")


if __name__ == "__main__":
    main()
