"""Assignment to rows and within rows: values, and the gradients of what was assigned and of what was left."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from against_torch import WORLD_SIZES, Operands, Refusal, check, every_layout, refuse_all
from workers import on_ranks

from pyg_dist.errors import DataError, LayoutMismatchError, MixedRowsError

ASSIGNMENTS: list[Callable[[Operands, Any], None]] = [
    lambda t, x: x.__setitem__(t.mask, 2.0),
    lambda t, x: x.__setitem__(t.mask, t.vector),
    lambda t, x: x.__setitem__(t.mask, t.scalar),
    lambda t, x: x.__setitem__(t.mask, t.y[t.mask]),
    lambda t, x: x.__setitem__(~t.mask, t.full[: int((~t.mask).sum())]),
    lambda t, x: x.__setitem__([3, 0], t.row),
    lambda t, x: x.__setitem__([3, 0], t.full[:2]),
    lambda t, x: x.__setitem__([3, 0], t.y[[3, 0]]),
    lambda t, x: x.__setitem__(torch.tensor([-1]), 0.0),
    lambda t, x: x.__setitem__(slice(1, 3), t.full[1:3]),
    lambda t, x: x.__setitem__(slice(None), t.full),
    lambda t, x: x.__setitem__(slice(None), t.y),
    lambda t, x: x.__setitem__(Ellipsis, 1.0),
    lambda t, x: x.__setitem__(2, t.vector),
    lambda t, x: x.__setitem__(2, 5.0),
    lambda t, x: x.__setitem__((2, 1), t.scalar),
    lambda t, x: x.__setitem__((slice(None), 0), t.v),
    lambda t, x: x.__setitem__((slice(None), 0), t.full_v),
    lambda t, x: x.__setitem__((slice(None), [0, 2]), t.y[:, :2]),
    lambda t, x: x.__setitem__((t.mask, 0), t.v[t.mask]),
    lambda t, x: x.__setitem__((t.mask, slice(1, None)), t.scalar),
    lambda t, x: x.__setitem__((Ellipsis, 0), 7.0),
    lambda t, x: x.__setitem__(([3, 0, 2], [0, 2, 1]), t.full_v[:3]),
    lambda t, x: x.__setitem__((torch.arange(t.N), t.label), t.v),
    lambda t, x: x.__setitem__((t.mask, t.label[t.mask]), t.scalar),
    lambda t, x: x.__setitem__(([], []), 3.0),
    lambda t, x: x.__setitem__(t.m, -1.0),
    lambda t, x: x.__setitem__(t.v > 99, t.scalar),
    lambda t, x: x.index_copy_(0, torch.tensor([3, 0]), t.y[[3, 0]]),
    lambda t, x: x.index_fill_(-1, torch.tensor([1]), t.scalar),
    lambda t, x: x.__setitem__([], 1.0),
]  # fmt: skip


@on_ranks(*WORLD_SIZES)
def test_assignment() -> None:
    """Values, and the gradients of what was assigned and of what was left."""
    for layout in every_layout():
        for k, assign in enumerate(ASSIGNMENTS):

            def assigned(t: Operands, assign: Any = assign) -> Any:
                x = t.x * 2
                assign(t, x)
                return x

            check(assigned, layout, f"assignment {k}")


REFUSED: list[Refusal] = [
    (
        lambda t: t.y.detach().__setitem__(t.mask, t.x[t.other_mask]),
        LayoutMismatchError,
        "Expected values to assign with the same rows (got 5 nodes and ",
    ),
    (lambda t: t.y.detach().__setitem__(t.mask, t.full), LayoutMismatchError, "a plain operand with 1 or 5 rows"),
    (lambda t: t.y.detach().__setitem__(([2], [0, 1]), 1.0), DataError, "as many columns as rows, 1 positions (got"),
    (lambda t: t.y.detach().__setitem__(([2, 0, 1], [True, False, True]), 1.0), DataError, "(got torch.bool of shape"),
    (lambda t: t.v.detach().add_(t.matrix[:1, :1]), MixedRowsError, "add_ expected operands of at most 1 dimensions"),
    (lambda t: t.v.detach().copy_(t.column), MixedRowsError, "(got one of 2): assign the result"),
    (lambda t: operator.imul(t.x.detach(), t.c), MixedRowsError, "mul_ expected operands of at most 2 dimensions"),
    (lambda t: t.v.detach().masked_fill_(mask=t.m, value=0), MixedRowsError, "masked_fill_ expected operands of at"),
    (lambda t: t.y.detach().__setitem__((0, [0, 1]), 1.0), MixedRowsError, "of one row and a list of columns"),
    (
        lambda t: t.mask[:3].fill_(True),
        MixedRowsError,
        "of a slice of rows would change a copy, where torch has a view",
    ),
    (lambda t: (t.x * 1)[1:3].zero_(), MixedRowsError, "zero_ of a slice of rows would change a copy"),
    (lambda t: (t.x * 1).narrow(0, 1, 2).mul_(2), MixedRowsError, "mul_ of a slice of rows would change a copy"),
    (lambda t: t.x.detach()[1:4][:, :2].zero_(), MixedRowsError, "zero_ of a slice of rows would change a copy"),
    (lambda t: F.relu(t.x.detach()[1:4], inplace=True), MixedRowsError, "relu of a slice of rows would change a copy"),
    (lambda t: t.x.detach().split(3)[0].add_(1), MixedRowsError, "add_ of a slice of rows would change a copy"),
    (lambda t: operator.iadd(t.x.detach()[1:3], 1), MixedRowsError, "add_ of a slice of rows would change a copy"),
    (lambda t: operator.ipow(t.x.detach()[1:3], 2), MixedRowsError, "__ipow__ of a slice of rows would change a copy"),
    (lambda t: torch.add(t.y[1:3], 1, out=t.x.detach()[1:3]), MixedRowsError, "of a slice of rows would change a copy"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)
