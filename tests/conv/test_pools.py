"""PyG's pools that keep nodes, and models of them, stock and through ``distribute``: values and every gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import Results, assert_same, gradients
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Batch
from workers import Pools, on_ranks

import pyg_dist

F, H, NUM_NODES = 6, 8, 47


class TwoPools(nn.Module):
    """A pool of what a pool has left, a readout of each, and rows that go back to where they were picked."""

    takes = "edge_weight"

    def __init__(self, pool: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList([gnn.GraphConv(F, H), gnn.GCNConv(H, H), gnn.GATConv(H, H)])
        self.pools = nn.ModuleList([pool(H), pool(H)])

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Any, batch: Any) -> tuple[Tensor, list[Any]]:
        x, found, ups = self.convs[0](x, edge_index, edge_weight).tanh(), [], []
        for conv, pool in zip(list(self.convs)[1:], self.pools, strict=True):
            up = torch.zeros_like(x)
            x, edge_index, edge_weight, batch, perm, score = pool(x, edge_index, edge_weight, batch)
            up[perm] = x
            ups.append(up.square().mean(1))
            x = conv(x, edge_index, edge_weight).tanh()
            readout = gnn.global_mean_pool(x, batch) + gnn.global_max_pool(x, batch)
            found += [edge_index, edge_weight, batch, perm, score, up, readout]
        back = ups[0].clone()
        back[found[3]] = back[found[3]] + ups[1]
        return x, [*found, back]


class ThreePools(TwoPools):
    """Three in a row, over edges with several values each."""

    takes = "edge_attr"

    def __init__(self, pool: Callable[[int], nn.Module]) -> None:
        super().__init__(pool)
        self.convs = nn.ModuleList([gnn.GATConv(c, H, edge_dim=3) for c in (F, H, H, H)])
        self.pools.append(pool(H))


class UNet(nn.Module):
    takes = "edge_weight"

    def __init__(self, takes_weights: bool, **options: Any) -> None:
        super().__init__()
        self.takes_weights = takes_weights
        self.net = gnn.GraphUNet(F, H, 4, act="tanh", **options)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Any, batch: Any) -> tuple[Tensor, list[Any]]:
        return self.net(x, edge_index, batch, edge_weight if self.takes_weights else None), []


class Finest(gnn.TopKPooling):
    """A script's own subclass."""

    def forward(self, *args: Any) -> Any:
        x, *rest = super().forward(*args)
        return (x.square(), *rest)


CASES: dict[str, Callable[[], nn.Module]] = {
    "TopK": lambda: TwoPools(lambda c: gnn.TopKPooling(c, 0.6, multiplier=2.0)),
    "TopK, so many": lambda: TwoPools(lambda c: gnn.TopKPooling(c, 7, nonlinearity="sigmoid")),
    "TopK by score": lambda: TwoPools(lambda c: gnn.TopKPooling(c, min_score=0.03)),
    "three in a row": lambda: ThreePools(lambda c: gnn.TopKPooling(c, 0.7)),
    "SAG": lambda: TwoPools(lambda c: gnn.SAGPooling(c, 0.6)),
    "SAG of attention": lambda: TwoPools(lambda c: gnn.SAGPooling(c, 0.8, GNN=gnn.GATConv)),
    "subclass": lambda: TwoPools(lambda c: Finest(c, 0.7)),
    "U-Net": lambda: UNet(False, depth=3, pool_ratios=[0.7, 0.6, 0.5]),
    "U-Net with weights": lambda: UNet(True, depth=2, sum_res=False),
}


def graph(of_several: bool) -> Any:
    if not of_several:
        return random_graph(NUM_NODES, 310, F, seed=1, dtype=torch.float64)
    graphs = [random_graph(n, 5 * n, F, seed=n, dtype=torch.float64) for n in (20, 5, 11, 30)]
    return Batch.from_data_list(graphs)


def step(data: Any, name: str, is_ours: bool) -> Results:
    torch.manual_seed(0)
    model = CASES[name]().double()
    if is_ours:
        keys = list(model.state_dict())
        assert pyg_dist.distribute(model) is model
        assert list(model.state_dict()) == keys
    x, weight = (t.detach().clone().requires_grad_() for t in (data.x, data[model.takes]))
    out, found = model(x, data.edge_index, weight, data.batch if "batch" in data else None)
    loss = (out.sigmoid() * torch.arange(len(out)).view(-1, 1)).sum()
    for k, value in enumerate(found):
        if isinstance(value, Tensor) and value.is_floating_point():
            loss = loss + (k + 1) * value.square().sum()
    loss.backward()
    whole = {str(k): value.full_tensor() if hasattr(value, "full_tensor") else value for k, value in enumerate(found)}
    found_all: Results = {"out": out.detach(), "loss": loss.detach(), **gradients(model, x=x, weight=weight)}
    return found_all | {k: v.detach() for k, v in whole.items()}


@functools.cache
def stock(name: str, of_several: bool) -> Results:
    return step(graph(of_several), name, False)


def compare(layout: str, of_several: bool, expected: dict[str, Results]) -> None:
    data = graph(of_several)
    options: dict[str, Any] = {"layout": layout}
    if layout == "halo":
        options["partition"] = uneven_parts(data.num_nodes, pyg_dist.world_size())
    ours = pyg_dist.DistributedData(data, **options)
    for name, want in expected.items():
        assert_same(step(ours, name, True), want, name)


@pytest.mark.parametrize("of_several", [False, True], ids=["a graph", "graphs"])
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, "halo"), (2, "halo"), (3, "halo"), (2, "grid"), pytest.param(4, "grid", marks=pytest.mark.slow)],
)
def test_pools_in_float64(workers: Pools, world_size: int, layout: str, of_several: bool) -> None:
    """Also which nodes are kept in which order, the edges between them and their values."""
    workers(world_size).run(compare, layout, of_several, {name: stock(name, of_several) for name in CASES})


def ties(expected: list[Tensor]) -> None:
    whole = graph(False)
    whole.x = whole.x[torch.arange(NUM_NODES) % 3]
    data = pyg_dist.DistributedData(whole, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    torch.manual_seed(0)
    _, edge_index, _, _, perm, _ = pyg_dist.distribute(gnn.TopKPooling(F).double())(data.x, data.edge_index)
    assert torch.equal(perm.full_tensor(), expected[0])
    assert torch.equal(edge_index.full_tensor(), expected[1])


def test_ties_are_kept_in_pygs_order(workers: Pools) -> None:
    data = graph(False)
    torch.manual_seed(0)
    _, edge_index, _, _, perm, _ = gnn.TopKPooling(F).double()(data.x[torch.arange(NUM_NODES) % 3], data.edge_index)
    workers(3).run(ties, [perm, edge_index])


@on_ranks(2)
def test_rows_stay_where_they_are() -> None:
    data = pyg_dist.DistributedData(graph(False))
    pool = pyg_dist.distribute(gnn.TopKPooling(F).double())
    x, edge_index, _, batch, perm, score = pool(data.x, data.edge_index)
    rows = x._sharding
    assert perm._sharding is score._sharding is edge_index.graph.node_sharding is rows
    back = torch.zeros_like(data.x)
    back[perm] = x
    assert back[perm]._sharding is rows
    assert batch.tolist() == [0] * len(perm)
    assert edge_index.shape[1] < data.num_edges


def refusals() -> dict[str, str]:
    data, other = (pyg_dist.DistributedData(graph(several)) for several in (False, True))
    pool = pyg_dist.distribute(gnn.TopKPooling(F).double())
    found = {}
    for name, given in {
        "two graphs": (data.x, other.edge_index),
        "selected": (data.x[torch.arange(9)], torch.tensor([[0], [1]])),
        "values": (data.x, data.edge_index, other.edge_weight),
    }.items():
        with pytest.raises(pyg_dist.errors.PygDistError) as caught:
            pool(*given)
        found[name] = str(caught.value)
    chosen = pool.select(data.x)
    chosen.cluster_index = chosen.cluster_index.flip(0)
    with pytest.raises(pyg_dist.errors.UnsupportedError) as caught:
        pool.connect(chosen, data.edge_index)
    found["other numbers"] = str(caught.value)
    for class_ in (gnn.ASAPooling, gnn.PANPooling, gnn.EdgePooling):
        with pytest.raises(pyg_dist.errors.UnsupportedError) as caught:
            pyg_dist.distribute(nn.Sequential(class_(F)))
        found[class_.__name__] = str(caught.value)
    return found


def test_refused_in_one_line(workers: Pools) -> None:
    for found in workers(2).run(refusals):
        assert "Pooling expected an edge_index between the 47 nodes that it has scores of" in found["two graphs"]
        assert "Pooling expected a score for each node of a graph" in found["selected"]
        assert "of another graph or selection" in found["values"]
        assert "in the order of their numbers (got another cluster_index)" in found["other numbers"]
        assert all("makes nodes and edges of all edges" in found[name] for name in found if name.endswith("Pooling"))
        assert all("\n" not in line for line in found.values())
