"""The grid layout against stock PyG in one process: outputs, losses, buffers and every gradient, on every mesh."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, compare_on_meshes, convs, gradients, meshes, whole
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from workers import Pools

Case = dict[str, Any]

WIDTH = 7  # prime, as are 47 nodes and 5 features
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda width: nn.Identity(),
    "layer": nn.LayerNorm,
    "rms": nn.RMSNorm,
    "batch": nn.BatchNorm1d,
}


class Stack(nn.Module):
    """``num_layers`` convs with norms, residuals and a stock linear map at the end, as a case asks for."""

    def __init__(self, conv: Any, case: Case, in_channels: int, out_channels: int) -> None:
        super().__init__()
        widths = [in_channels, *[case.get("width", WIDTH)] * (case["layers"] - 1), out_channels]
        if case.get("head"):
            widths[-1] = WIDTH
        self.convs = nn.ModuleList(conv(a, b, **case.get("options", {})) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(NORMS[case["norm"]](w) for w in widths[1:-1])
        self.head = nn.Linear(WIDTH, out_channels) if case.get("head") else nn.Identity()
        self.case = case

    def forward(self, x: Tensor, edge_index: Any, *weight: Tensor) -> Tensor:
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            h = norm(conv(x, edge_index, *weight)).tanh()
            x = h + x if self.case.get("residual") and h.shape == x.shape else h
        out = self.convs[-1](x, edge_index, *weight)
        if self.case.get("again"):  # one conv at several depths, and a square one inside
            out = self.convs[-1](self.convs[-2](x, edge_index, *weight).tanh() * 0.5 + x, edge_index, *weight) + out
        return self.head(out)


def train_once(conv: Any, data: Any, case: Case) -> Results:
    torch.manual_seed(0)
    dtype = data.x.dtype
    model = Stack(conv, case, data.x.size(1), int(data.y.max()) + 1).to(dtype)
    x = data.x.detach().clone().requires_grad_()
    weight = (data.edge_weight,) if case.get("weights") else ()
    out = model(x, data.edge_index, *weight)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss = loss + 0.1 * F.nll_loss(out.log_softmax(dim=-1), data.y) + 0.01 * (out * out).mean()
    (loss + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()
    results = {"out": out, "loss": loss, **gradients(model, x=x)}
    model.eval()
    with torch.no_grad():
        results["eval"] = model(x, data.edge_index, *weight)
        results["classes"] = results["eval"].argmax(dim=-1)
    return results


def stock(graph: Data, cases: list[Case]) -> list[Results]:
    """What the cases should give."""
    return [whole(train_once(convs(case["conv"])[0], graph, case)) for case in cases]


def compare(
    graph: Data, shapes: list[dict[str, int]], cases: list[Case], expected: list[Results], stride: int = 1
) -> None:
    def run(data: Any, number: int) -> Results:
        return train_once(convs(cases[number]["conv"])[1], data, cases[number])

    compare_on_meshes(graph, shapes, run, expected, stride)


def gcn(layers: int, norm: str, **case: Any) -> Case:
    return {"conv": "gcn", "layers": layers, "norm": norm, **case}


def sage(layers: int, norm: str, **case: Any) -> Case:
    return {"conv": "sage", "layers": layers, "norm": norm, **case}


CASES = [
    gcn(1, "none"),
    sage(1, "none", options={"aggr": "sum"}),
    gcn(2, "batch", weights=True),
    sage(3, "layer", residual=True),
    gcn(4, "layer", residual=True, options={"improved": True}, weights=True),
    sage(2, "batch", width=11),
    gcn(3, "rms", head=True, options={"add_self_loops": False}, weights=True),
    sage(4, "rms", head=True, options={"bias": False, "root_weight": False}),
    gcn(3, "none", residual=True, options={"bias": False}),
    sage(4, "none", options={"normalize": True}),
    gcn(7, "layer", residual=True),
    sage(3, "batch", residual=True, options={"project": True}),
    gcn(2, "none", again=True, head=True, options={"normalize": False}, width=5),
    sage(2, "none", again=True, width=5),
]


STRIDES = {1: 2, 2: 5, 3: 5, 4: 11, 6: 9, 8: 9}
"""By ranks, coprime to the number of meshes and forms or above it: every case comes, on every mesh some do."""


@pytest.fixture(scope="module")
def expected() -> list[Results]:
    """Of all cases on the graph of the next test."""
    return stock(random_graph(47, 310, seed=1), CASES)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 8))])
def test_meshes_in_float64(workers: Pools, expected: list[Results], num_ranks: int) -> None:
    graph, stride = random_graph(47, 310, seed=1), STRIDES[num_ranks]
    shapes = meshes(num_ranks)[:: 1 if num_ranks < 6 else 2]
    seen = {c for turn in range(2 * len(shapes)) for c in range(turn % stride, len(CASES), stride)}
    assert len(seen) == len(CASES)
    workers(num_ranks).run(compare, graph, shapes, CASES, expected, stride)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_float32(workers: Pools, num_ranks: int) -> None:
    graph = random_graph(60, 400, seed=2, dtype=torch.float32)
    workers(num_ranks).run(compare, graph, meshes(num_ranks)[:3], CASES[2:6], stock(graph, CASES[2:6]), 2)


@pytest.mark.parametrize("num_ranks", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_more_ranks_than_rows_and_columns(workers: Pools, num_ranks: int) -> None:
    graph = random_graph(3, 5, num_features=1, num_classes=2, seed=5)
    cases = [gcn(2, "none"), sage(3, "none")]
    workers(num_ranks).run(compare, graph, meshes(num_ranks), cases, stock(graph, cases), 2)
