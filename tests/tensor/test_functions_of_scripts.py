"""Backward hooks of modules, and a script's own ``autograd.Function``, on graphs whose nodes the grid reorders."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same, gradients, meshes
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric import nn as gnn
from workers import Pools

import pyg_dist


class Reverse(torch.autograd.Function):
    """Of gradients, as in domain adaptation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


class Same(Reverse):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x


class Rounded(Reverse):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8


class Summed(Reverse):
    """Along rows, which tiles have to meet for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.cumsum(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.flip(1).cumsum(1).flip(1)


class Mapped(Reverse):
    """By a symmetric matrix: the product of a tile lies elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x @ torch.ones(8, 8, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad @ torch.ones(8, 8, dtype=grad.dtype)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.second = gnn.GCNConv(6, 8), nn.Linear(8, 8), gnn.SAGEConv(8, 4)

    def forward(self, x: Tensor, edge_index: Any, function: Any) -> Tensor:
        h = self.conv(x, edge_index).tanh()
        h = self.linear(h if function is None else function.apply(h)).tanh()
        return self.second(h, edge_index)  # type: ignore[no-any-return]


def step(data: Any, model: nn.Module, function: Any, hooked: str) -> Results:
    seen: list[str] = []
    for name in hooked.split():
        module = model.get_submodule(name)
        module.register_full_backward_hook(lambda module, by_input, by_output, name=name: seen.append(name))  # type: ignore[misc]
        module.register_full_backward_pre_hook(lambda module, by_output: None)
    x = data.x.detach().clone().requires_grad_()
    loss = F.cross_entropy(model(x, data.edge_index, function), data.y)
    loss.backward()
    assert sorted(seen) == sorted(hooked.split())
    return {"loss": loss.detach(), **gradients(model, x=x)}


def compare(mesh: dict[str, int] | None) -> None:
    data = random_graph(61, 420, 6, seed=5)
    if mesh is None:
        ours = pyg_dist.DistributedData(data, partition=uneven_parts(61, pyg_dist.world_size()))
    else:
        ours = pyg_dist.DistributedData(data, layout="grid", mesh=mesh)
    torch.manual_seed(0)
    made = Model().double()
    of = lambda: pyg_dist.distribute(copy.deepcopy(made))  # noqa: E731
    for hooked in ("", "linear", "conv", "second", "conv linear second"):
        got, want = step(ours, of(), None, hooked), step(data, copy.deepcopy(made), None, hooked)
        assert_same(got, want, f"hooks on {hooked or 'nothing'}")
    for function in (Reverse, Same, Rounded, Summed, Mapped):
        expected = step(data, copy.deepcopy(made), function, "")
        assert_same(step(ours, of(), function, ""), expected, function.__name__)


@pytest.mark.parametrize("world_size", [1, 3])
def test_on_the_halo_layout(workers: Pools, world_size: int) -> None:
    workers(world_size).run(compare, None)


@pytest.mark.parametrize("mesh", meshes(4)[::4], ids=str)
def test_on_the_grid(workers: Pools, mesh: dict[str, int]) -> None:
    world_size = 1
    for size in mesh.values():
        world_size *= size
    workers(world_size).run(compare, mesh)
