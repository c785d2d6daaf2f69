"""Edge weights that learn on the halo layout: they are lent where fewer bytes travel so; numbers are stock PyG's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from against_stock import Results, assert_same, gradients
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric import nn as gnn
from workers import Pools

import pyg_dist
from pyg_dist.graph.protocol import Norm
from pyg_dist.halo.plan.cost import ExchangeCounts, sends_weights

WIDTH, NUM_NODES, NUM_EDGES = 24, 47, 310

CONVS: dict[str, Callable[[], nn.Module]] = {
    "GCNConv": lambda: gnn.GCNConv(WIDTH, WIDTH),
    "GCNConv, without loops": lambda: gnn.GCNConv(WIDTH, WIDTH, add_self_loops=False),
    "GraphConv": lambda: gnn.GraphConv(WIDTH, WIDTH),
    "GraphConv, mean": lambda: gnn.GraphConv(WIDTH, WIDTH, aggr="mean"),
    "TAGConv": lambda: gnn.TAGConv(WIDTH, WIDTH, K=2),
    "APPNP": lambda: gnn.APPNP(2, 0.1),
    "SimpleConv, loops": lambda: gnn.SimpleConv(combine_root="self_loop"),
    "FAConv": lambda: gnn.FAConv(WIDTH),
    "FAConv, weighted": lambda: gnn.FAConv(WIDTH, normalize=False),
}
HOPS = {"TAGConv": 2, "APPNP": 2}


def distributed(**options: Any) -> Any:
    graph = random_graph(NUM_NODES, NUM_EDGES, WIDTH, seed=1)
    return graph, pyg_dist.DistributedData(
        graph, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()), **options
    )  # fmt: skip


def run(data: Any, name: str, is_ours: bool, rows_learn: bool = True) -> tuple[Tensor, nn.Module, dict[str, Tensor]]:
    """The output of a conv with weights that learn, the conv and the leaves."""
    torch.manual_seed(0)
    conv = CONVS[name]().double()
    if is_ours:
        pyg_dist.distribute(conv)
    leaves = {"x": data.x.detach().clone().requires_grad_(rows_learn)}
    given = [leaves["x"]] * (2 if "FAConv" in name else 1)
    if name != "FAConv":  # whose gates learn
        leaves["weight"] = data.edge_weight.detach().clone().requires_grad_()
    return conv(*given, data.edge_index, *([leaves["weight"]] if "weight" in leaves else [])), conv, leaves


def numbers(data: Any, name: str, is_ours: bool) -> Results:
    """Values, and the gradients of a loss that depends on first gradients."""
    out, conv, leaves = run(data, name, is_ours)
    loss = (out.tanh() * (out.sigmoid() + 1)).square().mean() + 0.1 * out[data.train_mask].mean()
    first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
    found = {f"{leaf}, first": g.detach().clone() for leaf, g in zip(leaves, first, strict=True)}
    (loss + sum((NUM_NODES * g).square().mean() for g in first)).backward()
    return {"out": out.detach(), **found, **gradients(conv, **leaves)}


def against_stock(exchange: str, lends: bool) -> None:
    graph, data = distributed(exchange=exchange)
    with patch("pyg_dist.halo.products.sends_weights", lambda *_: lends):
        for name in CONVS:
            assert_same(numbers(data, name, True), numbers(graph, name, False), f"{name}, {exchange}, {lends}")


@pytest.mark.parametrize("exchange", ["hybrid", pytest.param("pre", marks=pytest.mark.slow)])
@pytest.mark.parametrize("world_size", [1, 3])
def test_lent(workers: Pools, world_size: int, exchange: str) -> None:
    """Of partial sums that other ranks make: first and second gradients, too."""
    workers(world_size).run(against_stock, exchange, True)


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_by_rows(workers: Pools, world_size: int) -> None:
    workers(world_size).run(against_stock, "hybrid", False)


def sent(bits: int = 32) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """Bytes and messages of a forward and backward pass of each conv, and those of the plan's exchange."""
    _, data = distributed(bits=bits)
    share, found = data.graph.share, {}

    def both_ways(there: tuple[int, ...], back: tuple[int, ...]) -> int:
        return sum(there) + sum(back)

    rows = both_ways(share.sum_transfer.send_counts, share.sum_transfer.recv_counts)
    weights = both_ways(share.sum_transfer.weight_send_counts, share.sum_transfer.weight_recv_counts)
    gates = both_ways(share.row_transfer.send_counts, share.row_transfer.recv_counts)
    row_bytes = WIDTH * 8 if bits == 32 else 4 + WIDTH * bits // 8
    for name in CONVS:
        hops, has_gates = HOPS.get(name, 1), "FAConv" in name
        for _ in range(2):  # the first one builds what lasts
            before = data.traffic.num_bytes, data.traffic.num_messages
            run(data, name, True)[0].to_local().sum().backward()
        passed = data.traffic.num_bytes - before[0], data.traffic.num_messages - before[1]
        found[name] = (
            passed,
            (rows * row_bytes * hops + weights * 8 + gates * 8 * has_gates, 2 * (hops + 1 + has_gates)),
        )
    return found


@pytest.mark.parametrize("world_size", [3])
def test_rows_sent_are_the_plans(workers: Pools, world_size: int) -> None:
    """Each hop sends the plan's rows and sums; each pass, beside them, one message with the weights of lent edges."""
    found = workers(world_size).run(sent)
    for rank in found[:2]:  # the third one has no rows
        for name, (got, expected) in rank.items():
            assert got == expected, name


def sent_in_few_bits() -> dict[str, Any]:
    with patch("pyg_dist.halo.products.sends_weights", lambda *_: True):
        return sent(8)


def test_weights_travel_exactly(workers: Pools) -> None:
    """Where rows and sums, and their gradients, are in few bits."""
    for rank in workers(2).run(sent_in_few_bits):
        for name, (got, expected) in rank.items():
            assert got == expected, name


def test_choice() -> None:
    """Rows with a gradient travel twice by post, others once; sums always do, and so do the weights."""
    counts = ExchangeCounts(post=100, sums=70, weights=3000)
    assert [sends_weights(counts, 4 * width, 4 * width, 4, True) for width in (100, 101)] == [False, True]
    assert not sends_weights(counts, 10_000, 10_000, 4, False)
    assert sends_weights(counts._replace(sums=40), 10_000, 10_000, 4, False)
    assert not sends_weights(ExchangeCounts(0, 0, 0), 64, 64, 4, True)
    assert sends_weights(counts, 100, 10_000, 4, True)


def few_columns() -> tuple[int, int]:
    """Rows sent by an aggregation of one column, and those of post."""
    _, data = distributed()
    weight = data.edge_weight.detach().clone().requires_grad_()
    operator = data.graph.operator(Norm.SUM, weight, torch.float64)
    before = data.traffic.num_rows
    data.graph.aggregate(data.x[:, :1], operator)
    return data.traffic.num_rows - before, data.graph.share.rows_sent["post"]


def test_narrow_rows_go_by_post(workers: Pools) -> None:
    """They are as cheap as the weights would be."""
    for got, post in workers(2).run(few_columns):
        assert got == post
