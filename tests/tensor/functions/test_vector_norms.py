"""Norms, standard deviations and variances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from against_torch import WORLD_SIZES, Form, Refusal, agree, check, each, ranks_and_names, refuse_all
from workers import on_ranks

from pyg_dist.errors import MixedRowsError

# Of two dimensions and with an order: a matrix norm for torch.linalg.norm, which shares its name with torch.norm.
FROBENIUS: Form = lambda f, t: f(t.c, 2, dim=(0, 2))  # noqa: E731
NORMS: list[Form] = [
    lambda f, t: f(t.x),
    lambda f, t: f(t.v),
    lambda f, t: f(t.x, 2, 0),
    lambda f, t: f(t.x, 2, 1),
    lambda f, t: f(t.x, 1, dim=0, keepdim=True),
    lambda f, t: f(t.x, 3.0, 0),
    lambda f, t: f(t.x, 0.5, 0),
    lambda f, t: f(t.x, math.inf, 0),
    lambda f, t: f(t.x, -math.inf, 0),
    lambda f, t: f(t.x, 0, 0),
    lambda f, t: f(t.x, -1.0, 0),
    lambda f, t: f(t.v, 1),
    FROBENIUS,
    lambda f, t: f(t.x * 0, 2, 0),  # where the derivative of a root is infinite
    lambda f, t: f(t.holes, 2, 0),
    lambda f, t: f(t.x.detach().float(), dtype=torch.float64),
]
SPREADS: list[Form] = [
    lambda f, t: f(t.x),
    lambda f, t: f(t.x, 0),
    lambda f, t: f(t.x, 1),
    lambda f, t: f(t.x, dim=0, keepdim=True),
    lambda f, t: f(t.x, 0, False),
    lambda f, t: f(t.x, False),
    lambda f, t: f(t.x, unbiased=True),
    lambda f, t: f(t.x, 0, correction=2),
    lambda f, t: f(t.x, correction=0),
    lambda f, t: f(t.c, (0, 1), keepdim=True),
    lambda f, t: f(t.v, dim=0),
    lambda f, t: f(t.holes, 0),
    lambda f, t: f(t.x * 0 + 1, 0, correction=0),
    lambda f, t: f(t.v[t.only]),  # no degree of freedom
]
FORMS: dict[str, Sequence[Form]] = {
    "vector_norm": NORMS,
    "norm": [form for form in NORMS if form is not FROBENIUS],
    **each("std var std_mean var_mean", SPREADS),
    "dist": [lambda f, t: f(t.x, t.y), lambda f, t: f(t.x, t.full, 1), lambda f, t: f(t.full, t.x, p=3)],
}


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_norms(name: str) -> None:
    agree(name, FORMS[name])


@on_ranks(*WORLD_SIZES)
def test_frobenius() -> None:
    check(lambda t: (torch.norm(t.x, "fro"), t.x.norm(p="fro", dim=0), torch.linalg.norm(t.x)))
    check(lambda t: (torch.norm(t.c, 2, (0, 2)), torch.linalg.norm(t.c, dim=(0, 2)), t.c.norm(3)))
    check(lambda t: t.x.norm(dim=-1) + t.x.norm(p=None, dim=-1))


REFUSED: list[Refusal] = [
    (lambda t: torch.norm(t.x, "nuc"), MixedRowsError, "with p='nuc' is a matrix norm"),
    (lambda t: torch.linalg.norm(t.c, 2, (0, 2)), MixedRowsError, "with ord=2 is a matrix norm"),
    (lambda t: torch.linalg.norm(t.x, 2), MixedRowsError, "with ord=2 is a matrix norm"),
    (lambda t: torch.linalg.matrix_norm(t.x), MixedRowsError, "linalg.matrix_norm has no distributed form"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)
