"""Attention and other softmax sums by the fused op: no tensor of edges and columns is made in training."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from random_graphs import random_graph
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import nn as gnn
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.conv import DistributedConv

F, NUM_EDGES, EDGE_DIM = 64, 40_000, 3
CONVS: dict[str, Callable[[int | None], Any]] = {
    "GAT": lambda edge_dim: gnn.GATConv(F, 16, heads=4, dropout=0.3, edge_dim=edge_dim),
    "GATv2": lambda edge_dim: gnn.GATv2Conv(F, 16, heads=4, dropout=0.3, edge_dim=edge_dim),
    "Transformer": lambda edge_dim: gnn.TransformerConv(F, 16, heads=4, dropout=0.3, edge_dim=edge_dim),
    "AGNN": lambda _: gnn.AGNNConv(),
    "General": lambda _: gnn.GeneralConv(F, 16, heads=4, attention=True),
}
WITH_EDGES = list(CONVS)[:3]  # the others take no edge_attr


class LargestPerEdge(TorchDispatchMode):
    """The most numbers a row of all tensors that are made with a row per edge, or more."""

    def __init__(self, num_edges: int) -> None:
        super().__init__()
        self.num_edges, self.largest = num_edges, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.numel() >= self.num_edges:
                self.largest = max(self.largest, tensor.numel() // self.num_edges)
        return out


def largest_per_edge(name: str, layout: dict[str, Any] | None, has_edges: bool, asks: bool) -> int:
    """Of a training step; without a layout, of the stock conv."""
    data = random_graph(20, NUM_EDGES, F, seed=5)
    conv = CONVS[name](EDGE_DIM if has_edges else None).double()
    num_edges = NUM_EDGES
    if layout is not None:
        data, conv = pyg_dist.DistributedData(data, **layout), DistributedConv(conv)
        num_edges //= pyg_dist.world_size()
    x = data.x.detach().clone().requires_grad_()
    given = [x, data.edge_index]
    if has_edges:
        given.append(data.edge_attr.detach().clone().requires_grad_())
    with LargestPerEdge(num_edges) as seen:
        if asks:
            out, (_, alpha) = conv(*given, return_attention_weights=True)
            loss = out.square().sum() + alpha.square().sum()
        else:
            loss = conv(*given).square().sum()
        loss.backward()
    return seen.largest


LAYOUTS = [(1, {}), (2, {"partition": "random"}), (2, {"layout": "grid", "mesh": {"x": 2}})]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS, ids=str)
@pytest.mark.parametrize("name", CONVS)
def test_no_tensor_of_edges_and_columns_is_made(
    workers: Pools, name: str, world_size: int, layout: dict[str, Any]
) -> None:
    """The ends of edges, what orders them and their features have a few numbers an edge; messages have 64.

    Weights have four. What they are made of is 64 numbers wide for 4096 edges at a time.
    """
    takes_both = name in WITH_EDGES
    for has_edges in (False, True)[: 1 + takes_both]:
        # each with both, over the layouts, which take turns by conv
        asks = takes_both and has_edges != ((layout == LAYOUTS[1][1]) ^ (list(CONVS).index(name) % 2 == 1))
        found = workers(world_size).run(largest_per_edge, name, layout, has_edges, asks)
        assert max(found) <= (14 if asks else 5 + EDGE_DIM * has_edges), (has_edges, asks)


def kept_bytes_and_numbers(name: str, layout: dict[str, Any], limit: str) -> tuple[int, list[Tensor]]:
    """What a conv with edge_attr keeps for its derivative, and its output, loss of weights and gradients."""
    data = pyg_dist.DistributedData(random_graph(60, 400, F, seed=5), **layout)
    torch.manual_seed(2)
    conv = DistributedConv(CONVS[name](EDGE_DIM).double())
    x, attr, sizes = data.x.clone().requires_grad_(), data.edge_attr.clone().requires_grad_(), {}

    def seen(kept: Tensor) -> Tensor:
        sizes[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return kept

    with patch.dict(os.environ, PYG_DIST_REMEMBER_MIB=limit):
        with torch.autograd.graph.saved_tensors_hooks(seen, lambda kept: kept):
            out = conv(x, data.edge_index, attr)
        (out.square().sum() / 7).backward()
    found = [out, x.grad, attr.grad, *(p.grad for p in conv.parameters())]
    return sum(sizes.values()), [t.to_local() if hasattr(t, "to_local") else t for t in found]


@on_ranks()
@pytest.mark.parametrize(("world_size", "layout"), [*LAYOUTS, (3, {"partition": "random"})], ids=str)
@pytest.mark.parametrize("name", WITH_EDGES)
def test_output_need_not_be_kept(name: str, layout: dict[str, Any]) -> None:
    """The derivative makes it again, with the same bits, where PYG_DIST_REMEMBER_MIB keeps none; never on the grid."""
    bytes_kept, kept = kept_bytes_and_numbers(name, layout, "inf")
    bytes_again, again = kept_bytes_and_numbers(name, layout, "0")
    for one, other in zip(kept, again, strict=True):
        assert torch.equal(one, other)
    output = 0 if layout.get("layout") == "grid" else kept[0].numel() * 8
    assert bytes_kept - bytes_again == output  # of the sums of edge_attr nothing: what multiplies them keeps them


@pytest.mark.parametrize("name", CONVS)
def test_stock_convs_make_them(workers: Pools, name: str) -> None:
    assert workers(1).run(largest_per_edge, name, None, False, False)[0] >= 32
