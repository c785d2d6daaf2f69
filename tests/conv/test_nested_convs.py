"""Convs that own, inherit and call other convs, on the graph's edges and on edges that they have changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import Results, assert_same, gradients, of_first_rank
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.nn import models
from torch_geometric.utils import add_self_loops, remove_self_loops
from workers import Pools

import pyg_dist

F, G = 6, 3


class Guided(gnn.MessagePassing):
    """Messages of a node's features and of what another conv has made of its neighbours."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(aggr="mean")
        self.inner, self.lin = inner, nn.Linear(2 * F, G)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, z=self.inner(x, edge_index))

    def message(self, x_i: Tensor, z_j: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, z_j], dim=-1))


class OnOtherEdges(gnn.MessagePassing):
    """The other conv gets edges with more or fewer loops, and weights of this one's."""

    def __init__(self, inner: nn.Module, adds: bool, weighs: bool = False) -> None:
        super().__init__(aggr="add")
        self.inner, self.adds, self.gate = inner, adds, nn.Linear(2 * F, 1) if weighs else None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        edge_index, _ = remove_self_loops(edge_index)
        if self.adds:
            edge_index, _ = add_self_loops(edge_index, num_nodes=x.size(0))
        if self.gate is None:
            return self.propagate(edge_index, x=self.inner(x, edge_index))
        source, target = edge_index
        weight = self.gate(torch.cat([x[source], x[target]], dim=-1)).sigmoid().view(-1)
        return self.propagate(edge_index, x=self.inner(x, edge_index, weight))


class Inherits(gnn.GCNConv):
    def __init__(self) -> None:
        super().__init__(F, F)
        self.second = gnn.SAGEConv(F, F, aggr="max")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.second(super().forward(x, edge_index).tanh(), edge_index)


class Several(gnn.MessagePassing):
    """In a list, one of them inside of a block with a norm, and this all inside of another conv."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.GCNConv(F, F), gnn.SAGEConv(F, F), Guided(gnn.GATConv(F, F))])
        self.norm = nn.BatchNorm1d(G)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index).tanh()
        return self.update(self.norm(x))


class WithinMessage(gnn.MessagePassing):
    def __init__(self, inner: nn.Module, of_edges: bool) -> None:
        super().__init__()
        self.inner, self.of_edges = inner, of_edges

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.seen = x, edge_index
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        x, edge_index = self.seen
        return self.inner(x_j if self.of_edges else x, edge_index)


def sequential() -> nn.Module:
    """Of a class of its own: PyG writes the latest one's forward into the class, that of other tests, too."""
    parts = [(gnn.GCNConv(F, F), "x, edge_index -> x"), nn.Tanh(), (gnn.SAGEConv(F, F), "x, edge_index -> x")]
    return type("Chain", (gnn.Sequential,), {})("x, edge_index", parts)  # type: ignore[no-any-return]


INNER: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: gnn.GCNConv(F, F),
    "GCN, cached": lambda: gnn.GCNConv(F, F, cached=True, improved=True),
    "SAGE": lambda: gnn.SAGEConv(F, F),
    "SAGE, max": lambda: gnn.SAGEConv(F, F, aggr="max", project=True),
    "GAT": lambda: gnn.GATConv(F, F),
    "GIN": lambda: gnn.GINConv(gnn.MLP([F, F, F])),
    "Cheb": lambda: gnn.ChebConv(F, F, 2),
    "Transformer": lambda: gnn.TransformerConv(F, F),
    "Edge": lambda: gnn.EdgeConv(nn.Linear(2 * F, F)),
    "TAG": lambda: gnn.TAGConv(F, F),
    "model GCN": lambda: models.GCN(F, F, 2, F, act="tanh"),
    "model GIN": lambda: models.GIN(F, F, 2, F, act="tanh", jk="cat"),
    "Sequential": sequential,
}

CASES: dict[str, Callable[[], nn.Module]] = {
    **{f"guided by {name}": lambda make=make: Guided(make()) for name, make in INNER.items()},  # type: ignore[misc]
    **{
        f"{name} on {'more' if adds else 'fewer'} edges": lambda name=name, adds=adds: OnOtherEdges(INNER[name](), adds)  # type: ignore[misc]
        for name in ("GCN", "SAGE", "SAGE, max", "GAT", "GIN", "Cheb", "Edge")
        for adds in (True, False)
    },
    "weighed GCN": lambda: OnOtherEdges(gnn.GCNConv(F, F), adds=True, weighs=True),
    "weighed Graph": lambda: OnOtherEdges(gnn.GraphConv(F, F), adds=False, weighs=True),
    "inherits": Inherits,
    "several": Several,
}


def step(model: nn.Module, data: Any) -> Results:
    x = data.x.detach().clone().requires_grad_()
    out = model(x, data.edge_index)
    out.square().mean().backward()
    return {"out": out.detach(), "again": model(data.x, data.edge_index).detach(), **gradients(model, x=x)}


def compare(layout: str, names: list[str]) -> None:
    data = random_graph(31, 140, F, G, seed=2)
    options = {"partition": uneven_parts(31, pyg_dist.world_size())} if layout == "halo" else {}
    ours: Any = pyg_dist.DistributedData(data, layout=layout, **options)
    for name in names:
        torch.manual_seed(0)
        stock = CASES[name]().double()
        expected = of_first_rank(lambda stock=stock: step(copy.deepcopy(stock), data))
        model = pyg_dist.distribute(copy.deepcopy(stock))
        assert list(model.state_dict()) == list(stock.state_dict())
        assert_same(step(model, ours), expected, name)
    again = copy.deepcopy(model)
    again.load_state_dict(stock.state_dict())
    assert_same(step(pickle.loads(pickle.dumps(again)), ours) if layout == "halo" else step(again, ours), expected)
    for of_edges in (False, True):
        wrong = pyg_dist.distribute(WithinMessage(gnn.SAGEConv(F, F), of_edges).double())
        with pytest.raises(pyg_dist.errors.UnsupportedError, match=r"calls SAGEConv within its message.*before prop"):
            wrong(ours.x, ours.edge_index)


@pytest.mark.parametrize(
    ("world_size", "layout", "stride"), [(1, "halo", 3), (1, "grid", 3), (2, "grid", 1), (3, "halo", 1)]
)
def test_nested_convs(workers: Pools, world_size: int, layout: str, stride: int) -> None:
    workers(world_size).run(compare, layout, list(CASES)[stride - 1 :: stride])


class InPlainList(gnn.MessagePassing):
    def __init__(self) -> None:
        super().__init__()
        self.convs = [gnn.GCNConv(F, F)]

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[0](x, edge_index)  # type: ignore[no-any-return]


def test_convs_that_distribute_cannot_find() -> None:
    data = pyg_dist.DistributedData(random_graph(31, 140, F, G, seed=2))
    with pytest.raises(pyg_dist.errors.UnsupportedError, match="not those in a plain list, or made in forward"):
        pyg_dist.distribute(InPlainList().double())(data.x, data.edge_index)
