"""Two levels beside one and stock PyG: values, gradients, bytes by level. ``PYG_DIST_MACHINES`` makes the machines."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GINEConv, GraphConv, SAGEConv
from workers import Workers

Pools = Callable[[int], Workers]

NUM_NODES = 61
CONVS: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: SAGEConv(5, 4),
    "gcn": lambda: GCNConv(5, 4),
    "gat": lambda: GATConv(5, 4, heads=2),
    "max": lambda: SAGEConv(5, 4, aggr="max"),
    "gine": lambda: GINEConv(nn.Linear(5, 4), edge_dim=3),
    "weights": lambda: GraphConv(5, 4),
}
MACHINES = {4: "0,0,1,1", 6: "0,0,1,1,2,2", 3: "0,0,1"}


@contextmanager
def machines(world_size: int) -> Iterator[None]:
    """A session whose ranks share machines."""
    from pyg_dist.backend.session import session

    session.shutdown()
    os.environ["PYG_DIST_MACHINES"] = MACHINES[world_size]
    session.init()
    try:
        yield
    finally:
        del os.environ["PYG_DIST_MACHINES"]
        session.shutdown()
        session.init()


def hub_graph() -> Data:
    """With hubs, self loops and duplicate edges."""
    graph = random_graph(NUM_NODES, 700, num_features=5, seed=3)
    graph.edge_index[0] = graph.edge_index[0] * torch.rand(700) ** 2 // 1
    graph.edge_attr = torch.randn(700, 3, dtype=torch.float64)
    graph.x = torch.randn(NUM_NODES, 5, dtype=torch.float64)
    graph.edge_weight = torch.rand(700, dtype=torch.float64) + 0.5
    return graph


def results(conv: Any, data: Any, name: str) -> list[Any]:
    """The output, all gradients, and a second derivative."""
    x, weight = (data[key].detach().clone().requires_grad_() for key in ("x", "edge_weight"))
    if name == "weights":
        out = conv(x, data.edge_index, weight)
    elif name == "gine":
        out = conv(x, data.edge_index, data.edge_attr)
    else:
        out = conv(x, data.edge_index)
    inputs = [x, *conv.parameters(), *([weight] if name == "weights" else [])]
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=name not in ("gat", "max"))
    found = [out.detach(), *(grad.detach() for grad in grads)]
    if name not in ("gat", "max"):
        found += torch.autograd.grad(grads[0].square().sum(), inputs[:2])
    return found


def whole(found: Any) -> Tensor:
    return found.full_tensor() if hasattr(found, "full_tensor") else found  # type: ignore[no-any-return]


def equal(world_size: int, exchange: Any) -> None:
    import pyg_dist

    with machines(world_size):
        torch.manual_seed(0)
        graph = hub_graph()
        parts = torch.arange(NUM_NODES) * 7 % world_size
        one, two = (
            pyg_dist.DistributedData(graph, partition=parts, exchange=exchange, hierarchy=h) for h in ("off", "on")
        )
        assert (one.plan.two_levels, two.plan.two_levels) == (False, True)
        for name, make in CONVS.items():
            stock = make().double()
            expected = results(stock, graph, name)
            for data in (one, two):
                before = copy.copy(data.traffic)
                ours = pyg_dist.distribute(copy.deepcopy(stock))
                for found, theirs in zip(results(ours, data, name), expected, strict=True):
                    torch.testing.assert_close(whole(found), theirs, rtol=1e-10, atol=1e-10, msg=f"{name} {exchange}")
                assert data.traffic.num_bytes > before.num_bytes
                assert data.traffic.num_bytes_between <= data.traffic.num_bytes


@pytest.mark.parametrize("exchange", ["hybrid", "post", "pre"])
@pytest.mark.parametrize("world_size", [3, 4, 6])
def test_two_levels_equal_stock(workers: Pools, world_size: int, exchange: Any) -> None:
    workers(world_size).run(equal, world_size, exchange)


def bytes_by_level(world_size: int) -> None:
    """One product sends by the link what the plan counts; the other way as much."""
    import pyg_dist

    with machines(world_size):
        torch.manual_seed(0)
        graph = hub_graph()
        parts = torch.arange(NUM_NODES) * 7 % world_size
        data = pyg_dist.DistributedData(graph, partition=parts, hierarchy="on")
        assert data.plan.across is not None
        conv = pyg_dist.distribute(SAGEConv(5, 7, project=False)).double()
        x = data.x.detach().clone().requires_grad_()
        out = None
        for _ in ("forward", "backward"):
            before = copy.copy(data.traffic)
            if out is None:
                out = conv(x, data.edge_index)
            else:
                out.square().sum().backward()
            sent = [
                sum(data.graph.group.gather_counts(getattr(data.traffic, n) - getattr(before, n)))
                for n in ("num_bytes", "num_bytes_between")
            ]
            numbers = data.plan.to_dict()
            row = 5 * 8
            assert sent[1] == data.plan.across[1] * row
            assert (
                sent[0]
                == (numbers["rows_inside_nodes"] + numbers["rows_between_nodes"]) * row
                == 40 * sum(s.rows_sent for s in data.plan.sizes)
            )


@pytest.mark.parametrize("world_size", [4, 6])
def test_bytes_by_level(workers: Pools, world_size: int) -> None:
    workers(world_size).run(bytes_by_level, world_size)
