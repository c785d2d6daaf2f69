"""Edge weights that learn, in the grid layout: every gradient, to second order, against stock PyG and dense algebra."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.transforms import ToSparseTensor
from workers import Workers

Pools = Callable[[int], Workers]
Case = dict[str, Any]

CASES: list[Case] = [
    {"widths": (5, 7, 4)},
    {"widths": (5, 3, 4), "options": {"improved": True}},
    {"widths": (5, 7, 4), "options": {"add_self_loops": False}},
    {"widths": (5, 1, 4), "options": {"normalize": False}},
    {"widths": (5, 4), "twice": True},
    {"widths": (5, 6, 4), "features_learn": False},
]


def shapes(num_ranks: int) -> list[dict[str, int]]:
    from pyg_dist.backend.mesh import meshes

    return [{"x": m.x, "y": m.y, "z": m.z} for m in meshes(num_ranks)]


def train_once(conv_class: Any, data: Any, case: Case) -> dict[str, Tensor]:
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
    return {name: (v.full_tensor() if hasattr(v, "full_tensor") else v).detach() for name, v in results.items()}


def compare(graph: Data, meshes: list[dict[str, int]], stride: int) -> None:
    import pyg_dist
    from pyg_dist.conv import DistributedGCNConv

    expected = [train_once(GCNConv, graph, case) for case in CASES]
    for turn, mesh in enumerate(meshes):
        for sums in ("reduce_scatter", "all_reduce"):
            os.environ["PYG_DIST_GRID_SUMS"] = sums
            data = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh)
            for number in range((turn + (sums == "all_reduce")) % stride, len(CASES), stride):
                got = train_once(DistributedGCNConv, data, CASES[number])
                for name, want in expected[number].items():
                    message = f"{mesh} {sums} {CASES[number]}: {name}"
                    torch.testing.assert_close(got[name], want, rtol=0, atol=1e-10, msg=message)
    del os.environ["PYG_DIST_GRID_SUMS"]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 6])
def test_every_gradient_on_every_mesh(workers: Pools, num_ranks: int) -> None:
    graph = random_graph(47, 310, seed=1)
    workers(num_ranks).run(compare, graph, shapes(num_ranks), 1 if num_ranks < 4 else 3, timeout=115)


def of_adj_t(meshes: list[dict[str, int]]) -> None:
    """PyG differentiates by the values of no sparse tensor, so dense matrices say what is right."""
    import pyg_dist
    from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv

    graph = random_graph(47, 310, seed=1)
    del graph.edge_attr
    graph = ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(graph.coalesce())
    ones = graph.adj_t.to_sparse_coo().coalesce()
    target, source = ones.indices()

    def dense(kind: str, weight: Tensor) -> Tensor:
        matrix = torch.zeros(47, 47, dtype=weight.dtype).index_put((target, source), weight)
        if kind == "gcn":
            matrix = matrix + torch.eye(47, dtype=weight.dtype)
            scale = matrix.sum(1).pow(-0.5)
            return scale.view(-1, 1) * matrix * scale
        return matrix / torch.bincount(target, minlength=47).clamp(min=1).view(-1, 1) if kind == "mean" else matrix

    for mesh in meshes:
        data = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh)
        values = data.adj_t.weight
        assert torch.equal(values.full_tensor(), ones.values())
        for kind in ("gcn", "mean", "sum"):
            torch.manual_seed(0)
            ours: Any = DistributedGCNConv(5, 3) if kind == "gcn" else DistributedSAGEConv(5, 3, aggr=kind)
            ours.double()
            x, want_x = (t.detach().clone().requires_grad_() for t in (data.x, graph.x))
            weight, want_weight = (t.detach().clone().requires_grad_() for t in (values, ones.values()))
            data.adj_t.weight = weight
            out = ours(x, data.adj_t)
            first = ours.lin if kind == "gcn" else ours.lin_l
            want = dense(kind, want_weight) @ want_x @ first.weight.t()
            want = want + (ours.bias if kind == "gcn" else ours.lin_l.bias + want_x @ ours.lin_r.weight.t())
            torch.testing.assert_close(out.full_tensor(), want, rtol=0, atol=1e-10)
            got = torch.autograd.grad(out.tanh().square().sum(), (x, weight, first.weight))
            expected = torch.autograd.grad(want.tanh().square().sum(), (want_x, want_weight, first.weight))
            for a, b in zip(got, expected, strict=True):
                a = a.full_tensor() if hasattr(a, "full_tensor") else a
                torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=f"{mesh} {kind}")


@pytest.mark.parametrize("num_ranks", [1, 4, 6])
def test_values_of_adj_t(workers: Pools, num_ranks: int) -> None:
    workers(num_ranks).run(of_adj_t, shapes(num_ranks), timeout=115)
