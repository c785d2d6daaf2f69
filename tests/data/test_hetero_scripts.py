"""Scripts on graphs of several types: a forecast, scores of users and items, and ``to_homogeneous()``; beside PyG."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import assert_same
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, MessagePassing, RGCNConv, SAGEConv
from typed_models import AUTHOR, CLASSES, PAPER, RELATIONS, SIZES, both, hetero_graph, run_model
from workers import Pools

from pyg_dist import DistributedData, distribute
from pyg_dist.nn import NodeEmbedding


class Interaction(MessagePassing):
    """GraphCast's step: edges have a state, which both ends change."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="sum")
        self.edge, self.node = nn.Linear(3 * width, width), nn.Linear(2 * width, width)

    def forward(self, x: Any, edge_index: Any, edge_attr: Any) -> tuple[Any, Any]:
        edge_attr = edge_attr + self.edge_updater(edge_index, x=x, edge_attr=edge_attr)
        sums = self.propagate(edge_index, x=x, edge_attr=edge_attr)
        return x[1] + self.node(torch.cat([x[1], sums], dim=-1)).tanh(), edge_attr

    def edge_update(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.edge(torch.cat([x_i, x_j, edge_attr], dim=-1)).tanh()  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return edge_attr


class TakesGraph(MessagePassing):
    """A script's conv whose only argument is the graph."""

    def __init__(self) -> None:
        super().__init__(aggr="sum")
        self.paper, self.author, self.edge = nn.Linear(6, 5), nn.Linear(4, 5), nn.Linear(2, 5)

    def forward(self, data: Any) -> Any:
        cites, writes = data[PAPER, "cites", PAPER], data[AUTHOR, "writes", PAPER]
        x = self.paper(data[PAPER].x)
        x = self.propagate(cites.edge_index, x=(x, x), edge_attr=cites.edge_attr)
        return self.propagate(writes.edge_index, x=(self.author(data[AUTHOR].x), x), edge_attr=writes.edge_attr)

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return x_j * self.edge(edge_attr).sigmoid()


def whole_graph(num_ranks: int) -> None:
    stock_data, data = both(num_ranks)
    torch.manual_seed(1)
    stock = TakesGraph().double()
    ours, found = distribute(copy.deepcopy(stock)), []
    for model, graph in ((ours, data), (stock, stock_data)):
        out = model(graph)
        out.square().mean().backward()
        found.append({"out": out, **{name: p.grad for name, p in model.named_parameters()}})
    assert_same(*found)


class Forecast(nn.Module):
    """Encode a grid into a mesh, process, decode; ``author`` is the grid, ``paper`` the mesh."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.grid, self.mesh, self.out = (nn.Linear(w, v) for w, v in ((4, width), (6, width), (width, CLASSES)))
        self.edges = nn.ModuleList(nn.Linear(2, width) for _ in range(3))
        self.steps = nn.ModuleList(Interaction(width) for _ in range(4))

    def forward(self, x: Any, edges: Any, attr: Any) -> Any:
        up, within, down = (AUTHOR, "writes", PAPER), (PAPER, "cites", PAPER), (PAPER, "written_by", AUTHOR)
        encode, *process, decode = self.steps
        grid, mesh = self.grid(x[AUTHOR]), self.mesh(x[PAPER])
        states = {r: lin(attr[r]) for lin, r in zip(self.edges, (up, within, down), strict=True)}
        mesh, _ = encode((grid, mesh), edges[up], states[up])
        for step in process:
            mesh, states[within] = step((mesh, mesh), edges[within], states[within])
        grid, _ = decode((mesh, grid), edges[down], states[down])
        return {AUTHOR: self.out(grid)}


def forecast(num_ranks: int) -> None:
    stock_data, data = both(num_ranks)
    torch.manual_seed(1)
    stock = Forecast().double()
    ours = distribute(copy.deepcopy(stock))
    results = [run_model(m, d, 5, d.edge_attr_dict) for m, d in ((ours, data), (stock, stock_data))]
    assert_same(*results)


def users_and_items(num_ranks: int) -> None:
    """Scores of pairs of rows of two types, an embedding for one of them, and parts that METIS finds."""
    rng = torch.Generator().manual_seed(5)
    graph = HeteroData()
    graph["user"].num_nodes, graph["item"].x = 30, torch.randn(20, 4, generator=rng, dtype=torch.float64)
    pairs = torch.stack([torch.randint(0, n, (80,), generator=rng) for n in (30, 20)])
    graph["user", "buys", "item"].edge_index, graph["item", "of", "user"].edge_index = pairs, pairs.flip(0)
    data: Any = DistributedData(copy.copy(graph))
    embedding = NodeEmbedding(data["user"], 3, dtype=torch.float64)
    rows = embedding().full_tensor().detach()
    torch.manual_seed(1)
    relations = graph.edge_types
    stock = HeteroConv({r: SAGEConv(((3, 4) if r[0] == "user" else (4, 3)), 5) for r in relations}).double()
    ours = distribute(copy.deepcopy(stock))
    labels, found = torch.rand(40, generator=rng, dtype=torch.float64), []
    for model, source, users in ((ours, data, embedding()), (stock, graph, rows.clone().requires_grad_())):
        z = model({"user": users, "item": source["item"].x}, source.edge_index_dict)
        scores = (z["user"][pairs[0, :40]] * z["item"][pairs[1, :40]]).sum(-1)
        loss = F.binary_cross_entropy_with_logits(scores, labels)
        loss.backward()
        gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
        found.append({"loss": loss, "scores": scores, "users": users.grad, **z, **gradients})
    assert_same(*found)
    assert all(min(of_type) > 0 for of_type in data.plan.nodes_of.values()), data.plan.nodes_of


def homogeneous(num_ranks: int) -> None:
    """Relational GCN on ``to_homogeneous()``."""
    graph = hetero_graph()
    for kind in SIZES:
        graph[kind].x = graph[kind].x[:, :3]
    plain = graph.to_homogeneous()
    data: Any = DistributedData(plain.clone())
    torch.manual_seed(1)
    stock = RGCNConv(3, 5, len(RELATIONS)).double()
    ours, found = distribute(copy.deepcopy(stock)), []
    for conv, source in ((ours, data), (stock, plain)):
        x = source.x.detach().clone().requires_grad_()
        out = conv(x, source.edge_index, source.edge_type)
        out.square().sum().backward()
        found.append({"out": out, "x": x.grad} | {f"{name}.grad": p.grad for name, p in conv.named_parameters()})
    assert_same(*found)


@pytest.mark.parametrize(
    "script", [forecast, users_and_items, homogeneous, whole_graph], ids=lambda script: script.__name__
)
@pytest.mark.parametrize("num_ranks", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_scripts(workers: Pools, num_ranks: int, script: Any) -> None:
    workers(num_ranks).run(script, num_ranks)
