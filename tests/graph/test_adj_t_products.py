"""``adj_t @ x``, as scripts with propagation of their own write it, against torch's sparse products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import assert_same
from random_graphs import random_graph, uneven_parts
from torch import Tensor
from torch_geometric.transforms import ToSparseTensor
from torch_geometric.utils import to_edge_index
from workers import Pools

import pyg_dist
from pyg_dist.errors import DataError, LayoutMismatchError, UnsupportedError

NUM_NODES = 47

PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "@": lambda a, x: a @ x,
    "matmul": lambda a, x: a.matmul(x),
    "torch.matmul": lambda a, x: torch.matmul(a, x),
    "torch.mm": lambda a, x: torch.mm(a, x),
    "torch.sparse.mm": lambda a, x: torch.sparse.mm(a, x),
    "of a vector": lambda a, x: a @ x[:, 0],
    "hops": lambda a, x: torch.cat([x, a @ x, a @ (a @ x.tanh())], dim=-1),
}


def sparse_graph(weighted: bool) -> Any:
    graph = random_graph(NUM_NODES, 310, seed=1)
    del graph.edge_attr
    graph = graph.coalesce()
    if not weighted:
        graph.edge_weight = torch.ones_like(graph.edge_weight)
    graph = ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(graph)
    graph.adj_t.requires_grad_(weighted)
    return graph


def at_entries(gradient: Tensor, adj_t: Tensor) -> Tensor:
    """The gradient of a sparse matrix, which may be dense, at its entries."""
    row, column = adj_t.detach().to_sparse_coo().indices()
    return gradient.to_dense()[row, column]


def results(product: Callable[[Any, Any], Any], adj_t: Any, x: Tensor, values: Any) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    out = product(adj_t, x)
    out.tanh().square().mean().backward()
    assert x.grad is not None
    found = {"out": out.detach(), "x.grad": x.grad}
    if values.requires_grad:
        found["values.grad"] = values.grad if values.dim() == 1 else at_entries(values.grad, values)
        values.grad = None
    return found


def compare(layouts: list[dict[str, Any]], weighted: bool) -> None:
    stock = sparse_graph(weighted)
    for layout in layouts:
        data: Any = pyg_dist.DistributedData(sparse_graph(weighted), **layout)
        values = data.x.detach() if data.adj_t.weight is None else data.adj_t.weight
        for name, product in PRODUCTS.items():
            expected = results(product, stock.adj_t, stock.x, stock.adj_t)
            assert_same(results(product, data.adj_t, data.x, values), expected, f"{name} {layout}")
        constant, plain = data.x.detach(), stock.x.detach()
        for _ in range(2):  # the second is cached
            assert_same({"out": data.adj_t @ constant}, {"out": stock.adj_t @ plain}, "constant")
        assert_same({"out": data.adj_t @ plain}, {"out": stock.adj_t @ plain}, "plain rows")
        (ends, found), (stock_ends, stock_values) = to_edge_index(data.adj_t), to_edge_index(stock.adj_t)
        assert torch.equal(ends.full_tensor(), stock_ends)
        assert_same({"values": found.detach().double()}, {"values": stock_values.detach()})
        assert_same({"rows": data.x[ends[1]].detach()}, {"rows": stock.x[stock_ends[1]].detach()})
        order = torch.arange(NUM_NODES - 1, -1, -1)
        assert_same({"out": data.adj_t @ data.x[order]}, {"out": stock.adj_t @ stock.x[order]}, "in another order")
        for wrong in (data.y, data.x.view(NUM_NODES, 5, 1), plain[1:], 2.0):
            with pytest.raises(DataError, match=f"expected a row of floats for each of the {NUM_NODES} nodes"):
                data.adj_t @ wrong
        with pytest.raises(UnsupportedError, match=r"multiply rows by one after the other, adj_t @ \(adj_t @ x\)"):
            data.adj_t @ data.adj_t
        graph = pyg_dist.DistributedData(random_graph(NUM_NODES, 310, seed=1), **layout)
        with pytest.raises(LayoutMismatchError, match="expected two matrices or vectors whose shapes fit"):
            graph.edge_index @ graph.x


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("weighted", [True, False])
def test_products(workers: Pools, num_ranks: int, weighted: bool) -> None:
    layouts: list[dict[str, Any]] = [{"partition": uneven_parts(NUM_NODES, num_ranks)}]
    layouts += [{"layout": "grid", "mesh": mesh} for mesh in ({"x": num_ranks}, {"y": num_ranks})]
    workers(num_ranks).run(compare, layouts, weighted)
