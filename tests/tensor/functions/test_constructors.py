"""Constructors that copy a tensor get all of its rows, and are torch's own again when the last rows are gone."""

from __future__ import annotations

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
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor import RowTensor

CONSTRUCTORS: dict[str, Callable[[Any], Any]] = {
    "tensor": lambda x: torch.tensor(x),
    "tensor by name": lambda x: torch.tensor(data=x, dtype=torch.float32),
    "as_tensor": lambda x: torch.as_tensor(x, dtype=torch.float32),
    "asarray": lambda x: torch.asarray(x, dtype=torch.float16),
    "asarray, a copy": lambda x: torch.asarray(obj=x, copy=True),
    "np.asarray": lambda x: torch.from_numpy(np.asarray(x)),
    "np.array": lambda x: torch.from_numpy(np.array(x, dtype=np.float32)),
    "numpy's function": lambda x: torch.from_numpy(np.bincount(x[:, 0].abs().long())),
    "a slice": lambda x: torch.tensor(x[1:4]),
    "new_tensor": lambda x: torch.ones(1, dtype=torch.float16).new_tensor(x),
    "new_tensor by name": lambda x: x.new_tensor(data=x[:, 0]),
    "sparse_csr_tensor": lambda x: torch.sparse_csr_tensor(*compressed(x), size=(len(x), 3)).to_dense(),
    "sparse_csc_tensor": lambda x: torch.sparse_csc_tensor(*compressed(x), size=(3, len(x))).to_dense(),
    "sparse_compressed_tensor": lambda x: torch.sparse_compressed_tensor(
        *compressed(x)[:2], values=x[:, 0], layout=torch.sparse_csr
    ).to_dense(),
    "a mask's rows": lambda x: torch.as_tensor(x[x[:, 0] > 0], dtype=torch.float32),
}

LongTensor = torch.LongTensor


def compressed(x: Any) -> tuple[Tensor, Any, Any]:
    """A sparse matrix with a value in each row, in columns by sign."""
    return torch.arange(len(x) + 1), (x[:, 0] > 0).long(), x[:, 0]


class Sub(Tensor):
    """Another library's."""


TYPES: dict[str, Callable[[Any], Any]] = {
    "Tensor": lambda x: torch.Tensor(x.float()),
    "FloatTensor": lambda x: torch.FloatTensor(x.float()),
    "BoolTensor": lambda x: torch.BoolTensor(x > 0),
    "a slice": lambda x: torch.Tensor(x[1:4]),
    "new": lambda x: torch.zeros(0).new(x.float()),
    "a name of the script's": lambda x: LongTensor(x.long()),
    "an argument": lambda x: (lambda kind: kind(x.long()))(LongTensor),
    "a subclass": lambda x: Sub(x.float()).as_subclass(Tensor),
    "of a list": lambda x: torch.LongTensor(*[x.long()]),
}


class Named:
    """Asks for classes beside such a constructor."""

    def asks(self, x: Any) -> tuple[bool, ...]:
        plain = torch.Tensor([1.0])
        assert plain.pow(x.abs()).shape == plain.mul(x).shape == x.shape  # these ask for a number first
        kinds: list[type] = [int, np.ndarray, torch.nn.Parameter, torch.storage.UntypedStorage]
        asked = [isinstance(x, kind) for kind in kinds] + [
            isinstance(x, (list, tuple)),
            callable(x),
            isinstance(plain, list),
        ]
        return (*asked, x.__class__ is type(x), isinstance(x, x.__class__), issubclass(x.__class__, Tensor))


@on_ranks(1, 2)
def test_types_refuse_a_part_of_the_rows() -> None:
    """They refuse where a rank has a part of the rows, wherever the name is from; questions about a class do not."""
    rows, plain = Operands("tall", True).x.detach(), Operands("tall", False).x.detach()
    for name, constructor in TYPES.items():
        expected = constructor(plain)
        if pyg_dist.world_size() == 1:
            found = constructor(rows)
            assert type(found) is Tensor, name
            assert torch.equal(found, expected), name
            continue
        with pytest.raises(MixedRowsError, match=r"would read this rank's rows of a \w+: write torch\.tensor\(x\)"):
            constructor(rows)
    assert Named().asks(rows) == (*[False] * 7, True, True, True)


@on_ranks(*WORLD_SIZES)
def test_all_rows() -> None:
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


@on_ranks(2)
def test_gradients() -> None:
    """A conversion is part of the graph, as in torch."""
    grads = []
    for is_distributed in (True, False):
        x = Operands("tall", is_distributed).x.detach().requires_grad_()
        (torch.as_tensor(x, dtype=torch.float32) * torch.arange(7).view(-1, 1)).square().sum().backward()
        assert x.grad is not None
        grads.append(x.grad.full_tensor() if isinstance(x.grad, RowTensor) else x.grad)
    torch.testing.assert_close(*grads)


@on_ranks(1)
def test_sums_of_gradients_in_place() -> None:
    """A sum of gradients is added to in place where torch adds in place: no tensor is made for it."""
    a = Operands("tall", True).x.detach().requires_grad_()
    x = a * 2
    loss = sum((x.as_subclass(Tensor) * factor).square().sum() for factor in (1.0, 2.0, 3.0))
    with torch.profiler.profile() as profile:
        loss.backward()
    functions = {event.key for event in profile.key_averages()}
    assert "aten::add_" in functions
    assert "aten::add" not in functions


def class_weights(partition: str) -> tuple[float, float]:
    """A loss with weights by the classes' sizes, as many scripts compute it: ours and stock's."""
    graph = random_graph(40, 160, seed=2)
    graph.y = (torch.arange(40) ** 2) % 7
    graph.out = torch.randn(40, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses = []
    for data in (pyg_dist.DistributedData(graph, partition=partition), graph):
        for y in (torch.tensor(data.y), torch.asarray(data.y, copy=True), torch.as_tensor(data.y, dtype=torch.int32)):
            weight = 1 / torch.bincount(y, minlength=7).clamp(min=1).double()
            losses.append(F.cross_entropy(data.out, data.y, weight=weight).item())
    assert losses[0] == losses[1] == losses[2]
    assert losses[3] == losses[4] == losses[5]
    return losses[0], losses[3]


@pytest.mark.parametrize("partition", ["metis", "random"])
@pytest.mark.parametrize("world_size", [3])
def test_class_weights(workers: Pools, world_size: int, partition: str) -> None:
    for ours, stock in workers(world_size).run(class_weights, partition):
        assert ours == pytest.approx(stock, rel=1e-12)
