"""A graph of several types and models on it, for tests of ``data/hetero.py``."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from against_stock import Results
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import (
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphConv,
    HANConv,
    HeteroConv,
    HeteroDictLinear,
    HGTConv,
    Linear,
    SAGEConv,
    to_hetero,
)

PAPER, AUTHOR, VENUE = "paper", "author", "venue"
SIZES = {PAPER: 23, AUTHOR: 17, VENUE: 5}
WIDTHS = {PAPER: 6, AUTHOR: 4, VENUE: 3}
RELATIONS = [
    (AUTHOR, "writes", PAPER), (PAPER, "written_by", AUTHOR), (PAPER, "cites", PAPER), (VENUE, "has", PAPER),
    (PAPER, "in", VENUE), (AUTHOR, "knows", AUTHOR),
]  # fmt: skip
CLASSES = 3


def hetero_graph(
    sizes: dict[str, int] | None = None, num_edges: int = 60, seed: int = 0, relations: Any = None
) -> HeteroData:
    """Every type with features, edges with attributes and weights, duplicates, and nodes without edges."""
    sizes, rng = sizes or SIZES, torch.Generator().manual_seed(seed)
    data = HeteroData()
    for kind, size in sizes.items():
        data[kind].x = torch.randn(size, WIDTHS.get(kind, 4), generator=rng, dtype=torch.float64)
        data[kind].y = torch.randint(0, CLASSES, (size,), generator=rng)
        data[kind].train_mask = torch.rand(size, generator=rng) < 0.6
    for relation in relations or RELATIONS:
        source, _, target = relation
        number = num_edges if min(sizes[source], sizes[target]) > 0 else 0
        ends = [torch.randint(0, max(sizes[kind], 1), (number,), generator=rng) for kind in (source, target)]
        store = data[relation]
        store.edge_index = torch.stack(ends)
        store.edge_weight = torch.rand(number, generator=rng, dtype=torch.float64) + 0.1
        store.edge_attr = torch.randn(number, 2, generator=rng, dtype=torch.float64)
    data.name = "made up"
    return data


def owners(data: HeteroData, num_ranks: int, seed: int = 0) -> dict[str, Tensor]:
    """With three ranks or more the last owns nothing, and of venues only the first owns any."""
    rng, used = torch.Generator().manual_seed(seed), num_ranks - 1 if num_ranks >= 3 else num_ranks
    return {
        kind: torch.randint(0, 1 if kind == VENUE else used, (data[kind].num_nodes,), generator=rng)
        for kind in data.node_types
    }


def both(num_ranks: int, **options: Any) -> tuple[HeteroData, Any]:
    from pyg_dist import DistributedData

    data = hetero_graph()
    return data, DistributedData(copy.copy(data), partition=owners(data, num_ranks), **options)


def leaves(data: Any) -> dict[str, Any]:
    return {kind: x.detach().clone().requires_grad_() for kind, x in data.x_dict.items()}


def loss_of(outs: dict[str, Any], data: Any) -> Tensor:
    """Of each type that a model gives rows for, over its training nodes."""
    losses = [
        F.cross_entropy(out[data[kind].train_mask], data[kind].y[data[kind].train_mask]) for kind, out in outs.items()
    ]
    return sum(losses)  # type: ignore[return-value]


def run_model(model: nn.Module, data: Any, steps: int = 5, *more: Any, **kwargs: Any) -> Results:
    """Outputs and gradients of a forward, then training: parameters, losses and accuracies."""
    x = leaves(data)
    outs = model(x, data.edge_index_dict, *more, **kwargs)
    loss = loss_of(outs, data)
    loss.backward()
    found: Results = {"loss": loss} | {f"out {kind}": out for kind, out in outs.items()}
    found |= {f"x {kind}": x[kind].grad for kind in x}
    found |= {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for number in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(data.x_dict, data.edge_index_dict, *more, **kwargs), data)
        loss.backward()
        optimizer.step()
        found[f"loss {number}"] = loss
    outs = model(data.x_dict, data.edge_index_dict, *more, **kwargs)
    for kind, out in outs.items():
        is_right = out.argmax(-1) == data[kind].y
        found[f"accuracy {kind}"] = float(is_right[data[kind].train_mask].double().mean())
    return found | dict(model.named_parameters())


class Relational(nn.Module):
    """Two layers of ``HeteroConv``, with a linear map for each type before them."""

    def __init__(self, make: Callable[[tuple[str, str, str]], Any], aggr: str | None, width: int = 8) -> None:
        super().__init__()
        self.lin = HeteroDictLinear(WIDTHS, width)
        self.convs = nn.ModuleList(HeteroConv({r: make(r) for r in RELATIONS}, aggr=aggr) for _ in range(2))
        self.out = nn.ModuleDict({kind: Linear(-1, CLASSES) for kind in SIZES})

    def forward(self, x: Any, edges: Any, **kwargs: Any) -> Any:
        x = {kind: out.tanh() for kind, out in self.lin(x).items()}
        for conv in self.convs:
            x = {kind: out.tanh() for kind, out in conv(x, edges, **kwargs).items()}
            x = {kind: out.flatten(1)[:, :8] for kind, out in x.items()}
        return {kind: self.out[kind](out) for kind, out in x.items()}


def mixed(relation: tuple[str, str, str]) -> Any:
    """GCN within a type; SAGE, GAT and GraphConv between two."""
    if relation[0] == relation[2]:
        return GCNConv(8, 8)
    between = {
        "writes": lambda: SAGEConv((8, 8), 8), "has": lambda: GATConv((8, 8), 4, heads=2, add_self_loops=False)
    }  # fmt: skip
    return between.get(relation[1], lambda: GraphConv((8, 8), 8))()


def a_sage_of(relation: tuple[str, str, str]) -> SAGEConv:
    """SAGE in another form for each relation."""
    options: dict[str, Any] = [
        {"bias": False}, {"root_weight": False}, {"aggr": "sum"}, {"project": True}, {"normalize": True}, {}
    ][RELATIONS.index(relation) % 6]  # fmt: skip
    return SAGEConv((8, 8), 8, **options)


class Plain(nn.Module):
    """For ``to_hetero``."""

    def __init__(self, make: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.first, self.second = make((-1, -1), 8), make((-1, -1), CLASSES)
        self.lin = Linear(-1, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).tanh() + self.lin(x)
        return self.second(x, edge_index)  # type: ignore[no-any-return]


def sage(channels: Any, out: int) -> Any:
    return SAGEConv(channels, out)


def gat(channels: Any, out: int) -> Any:
    return GATConv(channels, out, add_self_loops=False)


class Typed(nn.Module):
    """Two layers of a conv that takes the edges of all relations."""

    def __init__(self, make: Callable[[Any, int], Any]) -> None:
        super().__init__()
        self.first, self.second = make(WIDTHS, 8), make(dict.fromkeys(WIDTHS, 8), 8)
        self.out = nn.ModuleDict({kind: Linear(8, CLASSES) for kind in WIDTHS})

    def forward(self, x: Any, edges: Any) -> Any:
        x = {kind: out.tanh() for kind, out in self.first(x, edges).items()}
        return {kind: self.out[kind](out) for kind, out in self.second(x, edges).items()}


MODELS: dict[str, Callable[[Any], nn.Module]] = {
    "HeteroConv of SAGE, sum": lambda _: Relational(lambda r: SAGEConv((8, 8), 8), "sum"),
    "HeteroConv of SAGE, mean": lambda _: Relational(lambda r: SAGEConv((8, 8), 8, aggr="max"), "mean"),
    "HeteroConv of many SAGEs, mean": lambda _: Relational(a_sage_of, "mean"),
    "HeteroConv of GATv2, max": lambda _: Relational(lambda r: GATv2Conv((8, 8), 8, add_self_loops=False), "max"),
    "HeteroConv of GAT, cat": lambda _: Relational(lambda r: GATConv((8, 8), 8, add_self_loops=False), "cat"),
    "HeteroConv, mixed": lambda _: Relational(mixed, "sum"),
    "HeteroConv, stacked": lambda _: Relational(lambda r: SAGEConv((8, 8), 8), None),
    "to_hetero of SAGE": lambda metadata: to_hetero(Plain(sage), metadata, aggr="mean"),
    "to_hetero of GAT": lambda metadata: to_hetero(Plain(gat), metadata, aggr="sum"),
    "HGT": lambda metadata: Typed(lambda channels, out: HGTConv(channels, out, metadata, heads=2)),
    "HAN": lambda metadata: Typed(lambda channels, out: HANConv(channels, out, metadata, heads=2)),
}
