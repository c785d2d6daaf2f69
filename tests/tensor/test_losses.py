"""Losses: of all rows, of the rows that a mask selects, of one training node on one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_torch import WORLD_SIZES, Form, Operands, agree, check, refuses
from workers import Workers

from pyg_dist.errors import LayoutMismatchError, MixedRowsError, UnsupportedError

REDUCTIONS = ("mean", "sum", "none")


def forms(call: Callable[..., Any], *options: dict[str, Any]) -> list[Form]:
    """``call(f, t, **options)`` with every reduction, and with each of the further options."""
    every = [{"reduction": reduction} for reduction in REDUCTIONS] + [{}, *options]
    return [lambda f, t, given=given: call(f, t, **given) for given in every]


def pairs(first: str, second: str, plain: str, *options: dict[str, Any]) -> list[Form]:
    """Losses of two operands: with rows, one of them plain, selected."""

    def call(f: Any, t: Operands, **given: Any) -> Any:
        return f(getattr(t, first), getattr(t, second), **given)

    selections: list[Form] = [
        lambda f, t: f(getattr(t, first), getattr(t, plain)),
        lambda f, t: f(getattr(t, plain), getattr(t, second)),
        lambda f, t: f(getattr(t, first)[t.mask], getattr(t, second)[t.mask]),
        lambda f, t: f(getattr(t, first)[t.only], getattr(t, second)[t.only]),
        lambda f, t: f(input=getattr(t, first)[[3, 0, 0]], target=getattr(t, second)[[3, 0, 0]]),
    ]
    return forms(call, *options) + selections


CLASSES: list[Form] = [
    *pairs("x", "label", "full_label", {"ignore_index": 1}),
    *forms(lambda f, t, **given: f(t.x, t.label, weight=t.class_weight, **given), {"ignore_index": 1}),
    lambda f, t: f(t.full, t.label, weight=t.class_weight),
    lambda f, t: f(t.x, t.full_label, t.class_weight),
    lambda f, t: f(t.c.transpose(1, 2), torch.stack([t.label, t.label], 1)),
    lambda f, t: f(t.x, t.label * 0 + 1, ignore_index=1),  # all ignored: NaN
]

FORMS: dict[str, list[Form]] = {
    "cross_entropy": [
        *CLASSES,
        *forms(lambda f, t, **given: f(t.x, t.label, label_smoothing=0.2, **given), {"weight": None}),
        *forms(lambda f, t, **given: f(t.x, t.label, t.class_weight, label_smoothing=0.2, **given)),
        *forms(lambda f, t, **given: f(t.x, t.soft, **given)),
        lambda f, t: f(t.x, t.soft, t.class_weight, label_smoothing=0.1),
        lambda f, t: f(t.x[t.mask], t.soft[t.mask]),
    ],
    "nll_loss": CLASSES,
    "mse_loss": [*pairs("x", "y", "full"), lambda f, t: f(t.v, t.u), lambda f, t: f(t.x, t.y, weight=t.p)],
    "l1_loss": pairs("x", "y", "full"),
    "smooth_l1_loss": pairs("x", "y", "full", {"beta": 0.5}),
    "huber_loss": pairs("x", "y", "full", {"delta": 0.5}),
    "binary_cross_entropy": [
        *forms(lambda f, t, **given: f(t.p, t.m.to(t.p.dtype), **given)),
        lambda f, t: f(t.p, t.soft, weight=t.class_weight), lambda f, t: f(t.p, t.soft, t.full_p),
        lambda f, t: f(t.p[t.mask], t.soft[t.mask]), lambda f, t: f(t.full_p, t.soft),
    ],
    "binary_cross_entropy_with_logits": [
        *pairs("x", "soft", "full_p"), lambda f, t: f(t.x, t.soft, weight=t.p), lambda f, t: f(t.x, t.soft, pos_weight=t.class_weight),
        lambda f, t: f(t.v, t.only.to(t.v.dtype), pos_weight=t.scalar.detach()), lambda f, t: f(t.x[t.mask], t.m[t.mask].to(t.x.dtype)),
    ],
    "kl_div": [*pairs("x", "soft", "full_p"), lambda f, t: f(t.x, t.soft, reduction="batchmean"), lambda f, t: f(t.x, t.y, log_target=True)],
    "poisson_nll_loss": pairs("x", "p", "full_p", {"log_input": False}, {"full": True}),
    "gaussian_nll_loss": [
        *forms(lambda f, t, **given: f(t.x, t.y, t.p, **given), {"full": True}), lambda f, t: f(t.x, t.full, t.spread),
        lambda f, t: f(t.x[t.only], t.y[t.only], var=t.spread[t.only]), lambda f, t: f(t.full, t.y, t.full_p),
    ],
    "soft_margin_loss": pairs("x", "y", "full"),
    "hinge_embedding_loss": forms(lambda f, t, **given: f(t.v, t.sign * 2 - 1, **given), {"margin": 0.5}),
    "margin_ranking_loss": forms(lambda f, t, **given: f(t.v, t.u, t.sign, **given), {"margin": 0.5}),
    "cosine_embedding_loss": [
        *forms(lambda f, t, **given: f(t.x, t.y, t.sign * 2 - 1, **given), {"margin": 0.5}),
        lambda f, t: f(t.x[t.mask], t.y[t.mask], t.sign[t.mask] * 2 - 1), lambda f, t: f(t.full, t.y, t.sign * 2 - 1),
    ],
    "triplet_margin_loss": [
        *forms(lambda f, t, **given: f(t.x, t.y, t.p, **given), {"margin": 0.3, "swap": True}), lambda f, t: f(t.x, t.full, t.p),
    ],
    "multilabel_soft_margin_loss": [*pairs("x", "soft", "full_p"), lambda f, t: f(t.x, t.soft, t.class_weight)],
    "multi_margin_loss": [*pairs("x", "label", "full_label", {"margin": 0.5}), lambda f, t: f(t.x, t.label, weight=t.class_weight.detach())],
    "multilabel_margin_loss": pairs("x", "multi", "full_i"),
}  # fmt: skip



@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", FORMS)
def test_losses(workers: Callable[[int], Workers], world_size: int, name: str) -> None:
    workers(world_size).run(values_and_gradients, name)


def values_and_gradients(name: str) -> None:
    agree(name, FORMS[name])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_scripts(workers: Callable[[int], Workers], world_size: int) -> None:
    workers(world_size).run(scripts)


def scripts() -> None:
    """Loss modules, several losses, penalties, and rows chosen twice."""
    for layout in ("tall", "square"):
        check(lambda t: torch.nn.CrossEntropyLoss(weight=t.class_weight.detach())(t.x[t.mask], t.label[t.mask]), layout)
        check(lambda t: torch.nn.BCEWithLogitsLoss()(t.x, t.soft) + 0.1 * t.weight.square().sum(), layout)
        check(lambda t: F.cross_entropy((t.x @ t.matrix)[t.only], t.label[t.only]) + (t.x @ t.matrix).abs().mean(), layout)
        check(lambda t: F.nll_loss(t.x.log_softmax(-1)[t.position][t.mask], t.label[t.position][t.mask]), layout)
        check(lambda t: F.mse_loss(t.x[t.mask][[1, -1, 0, 0]], t.y[t.mask][torch.tensor([1, -1, 0, 0])]), layout)
    check(lambda t: F.cross_entropy(t.x[t.v > 99], t.label[t.v > 99], reduction="sum"))
    check(lambda t: F.cross_entropy(t.x[t.v > 99], t.label[t.v > 99]))  # NaN


REFUSED: list[tuple[Callable[[Operands], object], type[Exception], str]] = [
    (lambda t: F.cross_entropy(t.x[t.mask], t.label), LayoutMismatchError, "operands with the same rows (got"),
    (lambda t: F.cross_entropy(t.x[t.mask], t.full_label), LayoutMismatchError, "select both operands alike"),
    (lambda t: F.cross_entropy(t.v, t.label), MixedRowsError, "expected scores of shape [rows, classes]"),
    (lambda t: F.mse_loss(t.x, t.v), MixedRowsError, "give 'input' and 'target' the same number of dimensions"),
    (lambda t: F.mse_loss(t.column, t.v), MixedRowsError, "the same number of dimensions"),
    (lambda t: F.cross_entropy(t.x, t.label, reduction="median"), ValueError, "median is not a valid value"),
    (lambda t: F.mse_loss(t.x, t.y, size_average=False), UnsupportedError, "deprecated: use reduction="),
    (lambda t: torch.kl_div(t.x, t.y), MixedRowsError, "has no distributed form"),
    (lambda t: F.ctc_loss(t.x, t.y, t.i, t.j), MixedRowsError, "has no distributed form"),
]


@pytest.mark.parametrize("world_size", [1, 3])
def test_refused(workers: Callable[[int], Workers], world_size: int) -> None:
    workers(world_size).run(all_refused)


def all_refused() -> None:
    for expression, error, message in REFUSED:
        refuses(expression, error, message)
