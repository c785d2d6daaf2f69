"""Convs that look at all edges before they pass messages, along them or along others that they make: against PyG."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import edge_norms
import pytest
import torch
from against_stock import Results, assert_same, gradients
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.utils import (
    add_self_loops,
    coalesce,
    dense_to_sparse,
    is_undirected,
    scatter,
    softmax,
    to_dense_adj,
    to_undirected,
)
from workers import Pools

import pyg_dist

F, G, NUM_NODES = 6, 4, 47


class Normed(gnn.MessagePassing, edge_norms.NormedEdges):
    """The norm is a function of another module, which a class named behind ``MessagePassing`` calls."""

    def __init__(self) -> None:
        super().__init__(aggr="add", node_dim=-2)
        self.lin = nn.Linear(F, G)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        edge_index, edge_weight = self.edges_of(x, edge_index, edge_weight)
        return self.propagate(edge_index, x=self.lin(x), weight=edge_weight)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, weight: Tensor) -> Tensor:
        return weight.view(-1, 1) * x_j


class ThereAndBack(Normed):
    """Along edges and against them, each direction with a transition matrix of its own."""

    def __init__(self, turn: Callable[[Any], Any]) -> None:
        super().__init__()
        self.lin, self.turn = nn.Linear(6 * F, G), turn

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        hops = [x]
        for edges in (edge_index, self.turn(edge_index)):
            along, weight = edge_norms.by_degree(edges, edge_weight, x.size(0))
            hops += [self.propagate(along, x=hops[-1], weight=weight)]
            hops += [self.propagate(along, x=hops[-1], weight=weight)]
        back, weight = gnn.conv.gcn_conv.gcn_norm(self.turn(edge_index), edge_weight, x.size(0))
        return self.lin(torch.cat([*hops, self.propagate(back, x=x, weight=weight)], -1))  # type: ignore[no-any-return]


class TwoKinds(Normed):
    """Messages along several sets of edges at once, as convs of signed graphs pass them."""

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        loops = torch.arange(x.size(0)).expand(2, -1)
        both = torch.cat([edge_index, edge_index.flip(0), loops], dim=-1)
        is_back = torch.cat([torch.zeros(edge_index.size(1)), torch.ones(both.size(1) - edge_index.size(1))]).double()
        return self.propagate(both, x=self.lin(x), weight=1 + is_back)  # type: ignore[no-any-return]


class Diffusion(gnn.MessagePassing):
    """Along edges and back, by degrees of a dense matrix, as diffusion convs for traffic have it."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.weight = nn.Parameter(torch.randn(3, 2, F, G))

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        dense = to_dense_adj(edge_index, edge_attr=edge_weight).squeeze(0)
        out_degree, in_degree = dense.sum(1), dense.sum(0)
        source, _ = edge_index
        back, _ = dense_to_sparse(dense.t())
        along = self.propagate(edge_index, x=x, norm=1 / out_degree[source])
        against = self.propagate(back, x=x, norm=1 / in_degree[source])
        twice = self.propagate(back, x=against, norm=1 / in_degree[back[1]])
        hops = ((x, x), (along, against), (2 * along, 2 * twice))
        return sum(a @ w[0] + b @ w[1] for w, (a, b) in zip(self.weight, hops, strict=True))  # type: ignore[return-value]

    def message(self, x_j: Tensor, norm: Tensor) -> Tensor:
        return norm.view(-1, 1) * x_j


class BothWays(gnn.MessagePassing):
    """Edges that are made undirected, with messages of a kind of their own and an update of edges."""

    def __init__(self) -> None:
        super().__init__(aggr="max")
        self.lin = nn.Linear(2 * F, G)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        assert not is_undirected(edge_index)
        edge_index, edge_weight = to_undirected(edge_index, edge_weight, reduce="mean")
        edge_index, edge_weight = coalesce(edge_index, edge_weight, reduce="max")
        gate = self.edge_updater(edge_index, x=x, weight=edge_weight)
        return self.propagate(edge_index, x=x, weight=gate * edge_weight, size=(x.size(0), x.size(0)))  # type: ignore[no-any-return]

    def edge_update(self, x_i: Tensor, x_j: Tensor, weight: Tensor) -> Tensor:
        return (x_i * x_j).sum(-1).sigmoid() * weight

    def message(self, x_i: Tensor, x_j: Tensor, weight: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j], dim=-1)) * weight.view(-1, 1)


class UpdatesEdges(gnn.MessagePassing):
    """Messages are the new state of edges, summed at either end by a line of its own, as in simulators."""

    def __init__(self, end: int) -> None:
        super().__init__()
        self.lin, self.end = nn.Linear(2 * F + 1, G), end

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        out, state = self.propagate(edge_index, x=x, state=edge_weight.view(-1, 1))
        return out + (state.mean() + scatter(state, edge_index[self.end, ...], 0, x.size(0), "max"))  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor, state: Tensor) -> Tensor:
        return self.lin(torch.cat([x_i, x_j, state], dim=1))

    def aggregate(self, inputs: Tensor, edge_index: Any, dim_size: int | None = None) -> tuple[Tensor, Tensor]:
        return scatter(inputs, edge_index[self.end, :], dim=0, dim_size=dim_size, reduce="sum"), inputs


class BySource(Normed):
    """Attention and means over each source's edges, as models of knowledge graphs and of molecules have them."""

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        source, target = edge_index
        attention = softmax(edge_weight * (x[source] * x[target]).sum(-1), source, num_nodes=x.size(0))
        out = self.propagate(edge_index, x=self.lin(x), weight=attention)
        edges, loops = add_self_loops(edge_index, edge_weight, num_nodes=x.size(0))
        shares = softmax(loops.view(-1, 1), edges[0], num_nodes=x.size(0)) * x[edges[1]]
        return out + scatter(shares, edges[0], 0, x.size(0), "mean").sum(1, keepdim=True)  # type: ignore[no-any-return]


class LeavesOut(Normed):
    """Messages along some edges, which a list chooses."""

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        some = torch.arange(0, edge_index.size(1), 3)
        kept = edge_index.clone()[:, some] + 0 * int(edge_index.max())
        return self.propagate(kept, x=self.lin(x), weight=edge_weight[some])  # type: ignore[no-any-return]


CASES: dict[str, Callable[[], nn.Module]] = {
    "at sources": lambda: UpdatesEdges(0),
    "at targets": lambda: UpdatesEdges(1),
    "some edges": LeavesOut,
    "over sources": BySource,
    "diffusion": Diffusion,
    "both ways": BothWays,
    "two kinds": TwoKinds,
    "norm of another module": Normed,
    "by list": lambda: ThereAndBack(edge_norms.transposed),
    "by list, all": lambda: ThereAndBack(lambda edge_index: edge_index[[1, 0], :]),
    "flipped": lambda: ThereAndBack(lambda edge_index: edge_index.flip(0)),
    "flipped by name": lambda: ThereAndBack(lambda edge_index: torch.flip(edge_index, dims=[0])),
}


def graph() -> Data:
    """Each edge once, and one at least from and to each node."""
    data = random_graph(NUM_NODES, 200, F, seed=1, dtype=torch.float64)
    rng, node = torch.Generator().manual_seed(2), torch.arange(NUM_NODES)
    edges = torch.cat([data.edge_index, torch.stack([node, (node + 1) % NUM_NODES])], 1).unique(dim=1)
    edges = edges[:, torch.randperm(edges.shape[1], generator=rng)]
    weight = torch.rand(edges.shape[1], dtype=torch.float64, generator=rng) + 0.1
    return Data(x=data.x, edge_index=edges, edge_weight=weight)


def step(data: Any, name: str, is_ours: bool) -> Results:
    torch.manual_seed(0)
    model = CASES[name]().double()
    if is_ours:
        pyg_dist.distribute(model)
    x, weight = (t.detach().clone().requires_grad_() for t in (data.x, data.edge_weight))
    out = model(x, data.edge_index, weight)
    assert isinstance(out, pyg_dist.tensor.NodeTensor) == is_ours
    loss = (out.sigmoid() * torch.arange(len(out)).view(-1, 1)).sum()
    loss.backward()
    return {"out": out.detach(), "loss": loss.detach(), **gradients(model, x=x, weight=weight)}


@functools.cache
def stock(name: str) -> Results:
    return step(graph(), name, False)


def compare(layout: str, expected: dict[str, Results]) -> None:
    options: dict[str, Any] = {"layout": layout}
    if layout == "halo":
        options["partition"] = uneven_parts(NUM_NODES, pyg_dist.world_size())
    data = pyg_dist.DistributedData(graph(), **options)
    for name, want in expected.items():
        assert_same(step(data, name, True), want, name)


@pytest.mark.parametrize(
    ("world_size", "layout"), [(1, "halo"), (3, "halo"), (2, "grid"), pytest.param(2, "halo", marks=pytest.mark.slow)]
)
def test_convs_that_need_whole_edges(workers: Pools, world_size: int, layout: str) -> None:
    workers(world_size).run(compare, layout, {name: stock(name) for name in CASES})
