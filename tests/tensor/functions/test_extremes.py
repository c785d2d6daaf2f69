"""Largest and smallest values and where they are: ties, NaN and gradients as in torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from against_torch import WORLD_SIZES, Form, Refusal, agree, check, each, ranks_and_names, refuse_all
from workers import on_ranks

FORMS: dict[str, Sequence[Form]] = {
    **each("amax amin logsumexp", [
        lambda f, t: f(t.x, 0), lambda f, t: f(t.x, 1), lambda f, t: f(t.x, (0, 1)),
        lambda f, t: f(t.c, dim=(0, 2), keepdim=True),
        lambda f, t: f(t.v, 0), lambda f, t: f(t.holes, 0), lambda f, t: f(t.ties, dim=0),
        lambda f, t: f(t.ties, (0, 1)),
        lambda f, t: f(t.x.masked_fill(t.m, torch.inf), 0), lambda f, t: f(t.x * 0 - torch.inf, 0),
        lambda f, t: f(t.i, 0), lambda f, t: f(t.i.byte(), 0), lambda f, t: f(t.i.short(), 0),
    ]),
    **each("max min", [
        lambda f, t: f(t.x), lambda f, t: f(t.x, 0), lambda f, t: f(t.x, 1), lambda f, t: f(t.c, dim=0, keepdim=True),
        lambda f, t: f(t.v),
        lambda f, t: f(t.v, 0), lambda f, t: f(t.holes), lambda f, t: f(t.holes, 0), lambda f, t: f(t.holes, 1),
        lambda f, t: f(t.ties),
        lambda f, t: f(t.ties, 0), lambda f, t: f(t.i), lambda f, t: f(t.i, 0), lambda f, t: f(t.m),
        lambda f, t: f(t.m, 0),
        lambda f, t: f(t.i.byte(), 0), lambda f, t: f(t.x * 0 - torch.inf, 0),
        lambda f, t: f(t.x, t.y), lambda f, t: f(t.x, other=t.vector), lambda f, t: f(t.full, t.x),
        lambda f, t: f(t.x, t.full),
        lambda f, t: (f(t.x, 0).values, f(t.x, 0).indices, f(t.x, 1).values),
    ]),
    **each("argmax argmin", [
        lambda f, t: f(t.x), lambda f, t: f(t.x, 0), lambda f, t: f(t.x, 1), lambda f, t: f(t.x, dim=-1, keepdim=True),
        lambda f, t: f(t.c, dim=0, keepdim=True), lambda f, t: f(t.v), lambda f, t: f(t.x, keepdim=True),
        lambda f, t: f(t.holes, 0),
        lambda f, t: f(t.holes), lambda f, t: f(t.holes, 1), lambda f, t: f(t.ties, 0), lambda f, t: f(t.ties),
        lambda f, t: f(t.i, 0),
        lambda f, t: f(t.x[t.only], 0), lambda f, t: f(t.x[t.mask][t.position[t.mask] > 1], 0),
    ]),
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_extremes(name: str) -> None:
    agree(name, FORMS[name])


@on_ranks(*WORLD_SIZES)
def test_selected() -> None:
    """Positions count within the selection; a selection of one row lies on one rank."""
    check(lambda t: t.x[t.mask].max(0))
    check(lambda t: t.x[t.only].max(0))
    check(lambda t: t.x[[5, 0, 5, 3]].argmax(0))
    check(lambda t: t.v[torch.tensor([4, -1, 2])].min())


REFUSED: list[Refusal] = [
    (lambda t: t.x[t.v > 99].max(), RuntimeError, "numel() == 0"),
    (lambda t: t.x[t.v > 99].argmin(0), RuntimeError, "numel() == 0"),
    (lambda t: t.x.amax(2), IndexError, "Dimension out of range"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)
