"""One training epoch of convs other than SAGE and GCN, pyg_dist against stock PyG on the same two cores.

    python benchmarks/convs.py                               # a few minutes
    python benchmarks/convs.py --graph A --convs gat         # 170,000 nodes, 2.3 million edges; within 12 GiB

Attention has two layers, 4 heads of 32 columns and then one head a class; the others have 128 columns between them
(:func:`layers_of`); ReLU and dropout stand between layers. GINE has random features of edges, 16 columns. An epoch is
forward, loss, backward and Adam's step. All sides run the same script, stock PyG on ``edge_index`` and, where the conv
takes it, on ``adj_t`` (torch.sparse), and pyg_dist on one rank with two threads and on two ranks with one thread each.
Of convs that sum rows, "pyg_dist, no edges" runs the same script on a graph without edges. Left are dense products,
activations and the optimizer, so stock PyG's time over its time is the most that any kernel of sums could gain. Memory
is the peak of the epochs above the imports, of two ranks the larger one's. Results of other graphs and convs stay in
the JSON file.
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
from torch_geometric.nn import (
    APPNP,
    MLP,
    ChebConv,
    EdgeConv,
    GATConv,
    GATv2Conv,
    GCN2Conv,
    GINConv,
    GINEConv,
    Linear,
    SGConv,
    TAGConv,
    TransformerConv,
)
from torch_geometric.utils import to_torch_csr_tensor
from tqdm import tqdm

import pyg_dist

HEADS, COLUMNS, HIDDEN, EDGE_COLUMNS = 4, 32, 128, 16
ATTENTION: dict[str, Any] = {"gat": GATConv, "gatv2": GATv2Conv, "transformer": TransformerConv}
SUMS = ("gin", "tag", "sg", "appnp", "gcn2", "cheb")
MESSAGES = ("edge", "gine")
CONVS = (*ATTENTION, *SUMS, *MESSAGES)


def layers_of(conv: str, in_channels: int, num_classes: int) -> list[torch.nn.Module]:
    """The layers of a model, as the papers of the convs have them but for the depth of GCN2."""
    if conv in ATTENTION:
        make = ATTENTION[conv]
        return [make(in_channels, COLUMNS, heads=HEADS), make(HEADS * COLUMNS, num_classes, heads=1)]
    pairs = (in_channels, HIDDEN), (HIDDEN, num_classes)
    if conv == "gin":
        return [GINConv(MLP([a, HIDDEN, b], norm=None)) for a, b in pairs]
    if conv == "gine":
        return [GINEConv(MLP([a, HIDDEN, b], norm=None), edge_dim=EDGE_COLUMNS) for a, b in pairs]
    if conv == "edge":
        return [EdgeConv(MLP([2 * a, b], norm=None, plain_last=False)) for a, b in pairs]
    if conv == "tag":
        return [TAGConv(in_channels, HIDDEN), TAGConv(HIDDEN, num_classes)]
    if conv == "sg":
        return [SGConv(in_channels, num_classes, K=2)]
    if conv == "appnp":
        return [Linear(in_channels, HIDDEN), Linear(HIDDEN, num_classes), APPNP(K=10, alpha=0.1)]
    if conv == "gcn2":
        convs = [GCN2Conv(HIDDEN, alpha=0.1, theta=0.5, layer=layer) for layer in range(1, 5)]
        return [Linear(in_channels, HIDDEN), *convs, Linear(HIDDEN, num_classes)]
    return [ChebConv(in_channels, HIDDEN, K=3), ChebConv(HIDDEN, num_classes, K=3)]


class Model(torch.nn.Module):
    """Layers with ReLU and dropout between them."""

    def __init__(self, layers: list[torch.nn.Module]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
        first: Tensor | None = None
        for k, layer in enumerate(self.layers):
            if k > 0 and not isinstance(layer, APPNP):
                x = F.dropout(x.relu(), p=0.5, training=self.training)
            first = x if k == 1 else first
            if isinstance(layer, Linear):
                x = layer(x)
            elif isinstance(layer, GCN2Conv):
                x = layer(x, first, edge_index)
            elif isinstance(layer, GINEConv):
                x = layer(x, edge_index, edge_attr)
            else:
                x = layer(x, edge_index)
        return x


def training_epoch(graph: str, conv: str, form: str) -> Epoch:
    """Return a function that trains for one epoch.

    ``form`` is ``"edge_index"`` or ``"adj_t"`` of stock PyG, ``"ours"``, ``"grid"``, or ``"no edges"``.
    """
    torch.manual_seed(0)
    data: Any = power_law.load(graph)
    model: Any = Model(layers_of(conv, data.num_features, int(data.y.max()) + 1))
    if conv == "gine":
        data.edge_attr = torch.randn(data.num_edges, EDGE_COLUMNS)
    if form == "no edges":
        data.edge_index = data.edge_index[:, :0]
    edges = data.edge_index
    if form == "adj_t":
        edges = to_torch_csr_tensor(edges.flip(0), size=(data.num_nodes, data.num_nodes))
    if form in ("ours", "grid", "no edges"):
        data = pyg_dist.DistributedData(data, layout="grid" if form == "grid" else "halo")
        model = pyg_dist.distribute(model)
        edges = data.edge_index
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

    def epoch() -> float:
        optimizer.zero_grad()
        out = model(data.x, edges, *([data.edge_attr] if conv == "gine" else []))
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        return loss.item()

    return epoch


def variants(graph: str, conv: str, has_grid: bool) -> list[Variant]:
    """All sides, on the same cores."""
    forms = {"edge_index": "stock PyG, edge_index"}
    if conv not in (*ATTENTION, *MESSAGES, "cheb"):  # which multiply by no sparse matrix
        forms["adj_t"] = "stock PyG, adj_t"
    alone = [Variant(name, training_epoch, (graph, conv, form), 1, NUM_CORES) for form, name in forms.items()]
    ours = training_epoch, (graph, conv, "ours")
    ranks = [Variant("pyg_dist, 1 rank", *ours, 1, NUM_CORES), Variant("pyg_dist, 2 ranks", *ours, NUM_CORES)]
    if has_grid:
        ranks.append(Variant("pyg_dist, 2 ranks, grid", training_epoch, (graph, conv, "grid"), NUM_CORES))
    if conv not in SUMS:
        return [*alone, *ranks]
    return [*alone, *ranks, Variant("pyg_dist, no edges", training_epoch, (graph, conv, "no edges"), 1, NUM_CORES)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="small", help=f"{', '.join(power_law.SIZES)}, or a .npz file")
    parser.add_argument("--convs", nargs="+", choices=CONVS, default=CONVS)
    parser.add_argument("--grid", action="store_true", help="two ranks on the grid layout, too")
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
    known = machine.earlier_results(args.output) or {}
    for conv in args.convs:
        bar = lambda turns, name=conv: tqdm(turns, desc=name, unit="turn", disable=None)  # noqa: E731
        description = machine.describe()
        measured = interleaved(variants(args.graph, conv, args.grid), schedule, bar)
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
