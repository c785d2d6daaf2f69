"""Other convs whose sums the op of attention makes: stock PyG's numbers, and PyG's steps where a form does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from against_stock import Results, assert_same, gradients, meshes, of_first_rank
from random_graphs import random_graph, uneven_parts
from torch import nn
from torch_geometric import nn as gnn
from workers import on_ranks

import pyg_dist
from pyg_dist.conv import DistributedConv
from pyg_dist.grid.graph import GridGraph
from pyg_dist.halo.graph import HaloGraph

F, C = 5, 4
ON_THE_GRID: dict[str, Callable[[], Any]] = {
    "AGNNConv": lambda: gnn.AGNNConv(),
    "AGNNConv, fixed": lambda: gnn.AGNNConv(requires_grad=False, add_self_loops=False),
}
OTHERS: dict[str, Callable[[], Any]] = {  # of GeneralConv, some options alone
    "General": lambda: gnn.GeneralConv(F, C, attention=True),
    "General, heads": lambda: gnn.GeneralConv(
        (F, F), C, heads=3, attention=True, skip_linear=True, l2_normalize=True, bias=False
    ),
}
BY_STEPS: dict[str, Callable[[], Any]] = {
    "General, edges": lambda: gnn.GeneralConv(F, C, 3, attention=True),
    "General, dot product": lambda: gnn.GeneralConv(F, C, attention=True, attention_type="dot_product"),
    "General, both ends": lambda: gnn.GeneralConv(F, C, attention=True, directed_msg=False),
    "General, mean": lambda: gnn.GeneralConv(F, C, attention=True, aggr="mean"),
    "General, no attention": lambda: gnn.GeneralConv(F, C),
    "AGNNConv, mean": lambda: gnn.AGNNConv(aggr="mean"),
}


def results(conv: Any, data: Any, is_pair: bool, twice: bool) -> Results:
    x = data.x.detach().clone().requires_grad_()
    given = [(x, x.tanh()) if is_pair else x, data.edge_index]
    if getattr(conv, "in_edge_channels", None):
        given.append(data.edge_attr)
    out = conv(*given)
    score = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64).view(out.shape)
    loss = (out * score + 0.1 * out.square()).sum()
    if twice:
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        loss = slope.square().sum()
    loss.backward()
    return {"out": out, **gradients(conv, x=x)}


@on_ranks(1, 3)
def test_equals_stock(num_ranks: int) -> None:
    plain = random_graph(40, 300, F, seed=5)
    layouts: list[dict[str, Any]] = [{"layout": "grid", "mesh": mesh} for mesh in meshes(num_ranks)]
    of_stock: dict[str, Results] = {}
    for place, layout in enumerate(({"partition": uneven_parts(40, num_ranks)}, *layouts)):
        data = pyg_dist.DistributedData(copy.copy(plain), **layout)
        kind: Any = GridGraph if "mesh" in layout else HaloGraph
        for number, (name, make) in enumerate((ON_THE_GRID | OTHERS | BY_STEPS).items()):
            if place and (number + place) % 2:  # of the meshes, every second conv
                continue
            torch.manual_seed(0)
            stock = make().double()
            if name == "AGNNConv":
                nn.init.constant_(stock.beta, 1.7)
            is_pair, twice = isinstance(getattr(stock, "in_channels", 0), tuple), name in ("AGNNConv", "General")
            if name not in of_stock:
                of_stock[name] = of_first_rank(partial(results, copy.deepcopy(stock), plain, is_pair, twice))
            with patch.object(kind, "attend", autospec=True, side_effect=kind.attend) as seen:
                got = results(DistributedConv(stock), data, is_pair, twice)
            assert_same(got, of_stock[name], f"{name} {layout}")
            assert seen.called == (name not in BY_STEPS), name
