"""Quantized messages are unbiased: ten thousand draws of outputs and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_graphs import random_graph
from torch import Tensor, nn
from workers import on_ranks

from pyg_dist import DistributedData, distribute, rank, world_size

NUM_COPIES, NUM_STEPS = 100, 100


class Linear(nn.Module):
    """Two layers without anything between them: exact in expectation if each of their messages is."""

    def __init__(self, kind: str) -> None:
        from torch_geometric import nn as gnn

        super().__init__()
        make = {"sage": gnn.SAGEConv, "gcn": gnn.GCNConv, "graph": gnn.GraphConv}
        self.is_weighted, self.is_attention = kind == "graph", kind == "gat"
        if self.is_attention:  # rows travel in few bits, and logits as they are, so that their softmax is exact
            self.convs = nn.ModuleList([gnn.GATConv(7, 16, heads=2)])
        else:
            self.convs = nn.ModuleList(make[kind](*sizes) for sizes in ((7, 17), (17, 5)))
        distribute(self)

    def forward(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x, edge_index, edge_weight) if self.is_weighted else conv(x, edge_index)
        return x


@on_ranks(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "kind"), [*[("hybrid", "sage"), ("pre", "gcn"), ("post", "gcn"), ("hybrid", "gat")]]
)
def test_unbiased_outputs_and_gradients(exchange: str, kind: str) -> None:
    """10,000 draws of outputs and gradients: their mean is exact within its standard error.

    A hundred copies of a small graph, which round independently, in a hundred steps; parameters get the sum of the
    copies' gradients in each.
    """
    from torch_geometric.data import Data

    one = random_graph(10, 45, num_features=7, seed=3)
    first = 10 * torch.arange(NUM_COPIES)
    edge_index = (one.edge_index[:, None] + first[:, None]).reshape(2, -1)
    weight = torch.linspace(0.5, 1.5, one.num_edges).double().repeat(NUM_COPIES)
    data = Data(x=one.x.repeat(NUM_COPIES, 1), edge_index=edge_index, edge_weight=weight)
    partition = torch.arange(10).mul(world_size()).div(10, rounding_mode="floor").repeat(NUM_COPIES)
    coarse, exact = (
        DistributedData(data.clone(), partition=partition, exchange=exchange, bits=bits) for bits in (2, 32)
    )
    torch.manual_seed(1)
    model = Linear(kind).double()
    factor = torch.randn(10, model(exact.x, exact.edge_index, exact.edge_weight).shape[1]).double()
    order = torch.argsort(exact.graph.node_sharding.global_id)
    here = exact.graph.node_sharding.global_id[order]

    def run(data: Any) -> list[Tensor]:
        """This rank's outputs and gradients by x, a row per copy, and the parameters' gradients, one row."""
        model.zero_grad()
        x = (data.x * 1.0).requires_grad_()
        x.retain_grad()
        out = model(x, data.edge_index, data.edge_weight)
        (out.to_local()[order] * factor[here % 10]).sum().backward()
        rows = [t.to_local()[order].view(NUM_COPIES, -1) for t in (out.detach(), x.grad)]
        return [*rows, *(p.grad.clone().view(1, -1) for p in model.parameters())]

    draws = [torch.cat(drawn) for drawn in zip(*(run(coarse) for _ in range(NUM_STEPS)), strict=True)]
    assert [len(drawn) for drawn in draws[:2]] == [10_000, 10_000]
    for k, (drawn, want) in enumerate(zip(draws, run(exact), strict=True)):
        error, spread = (drawn.mean(0) - want[0]).abs(), drawn.std(0) / len(drawn) ** 0.5
        # A value close to a step is rarely rounded away from it, perhaps in none of the draws.
        z = error / spread.clamp(min=0.05 * float(spread.max()) + 1e-9)
        assert float(z.max()) <= 5, (kind, rank(), float(z.max()))
        # The entries of a parameter's gradient go up and down together: few of them are independent.
        assert float(z.square().mean()) <= (2 if k < 2 else 5), (kind, rank(), float(z.square().mean()))
    assert min(float(drawn.std(0).max()) for drawn in draws[:2]) > 0.01
    assert sum(float(drawn.std(0).max()) > 0.01 for drawn in draws[2:]) >= 2
