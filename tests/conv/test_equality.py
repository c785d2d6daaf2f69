"""Distributed convs against the stock ones in one process: outputs, losses and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same, convs, gradients, whole
from bits import assert_same_bits
from graphs import load_npz
from random_graphs import random_graph, uneven_parts
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import coalesce
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
from pyg_dist.errors import DataError

EXCHANGES = ["post", "pre", "hybrid"]
AGGREGATIONS: list[Any] = [
    "mean", "sum", "add", "max", "min", "std", "var", "mul", "median", "softmax", "powermean", "lstm",
    ["mean", "max", "std"],
]  # fmt: skip
SAGE: list[dict[str, Any]] = [
    *({"aggr": aggr} for aggr in AGGREGATIONS),
    {"normalize": True, "root_weight": False},
    {"project": True},
    {"bias": False},
    {"aggr": "softmax", "aggr_kwargs": {"learn": True}},
]
GCN: list[dict[str, Any]] = [
    {},
    {"improved": True},
    {"add_self_loops": False},
    {"normalize": False},
    {"cached": True},
    {"bias": False},
]


class TwoLayers(torch.nn.Module):
    def __init__(self, conv: Any, channels: tuple[int, int, int], **options: Any) -> None:
        super().__init__()
        self.first = conv(channels[0], channels[1], **copy.deepcopy(options))
        self.norm = torch.nn.BatchNorm1d(channels[1])
        self.second = conv(channels[1], channels[2], **copy.deepcopy(options))

    def forward(self, x: Tensor, edge_index: Any, *weight: Tensor) -> Tensor:
        # No kink: a column without variance is zero up to rounding, and ReLU would tell 1e-17 from 0.
        return self.second(self.norm(self.first(x, edge_index, *weight)).tanh(), edge_index, *weight)


def train_once(conv: Any, data: Any, weights: str, options: dict[str, Any]) -> Results:
    """One step's outputs and gradients."""
    torch.manual_seed(0)
    dtype = data.x.dtype
    model = TwoLayers(conv, (data.x.size(1), 7, int(data.y.max()) + 1), **options).to(dtype)
    x = data.x.detach().clone().requires_grad_()
    weight = () if weights == "none" else (data.edge_weight.detach().clone().requires_grad_(weights == "learned"),)
    out = model(x, data.edge_index, *weight)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    (loss + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()
    leaves = {"x": x, **({"edge_weight": weight[0]} if weights == "learned" else {})}
    return {"out": out, "loss": loss, **gradients(model, **leaves)}


def by_target(graph: Data) -> Data:
    """With the order of edges that stock LSTM and median want."""
    graph = graph.clone()
    order = graph.edge_index[1].argsort(stable=True)
    graph.edge_index = graph.edge_index[:, order]
    graph.edge_weight = graph.edge_weight[order]
    return graph


def stock(graph: Data, cases: list[tuple[str, dict[str, Any], str]]) -> list[Results]:
    """What the cases should give."""
    graph = by_target(graph)
    return [whole(train_once(convs(kind)[0], graph, weights, options)) for kind, options, weights in cases]


def compare(
    graph: Data,
    partition: Any,
    cases: list[tuple[str, dict[str, Any], str]],
    exchange: Any = "hybrid",
    expected: list[Results] | None = None,
) -> tuple[int, int]:
    """On every rank: run the cases on the stock conv, if these results are not known, and on ours.

    Returns:
        Halo bytes sent and this rank's rows.
    """
    graph = by_target(graph)
    data = pyg_dist.DistributedData(graph, partition=partition, exchange=exchange)
    for number, (kind, options, weights) in enumerate(cases):
        got = whole(train_once(convs(kind)[1], data, weights, options))
        if expected is not None or pyg_dist.is_main():  # large graphs once, not on every rank
            want = stock(graph, [(kind, options, weights)])[0] if expected is None else expected[number]
            assert_same(got, want, f"{kind} {options} weights {weights}")
    return data.traffic.num_bytes, data.x.to_local().shape[0]


def all_cases() -> list[tuple[str, dict[str, Any], str]]:
    sage = [("sage", options, "none") for options in SAGE]
    return sage + [("gcn", options, weights) for options in GCN for weights in ("none", "constant", "learned")]


GRAPHS = {
    torch.float64: random_graph(47, 310, seed=1),
    torch.float32: random_graph(60, 400, seed=2, dtype=torch.float32),
}


@pytest.fixture(scope="module")
def expected() -> dict[torch.dtype, list[Results]]:
    """Of all cases on the graphs of the next two tests."""
    return {dtype: stock(graph, all_cases()) for dtype, graph in GRAPHS.items()}


@pytest.mark.parametrize(
    ("world_size", "exchange"),
    [(1, "hybrid"), (2, "hybrid"), (3, "hybrid"), (3, "post"), pytest.param(3, "pre", marks=pytest.mark.slow)],
)
def test_every_option_in_float64(workers: Pools, expected: Any, world_size: int, exchange: str) -> None:
    graph, parts = GRAPHS[torch.float64], uneven_parts(47, world_size)
    # What is not the hybrid sends and adds the same sums at another place: every second option by each.
    some = {"hybrid": slice(None), "post": slice(0, None, 2), "pre": slice(1, None, 2)}[exchange]
    want = expected[torch.float64][some]
    results = workers(world_size).run(compare, graph, parts, all_cases()[some], exchange, want)
    assert sum(rows for _, rows in results) == 47
    assert (sum(num_bytes for num_bytes, _ in results) > 0) == (world_size > 1)


@pytest.mark.parametrize(
    ("world_size", "partition", "exchange"), [(2, "hypergraph", "pre"), (3, "metis", "hybrid"), (4, "random", "hybrid")]
)
def test_every_option_in_float32(workers: Pools, expected: Any, world_size: int, partition: str, exchange: str) -> None:
    some = slice(world_size % 2, None, 2)
    graph, want = GRAPHS[torch.float32], expected[torch.float32][some]
    workers(world_size).run(compare, graph, partition, all_cases()[some], exchange, want)


@on_ranks(1)
def test_means_have_the_bits_of_stock_pyg() -> None:
    """A SAGE layer's output and gradients at world size 1 have the bits of stock PyG's on a graph without hubs."""
    for num_nodes, width in ((300, 33), (9_000, 240)):  # the second by column blocks
        edge_index = coalesce(torch.randint(0, num_nodes, (2, 12 * num_nodes)))
        graph = Data(x=torch.randn(num_nodes, width), edge_index=edge_index)
        found = []
        for conv, data in ((SAGEConv, graph), (DistributedSAGEConv, pyg_dist.DistributedData(graph))):
            torch.manual_seed(0)
            layer = conv(width, width)
            x = data.x.detach().clone().requires_grad_()
            out = layer(x, data.edge_index)
            (out * torch.linspace(-1, 1, width)).square().sum().backward()
            found.append([t.full_tensor() if hasattr(t, "full_tensor") else t for t in (out.detach(), x.grad)])
            found[-1] += [p.grad for p in layer.parameters()]
        for expected, got in zip(*found, strict=True):
            assert_same_bits(got, expected)


@pytest.mark.parametrize("world_size", [3])
def test_more_ranks_than_nodes(workers: Pools, world_size: int) -> None:
    graph = random_graph(2, 3, seed=5)
    for partition in ("metis", "random", torch.zeros(2, dtype=torch.int64)):
        cases: list[Any] = [("sage", {}, "none"), ("gcn", {}, "constant")]
        workers(world_size).run(compare, graph, partition, cases, "hybrid", stock(graph, cases))


REAL_GRAPHS = [
    ("cora", 1, "metis"),
    ("cora", 2, "random"),
    ("cora", 3, "metis"),
    pytest.param("tolokers", 4, "random", marks=pytest.mark.slow),
    pytest.param("power_usa82k", 2, "metis", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "world_size", "partition"), REAL_GRAPHS)
def test_real_graphs(workers: Pools, shared_data: Any, name: str, world_size: int, partition: str) -> None:
    graph = load_npz(shared_data / f"{name}.npz")
    graph.edge_weight = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(0)) + 0.1
    cases = [("sage", {}, "none"), ("gcn", {}, "learned")]
    workers(world_size).run(compare, graph, partition, cases)


@on_ranks(4)
@pytest.mark.parametrize("layout", ["halo", "grid"])
def test_cached_norms(layout: str) -> None:
    """``cached=True`` keeps the norm of the first weights, whatever becomes of them; on the grid, of every tile."""

    def run(conv: Any, data: Any) -> list[Tensor]:
        weight = data.edge_weight.detach().clone()
        first = conv(data.x, data.edge_index, weight)
        weight.mul_(weight)
        again = conv(first, data.edge_index, weight * 3)
        return [first, again, conv(again, data.edge_index), conv(data.x, data.edge_index, weight.requires_grad_())]

    graph = random_graph(31, 160, seed=2)
    for options in ({}, {"add_self_loops": False}):
        ours, stock = (kind(5, 5, cached=True, **options).double() for kind in (DistributedGCNConv, GCNConv))
        stock.load_state_dict(ours.state_dict())
        got = run(ours, DistributedData(graph.clone(), layout=layout, partition="random"))
        for out, want in zip(got, run(stock, graph), strict=True):
            torch.testing.assert_close(out.full_tensor(), want, rtol=0, atol=1e-11)
        data, narrow = DistributedData(graph.clone(), layout=layout, partition="random"), graph.x.float()
        ours.reset_parameters()
        stock.reset_parameters()
        stock.load_state_dict(ours.state_dict())
        for x in (narrow, graph.x):  # the norm is that of the first call, in any dtype
            convs = [conv.to(x.dtype) for conv in (ours, stock)]
            out, want = convs[0](data.x.to(x.dtype), data.edge_index), convs[1](x, graph.edge_index)
            torch.testing.assert_close(out.full_tensor(), want, check_dtype=False, rtol=0, atol=1e-5)
        other = DistributedData(graph.clone(), layout=layout, partition="random")
        with pytest.raises(DataError, match="second graph"):
            ours(other.x, other.edge_index)
        ours.reset_parameters()
        ours(other.x, other.edge_index)
