"""Convs in bfloat16 and in float16, on both layouts: as near to float64 as stock PyG in the same dtype is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import Results, gradients, meshes, of_first_rank, whole
from random_graphs import random_graph, uneven_parts
from torch import nn
from torch_geometric import nn as gnn
from workers import Pools

import pyg_dist
from pyg_dist import distribute

F, G, NUM_NODES = 6, 4, 47

CONVS: dict[str, tuple[Callable[[], nn.Module], bool]] = {  # the conv, and whether it takes edge weights
    "sage": (lambda: gnn.SAGEConv(F, G), False),
    "sage, wide": (lambda: gnn.SAGEConv(F, 3 * F), False),
    "sage sum": (lambda: gnn.SAGEConv(F, G, aggr="sum"), False),
    "gcn": (lambda: gnn.GCNConv(F, G), True),
    "gcn, wide": (lambda: gnn.GCNConv(F, 3 * F), False),
    "gat": (lambda: gnn.GATConv(F, G, heads=2), False),
    "gin": (lambda: gnn.GINConv(nn.Linear(F, G)), False),
}


def step(name: str, data: Any, dtype: torch.dtype, held: torch.dtype, is_stock: bool) -> Results:
    """Output and gradients in ``dtype``, from parameters, features and weights that ``held`` holds."""
    make, is_weighted = CONVS[name]
    torch.manual_seed(0)
    conv = make().to(held).to(dtype)
    conv = conv if is_stock else distribute(conv)
    leaves = {"x": data.x.detach().clone().to(dtype).requires_grad_()}
    if is_weighted:
        leaves["weight"] = data.edge_weight.detach().clone().to(dtype).requires_grad_()
    out = conv(leaves["x"], data.edge_index, *list(leaves.values())[1:])
    # The same gradient by the output for all: what a loss would round is not on trial.
    (out * torch.linspace(-1, 1, out.shape[1]).to(held).to(dtype)).sum().backward()
    return whole({"out": out, **gradients(conv, **leaves)})


def compare(layouts: list[dict[str, Any]], dtype: torch.dtype) -> None:
    graph = random_graph(NUM_NODES, 310, F, seed=1, dtype=dtype)
    unit = torch.finfo(dtype).eps / 2
    of_stock = of_first_rank(
        lambda: {name: [step(name, graph, d, dtype, True) for d in (torch.float64, dtype)] for name in CONVS}
    )
    for layout in layouts:
        data = pyg_dist.DistributedData(graph.clone(), **layout)
        for name, (exact, stock) in of_stock.items():
            got = step(name, data, dtype, dtype, False)
            assert got.keys() == stock.keys() == exact.keys()
            for key, want in exact.items():
                assert (got[key].dtype, got[key].shape) == (dtype, want.shape), f"{name}: {key}"
                errors = [float((found[key].double() - want).abs().max()) for found in (got, stock)]
                size = float(want.abs().max())
                assert errors[1] <= 8 * unit * size, f"{name}: {key} of stock PyG is no measure, off by {errors[1]:.2e}"
                roundings = 2 if layout["layout"] == "grid" else 1  # parts of sums over an axis of the mesh are sent
                bound = 2 * errors[1] + roundings * unit * size
                assert errors[0] <= bound, f"{layout} {name}: {key} is off by {errors[0]:.2e}, allowed {bound:.2e}"


@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(1, torch.bfloat16), (2, torch.bfloat16), (3, torch.bfloat16), (2, torch.float16)], ids=str
)
def test_as_near_to_float64_as_stock(workers: Pools, num_ranks: int, dtype: torch.dtype) -> None:
    halo = [
        {"layout": "halo", "partition": uneven_parts(NUM_NODES, num_ranks), "exchange": e} for e in ("hybrid", "post")
    ]
    grid = [{"layout": "grid", "mesh": mesh} for mesh in meshes(num_ranks)]
    workers(num_ranks).run(compare, [*halo, *grid], dtype)
