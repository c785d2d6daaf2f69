"""Functions along a dimension, and functions that join or extend columns."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from against_torch import WORLD_SIZES, Expression, Form, Refusal, agree, check, each, every_layout, refuse_all
from workers import on_ranks

from pyg_dist.errors import LayoutMismatchError, MixedRowsError

FORMS: dict[str, Sequence[Form]] = {
    **each("softmin", [lambda f, t: f(t.x, 1), lambda f, t: f(t.c, dim=-2)]),
    **each("cumsum cumprod cumsum_ cumprod_ cummax cummin logcumsumexp", [
        lambda f, t: f(t.x, 1), lambda f, t: f(t.c, dim=-1), lambda f, t: f(t.c, 1),
    ]),
    **each("sort argsort", [
        lambda f, t: f(t.x), lambda f, t: f(t.x, 1), lambda f, t: f(t.c, dim=1, descending=True),
        lambda f, t: f(t.i, -1),
        lambda f, t: f(t.x, stable=True, dim=1),
    ]),
    "topk": [lambda f, t: f(t.x, 2), lambda f, t: f(t.c, 1, 1), lambda f, t: f(t.x, k=2, dim=-1, largest=False)],
    "kthvalue": [lambda f, t: f(t.x, 2), lambda f, t: f(t.c, 1, dim=1, keepdim=True)],
    "mode": [lambda f, t: f(t.x), lambda f, t: f(t.x, 1, True)],
    "glu": [lambda f, t: f(t.c, 1), lambda f, t: f(t.x[:, :2]), lambda f, t: f(t.c, dim=-2)],
    "roll": [lambda f, t: f(t.x, 1, 1), lambda f, t: f(t.c, shifts=(1, 2), dims=(1, 2)),
        lambda f, t: f(t.x, 2, 0), lambda f, t: f(t.v, -1), lambda f, t: f(t.x, (1, 3), (0, 1)) * t.y,
        lambda f, t: f(t.x, (1, 1), (0, 0)), lambda f, t: f(t.c, (3, 1, 1), (-3, 2, 0)),
    ],
    "flip": [lambda f, t: f(t.x, (1,)), lambda f, t: f(t.c, (-1, -2)), lambda f, t: f(t.c, dims=[2]),
        lambda f, t: f(t.x, ()), lambda f, t: f(t.x, 0), lambda f, t: f(t.c, (0, -1)), lambda f, t: f(t.v, dims=(-1,)),
    ],
    "gather": [lambda f, t: f(t.x, 1, t.label.view(-1, 1)), lambda f, t: f(t.x, dim=-1, index=t.order),
        lambda f, t: f(t.full, 1, t.order), lambda f, t: f(t.full, dim=0, index=t.order % 2),
    ],
    "take_along_dim": [lambda f, t: f(t.x, t.order, 1), lambda f, t: f(t.x, indices=t.label.view(-1, 1), dim=1),
        lambda f, t: f(t.full, t.order, 1),
    ],
    "vstack": [lambda f, t: f([t.x, t.y]), lambda f, t: f((t.full, t.c[:, 0], t.full[0]))],
    "row_stack": [lambda f, t: f([t.x, t.y])],
    "narrow": [lambda f, t: f(t.x, 1, 1, 2), lambda f, t: f(t.c, dim=-1, start=0, length=2),
        lambda f, t: f(t.x, 0, 1, 3),
    ],
    "unbind": [lambda f, t: f(t.x, 1), lambda f, t: f(t.c, dim=-2)],
    "chunk": [lambda f, t: f(t.x, 2, 1), lambda f, t: f(t.c, chunks=2, dim=-1), lambda f, t: f(t.v, 3)],
    "split": [lambda f, t: f(t.x, 2, 1), lambda f, t: f(t.x, [1, t.F - 1], dim=1),
        lambda f, t: f(t.x, 2), lambda f, t: f(t.x, [1, t.N - 1], dim=0),
    ],
    "tensor_split": [lambda f, t: f(t.x, 2, 1), lambda f, t: f(t.x, (1, 2), dim=-1), lambda f, t: f(t.x, (1, 2), 0)],
    "diff": [
        lambda f, t: f(t.x), lambda f, t: f(t.x, 2), lambda f, t: f(t.c, n=1, dim=1),
        lambda f, t: f(t.x, prepend=t.column),
    ],
    "cosine_similarity": [
        lambda f, t: f(t.x, t.y), lambda f, t: f(t.x, t.full, dim=-1), lambda f, t: f(t.c, t.d, 2),
        lambda f, t: f(t.x, t.row), lambda f, t: f(t.row[0], t.x, dim=-1), lambda f, t: f(t.x[1], t.x),
        lambda f, t: f(t.row, t.x, -1), lambda f, t: f(x2=t.row[0], x1=t.x, dim=1),
    ],
    "pairwise_distance": [
        lambda f, t: f(t.x, t.y), lambda f, t: f(t.x, t.full, 1.0), lambda f, t: f(t.row, t.x, keepdim=True),
        lambda f, t: f(t.x, t.vector), lambda f, t: f(t.c, t.d), lambda f, t: f(x1=t.x, x2=t.y),
    ],
    "repeat_interleave": [lambda f, t: f(t.x, 2, 1), lambda f, t: f(t.x, torch.arange(t.F), dim=-1),
        lambda f, t: f(t.x, 2, 0), lambda f, t: f(t.v, 3), lambda f, t: f(t.x, torch.arange(t.N) % 3, dim=0),
        lambda f, t: f(t.x, torch.arange(t.N), dim=0, output_size=t.N * (t.N - 1) // 2),
    ],
    **each("cat concat concatenate", [
        lambda f, t: f([t.x, t.y], 1), lambda f, t: f((t.x, t.full), dim=-1),
        lambda f, t: f((t.full, t.x, t.column), 1),
        lambda f, t: f([t.c, t.d], 2), lambda f, t: f(tensors=[t.x, t.i], dim=1),
        lambda f, t: f([t.x, t.y]), lambda f, t: f([t.x]), lambda f, t: f((t.v, t.full_v, t.u), dim=-1),
    ]),
    "hstack": [
        lambda f, t: f([t.v, t.u]), lambda f, t: f([t.x, t.y]), lambda f, t: f((t.full, t.column, t.x)),
        lambda f, t: f([t.scalar, t.v]),
    ],
    "column_stack": [lambda f, t: f([t.v, t.x]), lambda f, t: f((t.v, t.u)), lambda f, t: f([t.full_v, t.x])],
    "stack": [lambda f, t: f([t.x, t.y], 1), lambda f, t: f([t.x, t.full], -1), lambda f, t: f((t.v, t.u), dim=1)],
    "one_hot": [lambda f, t: f(t.label, 9), lambda f, t: f(t.label), lambda f, t: f(t.i, num_classes=-1)],
    "pad": [
        lambda f, t: f(t.x, (1, 0)), lambda f, t: f(t.c, (0, 1, 2, 0), value=2.0),
        lambda f, t: f(t.c, (1, 1), mode="replicate"),
        lambda f, t: f(t.c, (1, 0), mode="reflect"),
    ],
    "normalize": [
        lambda f, t: f(t.x), lambda f, t: f(t.x, 1.0), lambda f, t: f(t.c, dim=-1), lambda f, t: f(t.x, dim=0),
        lambda f, t: f(t.v, p=3.0, dim=0), lambda f, t: f(t.x * 0, dim=1),
    ],
}  # fmt: skip


@on_ranks(*WORLD_SIZES[1:])
@pytest.mark.parametrize("name", FORMS)
def test_columns(name: str) -> None:
    agree(name, FORMS[name], must_distribute=True)


ROWS = "along dimension 0, or of a plain tensor, would mix rows"
REFUSED: list[Refusal] = [
    (lambda t: t.x.sin().cumsum_(0), MixedRowsError, f"cumsum_ {ROWS}"),
    (lambda t: t.x.roll(1), MixedRowsError, f"roll {ROWS}"),
    (lambda t: t.x.repeat_interleave(t.label, 0), MixedRowsError, f"repeat_interleave {ROWS}"),
    (lambda t: t.x.repeat_interleave(2), MixedRowsError, f"repeat_interleave {ROWS}"),
    (lambda t: t.full[:2].gather(1, t.order), LayoutMismatchError, "7 rows (got shape [2, 3])"),
    (lambda t: t.x.gather(1, torch.zeros(1, 1, dtype=torch.int64)), LayoutMismatchError, "7 rows (got shape [1, 1])"),
    (lambda t: torch.cat([t.x, t.row], 1), LayoutMismatchError, "cat expected a plain operand with 7 rows"),
    (lambda t: torch.cat([t.x, t.v], 1), MixedRowsError, "cat would align the rows"),
    (lambda t: torch.vstack([t.v, t.full]), MixedRowsError, "vstack of a vector and a matrix would make one row"),
    (lambda t: torch.vstack([t.x, t.v]), MixedRowsError, "vstack of a vector and a matrix would make one row"),
    (lambda t: F.pad(t.x, (0, 0, 1, 0)), MixedRowsError, "pad of dimension 0 would add rows"),
    (lambda t: F.pairwise_distance(t.v, t.u), MixedRowsError, "pairwise_distance of one dimension would mix rows"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)


# All rows in order are plain: values, and positions that pick rows.
ORDERED: dict[str, Expression] = {
    "sort": lambda t: t.v.sort(),
    "sort of columns": lambda t: torch.sort(t.x, dim=0, descending=True),
    "argsort": lambda t: t.x[t.v.argsort(stable=True)],
    "cosines of columns": lambda t: [F.cosine_similarity(t.x, t.y, dim=0), F.cosine_similarity(t.v, t.u, 0)],
    "cosines with plain rows": lambda t: [F.cosine_similarity(t.full, t.x, 0), F.cosine_similarity(t.x * 0, t.y, 0)],
    "argsort of columns": lambda t: torch.argsort(t.x, 0),
    "topk": lambda t: t.v.topk(2),
    "topk of columns": lambda t: torch.topk(t.x.sin(), k=3, dim=0, largest=False),
    "topk of some": lambda t: t.v[t.mask].topk(2).values * t.y[t.label.topk(2).indices, 0],
    "kthvalue": lambda t: t.v.kthvalue(3),
    "one row for many": lambda t: (t.x[[2]].repeat(t.N, 1), t.y[[1]].expand(5, -1), t.x[[0]].repeat(2, 1, 1)),
    "unbind": lambda t: (t.x.unbind(), torch.unbind(t.v[t.mask], -1)),
    "mode": lambda t: t.label.mode(),
    "gather": lambda t: (t.x.gather(0, torch.tensor([[2, 0, 1]])), t.x.gather(0, t.order % 2)),
    "take_along_dim": lambda t: t.x.take_along_dim(torch.full((1, t.F), 2), 0),
    **{
        name: partial(lambda f, t: (f(t.x.abs() + 1, 0), f(t.v, dim=-1)), getattr(torch, name))
        for name in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")
    },
}


@on_ranks(*WORLD_SIZES)
def test_orders_of_rows() -> None:
    for layout in every_layout():
        for name, expression in ORDERED.items():
            check(expression, layout, name)
