"""Features of which few elements are not zero: stock PyG's numbers, by products with these elements alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same, gradients
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from workers import Pools

import pyg_dist
from pyg_dist.tensor import sparse_form
from pyg_dist.tensor.functions.layers import sparse_rows

WIDTH = 40

CONVS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: _OnRows(nn.Linear(WIDTH, 5)),
    "matmul": lambda: _OnRows(_Product()),
    "GCN": lambda: gnn.GCNConv(WIDTH, 5),
    "GCN, wider": lambda: gnn.GCNConv(WIDTH, 50, bias=False),
    "SAGE": lambda: gnn.SAGEConv(WIDTH, 5),
    "GAT": lambda: gnn.GATConv(WIDTH, 5, heads=2),
    "GIN": lambda: gnn.GINConv(nn.Linear(WIDTH, 5)),
    "TAG": lambda: gnn.TAGConv(WIDTH, 5, K=2),
    "Transformer": lambda: gnn.TransformerConv(WIDTH, 5),
}


class _OnRows(nn.Module):
    def __init__(self, of_rows: nn.Module) -> None:
        super().__init__()
        self.of_rows = of_rows

    def forward(self, x: Tensor, edge_index: Any) -> Any:
        return self.of_rows(x)


class _Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def sparse_graph(share: float = 0.05) -> Data:
    graph = random_graph(61, 400, WIDTH, seed=5)
    kept = torch.rand(graph.x.shape, generator=torch.Generator().manual_seed(1)) < share
    graph.x = graph.x * kept
    return graph


def distributed(graph: Data, **layout: Any) -> Any:
    options = layout or {"partition": uneven_parts(graph.num_nodes, pyg_dist.world_size())}
    return pyg_dist.DistributedData(graph, **options)


def step(model: nn.Module, data: Any) -> Results:
    model.zero_grad()
    out = model(data.x, data.edge_index)
    (out.tanh() * (out.sigmoid() + 1)).square().mean().backward()
    return {"out": out.detach(), **gradients(model)}


def with_few(run: Callable[..., Any], *args: Any) -> Any:
    """``run`` where a few elements are enough."""
    with patch.object(sparse_form, "_FEWEST", 1):
        return run(*args)


def equality(layout: dict[str, Any]) -> None:
    """Of what is kept, of features changed in place, and of features that are dense from then on."""
    for name, make in CONVS.items():
        graph = sparse_graph()
        data = distributed(graph, **layout)
        torch.manual_seed(0)
        stock = make().double()
        ours = pyg_dist.distribute(copy.deepcopy(stock))
        for change in (None, None, lambda x: x.mul_(0.5), lambda x: x.add_(1)):
            for x in (data.x, graph.x):
                if change is not None:
                    change(x)
            assert_same(step(ours, data), step(stock, graph), name)


LAYOUTS: dict[str, dict[str, Any]] = {"halo": {}, "grid": {"layout": "grid"}}


@pytest.mark.parametrize(("num_ranks", "layout"), [(1, "halo"), (3, "halo"), (2, "grid")])
def test_numbers_are_those_of_pyg(workers: Pools, num_ranks: int, layout: str) -> None:
    workers(num_ranks).run(with_few, equality, LAYOUTS[layout])


def forms() -> None:
    """What is sparse: attributes and what is kept of them, not dense ones, nor what is computed."""

    def is_sparse(x: Any) -> bool:
        return sparse_rows(x, torch.ones(1, x.shape[1], dtype=x.dtype)) is not None

    data = distributed(sparse_graph())
    assert is_sparse(data.x)
    assert not is_sparse(data.x * 1)
    assert not is_sparse(data.x.detach().requires_grad_())
    assert not is_sparse(distributed(sparse_graph(0.5)).x)
    assert not is_sparse(data.edge_attr)
    assert is_sparse(F.dropout(data.x, 0.5))


def dropped() -> None:
    """The rows that dropout leaves are a product's, whatever is done with them in between."""
    data = distributed(sparse_graph())
    weight = torch.randn(5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for changed in (False, True):
        x: Any = F.dropout(data.x, 0.5)
        if changed:
            x.add_(1)
        want = x.full_tensor() @ weight.T
        assert_same({"out": F.linear(x, weight)}, {"out": want})


def derivatives() -> None:
    """A second derivative; features that learn get their gradient."""
    graph = sparse_graph()
    data = distributed(graph)
    torch.manual_seed(0)
    weight, bias = torch.randn(5, WIDTH, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def penalty(x: Any, learns: bool) -> Results:
        w = weight.clone().requires_grad_()
        x = x.detach().clone().requires_grad_() if learns else x
        (grad,) = torch.autograd.grad(F.linear(x, w, bias).sigmoid().square().sum(), w, create_graph=True)
        grad.square().sum().backward()
        return {"weight": w.grad, "x": x.grad}

    for learns in (False, True):
        assert_same(penalty(data.x, learns), penalty(graph.x, learns))


def bits() -> None:
    """Every step of a run has the bits of the first: a resumed run begins at any."""
    data = distributed(sparse_graph())
    import pyg_dist

    for make in CONVS.values():
        torch.manual_seed(0)
        model = pyg_dist.distribute(make().double())
        first, *others = [step(model, data) for _ in range(3)]
        for other in others:
            for name, value in first.items():
                assert torch.equal(*(v.to_local() if hasattr(v, "to_local") else v for v in (value, other[name]))), name


@pytest.mark.parametrize("run", [forms, dropped, derivatives, bits])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_kept(workers: Pools, num_ranks: int, run: Callable[[], None]) -> None:
    workers(num_ranks).run(with_few, run)
