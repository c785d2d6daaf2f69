"""A training epoch on large tensors: the bits of stock PyG on one rank, in memory that is used again."""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.utils import coalesce
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import conv as ours
from pyg_dist.backend.ops import memory
from pyg_dist.conv import DistributedSAGEConv

NUM_NODES, WIDTH = 9_000, 240
BLOCK = 10 << 20  # bytes behind NUM_NODES x WIDTH numbers in float32, in whole huge pages


class ThreeLayers(torch.nn.Module):
    def __init__(self, conv: Any, width: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList(conv(width, out) for out in (width, width, num_classes))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=False):
            x = F.dropout(norm(conv(x, edge_index)).relu(), self.dropout)
        return self.convs[-1](x, edge_index)  # type: ignore[no-any-return]


def graph(num_nodes: int, width: int) -> Data:
    torch.manual_seed(0)
    edge_index = coalesce(torch.randint(0, num_nodes, (2, 12 * num_nodes)))
    y, mask = torch.randint(0, 16, (num_nodes,)), torch.rand(num_nodes) < 0.98
    return Data(x=torch.randn(num_nodes, width), edge_index=edge_index, y=y, train_mask=mask)


def loss_of(model: torch.nn.Module, data: Any) -> Tensor:
    return F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])


def gradients(data: Any, conv: Any, num_classes: int = WIDTH) -> list[Tensor]:
    """Loss and gradients of the second epoch."""
    torch.manual_seed(0)
    model = ThreeLayers(conv, data.num_features, num_classes, dropout=0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = loss_of(model, data)
        loss.backward()
        optimizer.step()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@on_ranks(1)
def test_an_epoch_has_the_bits_of_stock_pyg() -> None:
    data = graph(NUM_NODES, WIDTH)
    expected = gradients(data, SAGEConv)
    for got, want in zip(gradients(pyg_dist.DistributedData(data), DistributedSAGEConv), expected, strict=True):
        assert_same_bits(got, want)


@patch.dict(os.environ)  # what is set ends with the body
def largest_blocks(project_first: str) -> int:
    """How many large tensors an epoch has at once: after an epoch the pool holds as many."""
    data = pyg_dist.DistributedData(graph(NUM_NODES, WIDTH))
    os.environ["PYG_DIST_PROJECT_FIRST"] = project_first
    os.environ["PYG_DIST_SPMM_FORM"] = "blocks"  # with the other form it may be one more
    model = ThreeLayers(DistributedSAGEConv, WIDTH, 16, dropout=0.5)
    for _ in range(2):  # the first remembers sums
        memory.release_free_memory()
        loss_of(model, data).backward()
    return sum(memory.block_bytes()) // BLOCK


@pytest.mark.skipif(not memory.has_pool(), reason="Linux and torch 2.11")
def test_large_tensors_of_an_epoch(workers: Pools) -> None:
    # Remembered sums of x; of both hidden layers what the norm reads; of the first its output, too, and that output's
    # sums. Beside these, forward, what goes into and comes out of the second ReLU; backward, two gradients by the
    # second's output, which itself is gone by then.
    assert workers(1).run(largest_blocks, "") == [7]
    assert workers(1).run(largest_blocks, "1") == [6]  # without the sums


@on_ranks(1, 3)
@pytest.mark.parametrize("conv", ["sage", "gcn"])
@patch.dict(os.environ)  # what is set ends with the body
def test_the_order_changes_no_gradient(conv: str) -> None:
    data = graph(500, 24)
    stock, distributed = (SAGEConv, ours.DistributedSAGEConv) if conv == "sage" else (GCNConv, ours.DistributedGCNConv)
    expected = gradients(data, stock, 16)
    distributed_data = pyg_dist.DistributedData(data)
    for setting in ("", "1"):
        os.environ["PYG_DIST_PROJECT_FIRST"] = setting
        for got, want in zip(gradients(distributed_data, distributed, 16), expected, strict=True):
            assert float((got - want).abs().max()) <= 1e-4 * float(want.abs().max()) + 1e-5
