"""Batch norm: statistics of all rows, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from against_torch import WORLD_SIZES, Form, Operands, Refusal, agree, check, ranks_and_names, refuse_all
from workers import on_ranks

from pyg_dist.errors import DataError, MixedRowsError


def running(
    f: Callable[..., torch.Tensor], t: Operands, x: torch.Tensor, *args: object, **kwargs: object
) -> list[torch.Tensor]:
    """The output, and the running statistics after it."""
    mean, var = torch.zeros(x.size(1), dtype=x.dtype), torch.ones(x.size(1), dtype=x.dtype)
    return [f(x, mean, var, *args, **kwargs), mean, var]


FORMS: dict[str, Sequence[Form]] = {
    "batch_norm": [
        lambda f, t: running(f, t, t.x, training=True),
        lambda f, t: running(f, t, t.x, t.vector, t.class_weight, True),
        lambda f, t: running(f, t, t.c, training=True, momentum=0.3, eps=1e-3),
        lambda f, t: running(f, t, t.c, t.matrix[0, :2], t.matrix[1, :2], True),
        lambda f, t: f(t.x, None, None, t.vector, None, training=True),
        lambda f, t: running(f, t, t.x, t.vector, t.class_weight),
        lambda f, t: f(t.x[t.mask], None, None, training=True),
        lambda f, t: f(t.x[t.mask][t.other_mask[t.mask]], None, None, t.vector, training=True),
    ]
}


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_batch_norm(name: str) -> None:
    agree(name, FORMS[name])


@on_ranks(*WORLD_SIZES)
def test_modules() -> None:
    """Some steps of training and one of evaluation; buffers as in torch, also with a cumulative average."""

    def steps(t: Operands, **options: object) -> list[torch.Tensor]:
        norm = torch.nn.BatchNorm1d(t.F, **options).double()
        out = [norm(t.x), norm(t.y * 3 + 1), norm(t.x[t.mask])]
        buffers = [buffer.clone() for buffer in norm.buffers()]
        norm.eval()
        out.append(norm(t.x))
        sum((o.square() * torch.arange(1.0, t.F + 1)).sum() for o in out).backward()
        return [*(o.detach() for o in out), *buffers, *(p.grad for p in norm.parameters())]

    def one_instance(t: Operands, **options: bool) -> list[torch.Tensor]:
        norm = torch.nn.InstanceNorm1d(t.F, **options).double()  # as PyG's InstanceNorm calls it
        out = [norm(t.x.t()[None])[0].t(), norm.eval()(t.y.t()[None])[0].t()]
        sum((o.square() * torch.arange(1.0, t.F + 1)).sum() for o in out).backward()
        return [*(o.detach() for o in out), *norm.buffers(), *(p.grad for p in norm.parameters())]

    for layout in ("tall", "square"):
        check(one_instance, layout)
        check(lambda t: torch.nn.InstanceNorm1d(t.N)(t.x), layout)  # as PyG's GENConv calls it
        check(lambda t: one_instance(t, affine=True, track_running_stats=True), layout)
        check(steps, layout)
        check(lambda t: steps(t, momentum=None), layout)
        check(lambda t: steps(t, affine=False, track_running_stats=False), layout)


REFUSED: list[Refusal] = [
    (
        lambda t: F.batch_norm(t.x[t.only], None, None, training=True),
        (DataError, ValueError),
        "more than 1 value per channel",
    ),
    (lambda t: F.batch_norm(t.x, t.v, t.v, training=True), MixedRowsError, "one plain value per channel"),
    (lambda t: F.batch_norm(t.full, None, None, t.v, training=True), MixedRowsError, "one plain value per channel"),
    (lambda t: F.instance_norm(t.c), MixedRowsError, "instance_norm has no distributed form"),
    (lambda t: F.instance_norm(torch.stack([t.x.t(), t.y.t()])), MixedRowsError, "rows in dimension 2 (of shape [2, "),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)
