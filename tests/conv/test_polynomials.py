"""Polynomials of one matrix: the order of hops and linear maps, and hops of constants, which are made once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from against_stock import Results, assert_same, gradients, of_first_rank
from random_graphs import random_graph, uneven_parts
from torch import nn
from torch_geometric import nn as gnn
from workers import Pools, on_ranks

import pyg_dist

CONVS: dict[str, Callable[[int, int], nn.Module]] = {
    "TAGConv": lambda f, g: gnn.TAGConv(f, g),
    "TAGConv, without a norm": lambda f, g: gnn.TAGConv(f, g, K=2, normalize=False, bias=False),
    "SGConv": lambda f, g: gnn.SGConv(f, g, K=2),
    "SSGConv": lambda f, g: gnn.SSGConv(f, g, alpha=0.1, K=3),
    "GraphConv": lambda f, g: gnn.GraphConv(f, g),
    "GraphConv, mean": lambda f, g: gnn.GraphConv(f, g, aggr="mean", bias=False),
}
DEGREE = {"TAGConv": 3, "TAGConv, without a norm": 2, "SGConv": 2, "SSGConv": 3, "GraphConv": 1, "GraphConv, mean": 1}
WIDTHS = (6, 4), (4, 6), (5, 5)


def step(model: nn.Module, data: Any, x: Any, weight: Any) -> Results:
    """One conv's output and gradients."""
    leaves = {name: t for name, t in (("x", x), ("weight", weight)) if t is not None and t.requires_grad}
    for leaf in (*leaves.values(), *model.parameters()):
        leaf.grad = None
    out = model(x, data.edge_index, *([] if weight is None else [weight]))
    (out.tanh() * (out.sigmoid() + 1)).square().mean().backward()
    return {"out": out.detach(), **gradients(model, **leaves)}


@on_ranks(1, 3)
def test_every_order_has_the_numbers_of_pyg() -> None:
    for narrows, widths in enumerate(WIDTHS):
        graph = random_graph(47, 310, widths[0], seed=1)
        data = pyg_dist.DistributedData(graph, partition=uneven_parts(47, pyg_dist.world_size()))
        for k, (name, make) in enumerate(CONVS.items()):
            if (k + narrows) % 3 == 2:  # two of three widths for each conv
                continue
            is_second = narrows == 2 or (narrows, k % 3) == (1, 0)
            torch.manual_seed(0)
            stock = make(*widths).double()
            ours = pyg_dist.distribute(copy.deepcopy(stock))
            for turn, kind in enumerate(("none", "constant", "learn")):
                if kind == "none" and isinstance(stock, gnn.SSGConv) and not stock.add_self_loops:
                    continue
                for x_turn, x_kind in enumerate(("attribute", "constant", "learns")):
                    if (turn + x_turn + is_second) % 2:  # every pair with one of the two
                        continue

                    def steps(model: Any, given: Any, kind: str = kind, x_kind: str = x_kind) -> list[Results]:
                        x, weight = given.x, None if kind == "none" else given.edge_weight
                        if x_kind != "attribute":
                            x = (x * 1).detach().requires_grad_(x_kind == "learns")
                        if kind == "learn":
                            weight = weight.detach().clone().requires_grad_()
                        return [step(model, given, x, weight) for _ in range(2)]

                    want = of_first_rank(partial(steps, stock, graph))
                    for mine, expected in zip(steps(ours, data), want, strict=True):
                        assert_same(mine, expected, f"{name}, {widths}, {kind}, {x_kind}")


def columns() -> dict[str, list[float]]:
    """The columns that this rank sends: an attribute three times, then changed; a tensor that learns."""
    sent = {}
    for widths in WIDTHS:
        graph = random_graph(47, 310, widths[0], seed=1)
        data = pyg_dist.DistributedData(graph, partition=uneven_parts(47, pyg_dist.world_size()))
        for name, make in CONVS.items():
            conv = pyg_dist.distribute(make(*widths).double())
            seen = sent[f"{name}, {widths}"] = []

            def run(x: Any, conv: nn.Module = conv, data: Any = data, seen: list[float] = seen) -> None:
                before = data.traffic.num_bytes
                out = conv(x, data.edge_index)
                out.to_local().sum().backward()
                seen.append((data.traffic.num_bytes - before) / 8 / data.plan.rows["hybrid"])

            conv(data.x, data.edge_index)  # builds the operator
            with torch.no_grad():
                data.x.mul_(0.5)
            for _ in range(2):
                run(data.x)
            for _ in range(2):
                run(data.x.detach().clone().requires_grad_())
    return sent


def test_hops_of_a_constant_are_made_once_and_the_narrow_side_travels(workers: Pools) -> None:
    ranks = workers(2).run(columns)
    for name in ranks[0]:
        seen = [sum(parts) for parts in zip(*(sent[name] for sent in ranks), strict=True)]
        conv, widths = name.rsplit(", (", 1)[0], [int(w) for w in name.rsplit("(", 1)[1][:-1].split(",")]
        hops = DEGREE[conv]
        assert seen == pytest.approx([hops * widths[0], 0, *[2 * hops * min(widths)] * 2]), name


def kept_bytes() -> dict[str, int]:
    """What is kept with an attribute, in rows like its own."""
    graph = random_graph(47, 310, 6, seed=1)
    found = {}
    for name, make in CONVS.items():
        data = pyg_dist.DistributedData(graph)
        conv = pyg_dist.distribute(make(6, 4).double())
        for _ in range(3):
            conv(data.x, data.edge_index).sum().backward()
        found[name] = sum(known.result.numel() for known in data.x._cached_aggregates) // data.x.to_local().numel()
    return found


def test_what_is_kept(workers: Pools) -> None:
    """The hops that derivatives need, and of a sum of hops the sum alone."""
    (found,) = workers(1).run(kept_bytes)
    assert found == {**DEGREE, "SGConv": 1, "SSGConv": 1}
