"""Edge weights that learn, in the grid layout: every gradient, to second order, against stock PyG."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, compare_on_meshes, meshes, whole
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.conv import DistributedGCNConv

Case = dict[str, Any]

CASES: list[Case] = [
    {"widths": (5, 7, 4)},
    {"widths": (5, 3, 4), "options": {"improved": True}},
    {"widths": (5, 7, 4), "options": {"add_self_loops": False}},
    {"widths": (5, 1, 4), "options": {"normalize": False}},
    {"widths": (5, 4), "twice": True},
    {"widths": (5, 6, 4), "features_learn": False},
]


def train_once(conv_class: Any, data: Any, case: Case) -> Results:
    """Weights that follow from a leaf, as those of an attention do, and the leaf itself."""
    torch.manual_seed(0)
    widths = case["widths"]
    convs = nn.ModuleList(conv_class(a, b, **case.get("options", {})) for a, b in pairwise(widths))
    convs.double()
    leaves = {"weight": data.edge_weight.detach().clone().requires_grad_()}
    x = data.x.detach().clone()
    if case.get("features_learn", True):
        leaves["x"] = x.requires_grad_()
    leaves |= dict(convs.named_parameters())

    twice = case.get("twice", False)

    def forward() -> Tensor:
        h = x
        for conv in convs:
            h = conv(h, data.edge_index, leaves["weight"].square() + 0.1).tanh()
        if twice:  # one conv with two sets of weights
            h = h + convs[0](x, data.edge_index, leaves["weight"])
        return F.cross_entropy(h[data.train_mask], data.y[data.train_mask]) + 0.1 * h.square().mean()

    loss = forward()
    found = torch.autograd.grad(loss, list(leaves.values()), create_graph=twice)
    results = {"loss": loss} | {name: grad for name, grad in zip(leaves, found, strict=True)}
    if twice:
        norm = sum(grad.square().sum() for grad in found)
        results |= {f"{n}, 2": g for n, g in zip(leaves, torch.autograd.grad(norm, list(leaves.values())), strict=True)}
    with torch.no_grad():
        results["without gradients"] = forward()
    return results


def compare(graph: Data, shapes: list[dict[str, int]], stride: int, expected: list[Results]) -> None:
    compare_on_meshes(graph, shapes, lambda data, k: train_once(DistributedGCNConv, data, CASES[k]), expected, stride)


@pytest.mark.parametrize("num_ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6))])
def test_every_gradient_on_every_mesh(workers: Pools, num_ranks: int) -> None:
    graph = random_graph(47, 310, seed=1)
    expected = [whole(train_once(GCNConv, graph, case)) for case in CASES]
    workers(num_ranks).run(compare, graph, meshes(num_ranks), {4: 5, 6: 9}.get(num_ranks, num_ranks), expected)


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"x": 2}, {"z": 2}, {"y": 2}], ids=str)
def test_negative_degrees(mesh: dict[str, int]) -> None:
    """A node whose degree has no root, and which is no source, has a gradient of zero."""
    graph = random_graph(47, 310, seed=1)
    chosen = graph.edge_index[0] != 0
    graph = Data(x=graph.x, edge_index=graph.edge_index[:, chosen], edge_weight=graph.edge_weight[chosen].abs() + 0.1)
    graph.edge_weight[graph.edge_index[1] == 0] *= -1
    found = []
    for data, kind in (
        (graph, GCNConv),
        (pyg_dist.DistributedData(graph, layout="grid", mesh=mesh), DistributedGCNConv),
    ):
        torch.manual_seed(4)
        x, weight = (t.detach().clone().requires_grad_() for t in (data.x, data.edge_weight))
        conv = kind(graph.num_features, 3, add_self_loops=False).double()
        conv(x, data.edge_index, weight)[torch.arange(1, 47)].square().sum().backward()
        found.append(x.grad)
    assert found[0][0].isfinite().all()
    torch.testing.assert_close(found[1].full_tensor(), found[0], rtol=0, atol=1e-10, equal_nan=True)
