"""Rows written into plain tensors, or added to rows: sums by class, PyG's ``scatter`` and ``one_hot``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch_geometric.utils as pyg
from against_torch import WORLD_SIZES, Expression, Form, Operands, agree, check, each, every_layout, ranks_and_names
from torch import Tensor
from torch_geometric.nn import global_max_pool, global_mean_pool
from workers import on_ranks

from pyg_dist.errors import LayoutMismatchError
from pyg_dist.tensor.row_tensor import RowTensor

CLASSES = 9


def zeros(t: Operands, *columns: int) -> Tensor:
    return torch.zeros(CLASSES, *columns).to(t.x.dtype)


def assigned(t: Operands, index: Any) -> Tensor:
    plain = t.full.detach().clone()
    plain[index] = 0.5
    return plain + t.x


def centroids(t: Operands) -> Tensor:
    return pyg.scatter(t.x, t.label, dim=0, dim_size=CLASSES, reduce="mean")


def column(t: Operands) -> Tensor:
    return t.label.view(-1, 1).expand(-1, t.F)


def bins(t: Operands) -> Tensor:
    """What is written into, plain, some of it larger than all that comes and some equal to the largest."""
    return (2 * t.weight[:1].sin() - 1).expand(CLASSES, -1).clone()


def ties(t: Operands) -> Tensor:
    return (4 * t.x.detach()).round().clamp(-1, 1) + 0 * t.x


ADDED: list[Form] = [lambda f, t: f(t.x, 1, t.order, t.y), lambda f, t: f(t.c, 2, t.d.argsort(2), t.d)]
REDUCED: list[Form] = [
    lambda f, t: f(t.x, 1, t.order, t.y, "sum"),
    lambda f, t: f(t.x, 1, t.order, t.y, reduce="amax", include_self=False),
    *(
        lambda f, t, reduce=reduce, is_in=is_in: f(bins(t), 0, column(t), t.x, reduce, include_self=is_in)
        for reduce in ("sum", "mean", "amax", "amin", "prod")
        for is_in in (True, False)
    ),
    *(
        lambda f, t, is_in=is_in: f(zeros(t, t.F), 0, column(t), ties(t), "amax", include_self=is_in)
        for is_in in (True, False)
    ),
    lambda f, t: f(t.x * 0.1, 0, t.order % 3, t.y, "amax"),
    lambda f, t: f(t.x, 0, t.order % 3, t.y, "mean", include_self=False),
]
FORMS: dict[str, Sequence[Form]] = {
    **each("scatter_add scatter_add_", [*ADDED, lambda f, t: f(bins(t), 0, column(t), t.x)]),
    **each("scatter scatter_", [
        *ADDED, lambda f, t: f(t.x, 1, t.label.view(-1, 1), 2.0), lambda f, t: f(bins(t), 0, column(t), 0.5),
    ]),
    **each("scatter_reduce scatter_reduce_", REDUCED),
    **each("index_add index_add_", [
        lambda f, t: f(bins(t), 0, t.label, t.x, alpha=0.5), lambda f, t: f(t.x, 1, torch.tensor([0, 0]), t.y[:, :2]),
    ]),
    **each("index_reduce index_reduce_", [
        lambda f, t: f(bins(t), 0, t.label, t.x, "amin"), lambda f, t: f(t.x, 0, t.position, t.y, "mean"),
        lambda f, t: f(bins(t), 0, t.label, t.x, reduce="amax", include_self=False),
        lambda f, t: f(t.x, 1, torch.tensor([0, 0]), t.y[:, :2], "amax"),
    ]),
}  # fmt: skip


@on_ranks(WORLD_SIZES[-1])
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str) -> None:
    agree(name, FORMS[name])


def narrow(index: Tensor) -> Tensor:
    """In int32, but for torch, which gathers by an expanded index of 32 bits wrongly, as gradients of PyG's sums do."""
    return index.int() if isinstance(index, RowTensor) else index


EXPRESSIONS: dict[str, Expression] = {
    "of plain rows": lambda t: zeros(t, t.F).scatter_add_(0, column(t), t.full),
    "counts": lambda t: zeros(t).scatter_add_(0, t.label, torch.ones(t.N).to(t.x.dtype)) * t.v.sum(),
    "into columns": lambda t: t.full.scatter(1, t.order, t.y),
    "index_add": lambda t: zeros(t, t.F).index_add_(0, t.label, t.x, alpha=0.5),
    "index_add of 32-bit positions": lambda t: zeros(t, t.F).index_add_(0, t.label.int(), t.x).sin(),
    "index_add of a plain list": lambda t: t.full.index_add(0, torch.arange(t.N).flip(0), t.x),
    "index_add to rows": lambda t: t.x.sin().index_add_(0, t.position, t.y) * t.x.index_add(0, t.label, t.y, alpha=2),
    "index_add of plain rows to rows": lambda t: t.x.index_add(0, torch.tensor([2, 0, 2]), t.full[:3]),
    "index_add to a selection": lambda t: t.x[t.mask].index_add(0, torch.tensor([1, 1]), t.y[[2, 0]]),
    "scatter_add to rows": lambda t: torch.zeros_like(t.x).scatter_add_(0, t.position.view(-1, 1).expand(-1, t.F), t.y),
    "scatter_reduce to rows": lambda t: t.x.scatter_reduce(0, t.order % 3, t.y, "sum"),
    "largest of a column": lambda t: torch.zeros_like(t.x).scatter_(0, t.y.topk(3, dim=0).indices, 1.0) * t.x,
    "scatter to rows": lambda t: t.x.scatter(0, t.position.view(-1, 1).expand(-1, t.F), t.y),
    "scatter of plain rows to rows": lambda t: t.x.scatter(0, torch.tensor([[1, 0], [2, 2]]), t.full[:2, :2]),
    "products to rows": lambda t: t.x.scatter_reduce(0, t.order % 3, t.y, "prod"),
    "index_add of columns": lambda t: t.x.index_add(1, torch.tensor([0, 0]), t.y[:, :2], alpha=2),
    "PyG's sum": lambda t: pyg.scatter(t.x, t.label, dim=0, dim_size=CLASSES),
    "PyG's sum by 32-bit positions": lambda t: pyg.scatter(t.x, narrow(t.label), dim=0, dim_size=CLASSES).sin(),
    "PyG's mean of some": lambda t: pyg.scatter(t.x[t.mask], t.label[t.mask], dim=0, dim_size=CLASSES, reduce="mean"),
    "PyG's max": lambda t: pyg.scatter(t.x, t.label, dim=0, dim_size=CLASSES, reduce="max"),
    "one_hot": lambda t: pyg.one_hot(t.label, CLASSES) @ torch.ones(CLASSES, 2) * t.x[:, :1],
    "pools": lambda t: global_mean_pool(t.x, t.label, CLASSES) - global_max_pool(t.x, t.label, CLASSES),
    "assigned by a mask": lambda t: assigned(t, t.mask),
    "assigned by two": lambda t: assigned(t, (t.mask, 0)),
    "centroids": lambda t: (t.x - centroids(t)[t.label]).square().sum(),
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(EXPRESSIONS))
def test_writes(name: str) -> None:
    for layout in every_layout():
        check(EXPRESSIONS[name], layout, name)


@on_ranks(1, 2)
def test_an_index_of_another_length() -> None:
    t = Operands("tall", True)
    for length in (t.N - 1, t.N + 1):
        with pytest.raises(LayoutMismatchError, match=f"expected a plain operand with {t.N} rows"):
            zeros(t, t.F).index_add_(0, torch.zeros(length, dtype=torch.int64), t.x)
