"""What is trained on a device and on the CPU, for whoever compares the two: cases, a net and its steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data

NUM_FEATURES, WIDTH, NUM_CLASSES = 17, 18, 4  # wide enough to be packed, with bits
NUM_STEPS = 3


class Case(NamedTuple):
    """What is trained: a layout's options, a model, how its rows are picked, settings."""

    layout: dict[str, Any]
    model: str
    picks: str = "mask"
    setting: dict[str, str] = {}  # noqa: RUF012


HALO, GRID = {"layout": "halo", "partition": "random"}, {"layout": "grid"}  # a machine with a GPU may have no METIS
CASES = [
    *[Case(layout, model) for layout in (HALO, GRID) for model in ("sage", "gcn", "gat", "transformer", "graph")],
    *[Case(layout, model) for layout in (HALO, GRID) for model in ("gcn weights", "gcn learning")],
    *[Case(layout, "sage max") for layout in (HALO, GRID)],
    Case(HALO, "gin"),
    *[Case(HALO, "edge", setting={"PYG_DIST_MESSAGE_MIB": mib}) for mib in ("0.01", "inf")],
    Case(HALO, "sage", "list"),
    Case(GRID, "sage", "list"),
    *[Case(layout, "gatv2 edges", "class weights") for layout in (HALO, GRID)],
    *[Case(layout, "general") for layout in (HALO, GRID)],
    *[Case(layout, "embedding") for layout in (HALO, GRID)],
    *[Case(layout, "epilogue") for layout in (HALO, GRID)],
    *[Case(layout, "labels") for layout in (HALO, GRID)],
    *[
        Case({**HALO, "bits": bits, "exchange": exchange}, "sage")
        for bits in (16, 2)
        for exchange in ("hybrid", "post")
    ],
    Case({**HALO, "bits": 4}, "gat"),
    Case(GRID, "sage", setting={"PYG_DIST_GRID_BLOCKS": "3"}),
    Case(GRID, "gcn", setting={"PYG_DIST_GRID_BLOCKS": "3", "PYG_DIST_GRID_SUMS": "all_reduce"}),
]


BATCHES = [
    *[Case(layout, model) for layout in (HALO, GRID) for model in ("sage", "gcn", "gcn weights", "graph learning")],
    *[Case(layout, model, "neighbours") for layout in (HALO, GRID) for model in ("sage", "gat")],
    *[Case(HALO, model) for model in ("gat", "transformer", "edge", "sage max")],
    Case(GRID, "transformer"),
]
"""Trained on batches: uniform ones, or of sampled neighbours."""
WAITING = ("gat", "graph learning")
"""Models for which the grid's messages make something of each batch: self loops and values of edges."""


def _gin(a: int, b: int) -> nn.Module:
    return gnn.GINConv(nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, b)))


def _edge(a: int, b: int) -> nn.Module:
    return gnn.EdgeConv(nn.Sequential(nn.Linear(2 * a, b), nn.Tanh(), nn.Dropout(0.2)), aggr="mean")


def _general(a: int, b: int) -> nn.Module:
    return gnn.GeneralConv(a, b, heads=2, attention=True)


def _gatv2(a: int, b: int) -> nn.Module:
    return gnn.GATv2Conv(a, b, edge_dim=3, dropout=0.2)


STOCK: dict[str, Any] = {
    "gat": gnn.GATConv, "transformer": gnn.TransformerConv, "graph": gnn.GraphConv,
    "gin": _gin, "edge": _edge, "gatv2": _gatv2, "general": _general,
}  # fmt: skip


class Net(nn.Module):
    """Two convs, dropout, and what a case adds."""

    def __init__(self, case: Case, data: Any) -> None:
        from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
        from pyg_dist.nn import MaskedLabelPropagation, NodeEmbedding, NormReLUDropout

        super().__init__()
        kind, *options = case.model.split()
        if kind in STOCK:
            made = [STOCK[kind](a, b) for a, b in ((NUM_FEATURES, WIDTH), (WIDTH, NUM_CLASSES))]
        else:
            conv: Any = DistributedGCNConv if kind == "gcn" else DistributedSAGEConv
            aggr = {"aggr": "max"} if "max" in options else {}
            made = [conv(NUM_FEATURES, WIDTH, **aggr), conv(WIDTH, NUM_CLASSES, **aggr)]
        self.convs = nn.ModuleList(made)
        self.epilogue = NormReLUDropout(WIDTH, p=0.3) if kind == "epilogue" else None
        self.labels = MaskedLabelPropagation(NUM_CLASSES, NUM_FEATURES) if kind == "labels" else None
        self.embedding = NodeEmbedding(data, NUM_FEATURES) if kind == "embedding" else None
        self.weight_kind = options[0] if options and options[0] != "max" else ""

    def forward(self, data: Any) -> tuple[Tensor, Tensor]:
        x, mask = data.x if self.embedding is None else self.embedding(), data.train_mask
        if self.labels is not None:
            x, mask = self.labels(x, data.y, mask)
        by_kind = {"weights": data.edge_weight, "learning": data.learning, "edges": data.edge_attr}
        weight = [by_kind[self.weight_kind]] if self.weight_kind else []
        x = self.convs[0](x, data.edge_index, *weight)
        x = self.epilogue(x) if self.epilogue is not None else F.dropout(x.relu(), 0.3, self.training)
        return self.convs[1](x, data.edge_index, *weight), mask


class Training:
    """A model, its data and an optimizer on one device."""

    def __init__(self, case: Case, graph: Data, device: torch.device | str) -> None:
        import pyg_dist

        torch.manual_seed(0)
        self.data: Any = pyg_dist.DistributedData(graph, **case.layout).to(device)
        model: Any = Net(case, self.data)
        if case.model.split()[0] in STOCK:
            model.convs = pyg_dist.distribute(model.convs)
        self.model = model.to(device, torch.float64)
        self.data.learning.requires_grad_()
        self.optimizer = torch.optim.Adam(self.model.parameters(), foreach=False)
        self.class_weight = torch.linspace(1, 2, NUM_CLASSES, device=device, dtype=torch.float64)
        self.samples_neighbours = case.picks == "neighbours"
        self.uses_weight = case.picks == "class weights"
        self.picked = torch.arange(0, graph.num_nodes, 3, device=device) if case.picks == "list" else None

    def loader(self) -> Any:
        """Batches of half of the nodes, or of some nodes and their neighbours."""
        from pyg_dist.loader import NeighborLoader, UniformVertexLoader

        if self.samples_neighbours:
            seeds = -(-self.data.num_nodes // NUM_STEPS)
            return NeighborLoader(self.data, [3, 2], batch_size=seeds, shuffle=True)
        return UniformVertexLoader(self.data, self.data.num_nodes // 2, num_steps=NUM_STEPS, seed=1)

    def step(self, spoil: Callable[[Tensor], Tensor] = lambda x: x, batch: Any = None) -> Tensor:
        """A training step, on all data or a batch; ``spoil`` may change the output."""
        data = self.data if batch is None else batch
        self.optimizer.zero_grad()
        out, mask = self.model(data)
        index = mask if self.picked is None else self.picked
        loss = F.cross_entropy(spoil(out)[index], data.y[index], self.class_weight if self.uses_weight else None)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def graph() -> Data:
    data = random_graph(61, 400, NUM_FEATURES, NUM_CLASSES, seed=3)
    data.learning = torch.rand(data.num_edges, generator=torch.Generator().manual_seed(1), dtype=data.x.dtype) + 0.5
    return data
