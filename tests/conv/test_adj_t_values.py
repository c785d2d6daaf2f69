"""Values of a sparse ``adj_t`` that require grad: every gradient against stock PyG, on both layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from against_stock import Results, assert_same, gradients, twins, whole
from random_graphs import random_graph, uneven_parts
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor
from workers import Pools

import pyg_dist

CONVS: list[tuple[str, dict[str, Any]]] = [
    ("gcn", {"out_channels": 3}),
    ("gcn", {"out_channels": 7, "normalize": False}),
    ("sage", {"out_channels": 3}),
    ("sage", {"out_channels": 7}),
    ("sage", {"out_channels": 3, "aggr": "sum", "bias": False}),
    ("sage", {"out_channels": 7, "aggr": "sum", "root_weight": False}),
    ("sage", {"out_channels": 3, "aggr": "max"}),
]


def sparse_graph(ones: bool) -> Data:
    graph = random_graph(47, 310, seed=1)
    del graph.edge_attr
    graph = graph.coalesce()
    if ones:
        graph.edge_weight = torch.ones_like(graph.edge_weight)
    graph = ToSparseTensor(attr="edge_weight", layout=torch.sparse_csr)(graph)
    graph.adj_t.requires_grad_()
    graph.x.requires_grad_()
    return graph


def train(conv: Any, data: Any, values: Any) -> Results:
    """Two steps, the second one with other values."""
    results: Results = {}
    for step in range(2):
        conv.zero_grad()
        data.x.grad = values.grad = None
        out = conv(data.x, data.adj_t)
        (out.tanh() * torch.arange(1, out.shape[1] + 1)).square().mean().backward()
        grad = values.grad.values() if values.grad.layout != torch.strided else values.grad
        found = whole({"out": out, "values": grad, **gradients(conv, x=data.x)})
        results |= {f"{name}, step {step}": value for name, value in found.items()}
        with torch.no_grad():
            (values.values() if values.layout != torch.strided else values).mul_(1.5)
    return results


def compare(layouts: list[dict[str, Any]], ones: bool) -> None:
    for kind, options in CONVS:
        stock, distributed = twins(kind, 5, **options)
        graph = sparse_graph(ones)
        expected = train(stock, graph, graph.adj_t)
        for layout in layouts:
            if layout["layout"] == "grid" and options.get("aggr") == "max":
                continue
            data: Any = pyg_dist.DistributedData(sparse_graph(ones), **layout)
            assert data.adj_t.weight.requires_grad
            got = train(distributed, data, data.adj_t.weight)
            assert_same(got, expected, f"{kind} {options} {layout}")


@pytest.mark.parametrize("num_ranks", [1, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_values_learn_as_in_stock(workers: Pools, num_ranks: int) -> None:
    layouts: list[dict[str, Any]] = [{"layout": "halo", "partition": uneven_parts(47, num_ranks)}]
    for mesh in {1: [{}], 3: [{"y": 3}], 4: [{"x": 2, "z": 2}, {"x": 2, "y": 2}]}[num_ranks]:
        layouts.append({"layout": "grid", "mesh": mesh})
    workers(num_ranks).run(compare, layouts, num_ranks == 3)
