"""Constructors that copy a tensor get all of its rows, and are torch's own again when the last rows are gone."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from against_torch import WORLD_SIZES, Operands
from random_graphs import random_graph
from torch import Tensor
from workers import Workers

from pyg_dist.tensor import RowTensor, constructors

Pools = Callable[[int], Workers]

CONSTRUCTORS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda x: torch.tensor(x),
    "tensor by name": lambda x: torch.tensor(data=x, dtype=torch.float32),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float32),
    "asarray": lambda x: torch.asarray(x, dtype=torch.float16),
    "Tensor": lambda x: torch.Tensor(x.float()),
    "FloatTensor": lambda x: torch.FloatTensor(x.float()),
    "LongTensor": lambda x: torch.LongTensor(x.long()),
    "BoolTensor": lambda x: torch.BoolTensor(x > 0),
    "new": lambda x: torch.zeros(0).new(x.float()),
    "np.asarray": lambda x: torch.from_numpy(np.asarray(x)),
    "np.array": lambda x: torch.from_numpy(np.array(x, dtype=np.float32)),
    "numpy's function": lambda x: torch.from_numpy(np.bincount(x[:, 0].abs().long())),
    "a slice": lambda x: torch.tensor(x[1:4]),
    "a mask's rows": lambda x: torch.as_tensor(x[x[:, 0] > 0], dtype=torch.float32),
}


def construct() -> None:
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        rows, plain = Operands("tall", True).x.detach(), Operands("tall", False).x.detach()
        for name, constructor in CONSTRUCTORS.items():
            with mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch advises against torch.tensor(x)
                expected, found = constructor(plain), constructor(rows)
            assert type(found) is Tensor, name
            assert found.dtype == expected.dtype, name
            assert torch.equal(found, expected), name
        assert torch.as_tensor(rows) is torch.asarray(rows) is rows


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_all_rows(workers: Pools, world_size: int) -> None:
    workers(world_size).run(construct)


def differentiate() -> None:
    """``torch.Tensor(x)`` and a conversion are part of the graph, as in torch."""
    for constructor in (torch.DoubleTensor, lambda x: torch.as_tensor(x, dtype=torch.float32)):
        grads = []
        for is_distributed in (True, False):
            x = Operands("tall", is_distributed).x.detach().requires_grad_()
            (constructor(x) * torch.arange(7).view(-1, 1)).square().sum().backward()
            assert x.grad is not None
            grads.append(x.grad.full_tensor() if isinstance(x.grad, RowTensor) else x.grad)
        torch.testing.assert_close(*grads)


def test_gradients(workers: Pools) -> None:
    workers(2).run(differentiate)


def sum_gradients() -> None:
    """A sum of gradients is added to in place where torch adds in place: no tensor is made for it."""
    a = Operands("tall", True).x.detach().requires_grad_()
    x = a * 2
    loss = sum((x.as_subclass(Tensor) * factor).square().sum() for factor in (1.0, 2.0, 3.0))
    with torch.profiler.profile() as profile:
        loss.backward()
    functions = {event.key for event in profile.key_averages()}
    assert "aten::add_" in functions
    assert "aten::add" not in functions


def test_sums_of_gradients_in_place(workers: Pools) -> None:
    workers(1).run(sum_gradients)


def class_weights(partition: str) -> tuple[float, float]:
    """A loss with weights by the classes' sizes, as many scripts compute it: ours and stock's."""
    import pyg_dist

    graph = random_graph(40, 160, seed=2)
    graph.y = (torch.arange(40) ** 2) % 7
    graph.out = torch.randn(40, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = []
    for data in (pyg_dist.DistributedData(graph, partition=partition), graph):
        for y in (torch.tensor(data.y), torch.LongTensor(data.y), torch.as_tensor(data.y, dtype=torch.int32)):
            weight = 1 / torch.bincount(y, minlength=7).clamp(min=1).double()
            losses.append(F.cross_entropy(data.out, data.y, weight=weight).item())
    assert losses[0] == losses[1] == losses[2]
    assert losses[3] == losses[4] == losses[5]
    return losses[0], losses[3]


@pytest.mark.parametrize("partition", ["metis", "random"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_class_weights(workers: Pools, world_size: int, partition: str) -> None:
    for ours, stock in workers(world_size).run(class_weights, partition):
        assert ours == pytest.approx(stock, rel=1e-12)


def scripted(x: Tensor) -> Tensor:
    return x + torch.tensor(2.0)


def plain_tensors() -> None:
    """While distributed rows are, and after."""
    import pyg_dist

    gc.collect()
    assert torch.tensor is constructors._tensor
    rows = pyg_dist.DistributedData(random_graph(20, 60)).x
    assert torch.tensor is not constructors._tensor
    x = torch.arange(6.0).view(2, 3).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert torch.equal(torch.tensor(x), x)
        assert torch.jit.script(scripted)(torch.ones(1)) == 3
    assert torch.equal(torch.compile(scripted, backend="eager")(torch.ones(1)), torch.full((1,), 3.0))
    with torch.device("meta"):
        assert torch.tensor(1.0).is_meta
    (torch.Tensor(x).square().sum() + x[...].sum() + x.to("cpu", torch.float64).sum()).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach() + 2)
    assert x.detach().t()[...].stride() == (1, 3)
    assert x.to("cpu", torch.float32) is x
    sparse = torch.eye(3).to_sparse().requires_grad_()
    (sparse[...].to("cpu", torch.float64).to_dense() * 3).sum().backward()
    assert sparse.grad is not None
    assert torch.equal(sparse.grad.to_dense(), 3 * torch.eye(3))
    view = torch.Tensor(x.detach())
    view[0, 0] = 9
    assert x[0, 0] == 9
    del rows
    gc.collect()
    assert torch.tensor is constructors._tensor
    assert torch.equal(torch.Tensor(x.detach())[...], x.detach())


def test_plain_tensors_are_as_without() -> None:
    pool = Workers(1)  # a process of its own, in which no other test has left rows
    try:
        pool.run(plain_tensors)
    finally:
        pool.close()
