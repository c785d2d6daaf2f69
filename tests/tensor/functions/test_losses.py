"""Losses: of all rows, of the rows that a mask selects, of one training node on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_torch import WORLD_SIZES, Form, Operands, Refusal, agree, check, ranks_and_names, refuse_all
from workers import on_ranks

from pyg_dist import world_size
from pyg_dist.errors import LayoutMismatchError, MixedRowsError, UnsupportedError

REDUCTIONS = ("mean", "sum", "none")


def forms(call: Callable[..., Any], *options: dict[str, Any]) -> list[Form]:
    """``call(f, t, **options)`` with every reduction, and with each of the further options."""
    every = [{"reduction": reduction} for reduction in REDUCTIONS] + [{}, *options]
    return [lambda f, t, given=given: call(f, t, **given) for given in every]


def pairs(first: str, second: str, *options: dict[str, Any], plain: tuple[str, str] = ("full", "full_p")) -> list[Form]:
    """Losses of two operands: both with rows, either of them plain, selected by mask and by list."""

    def both(t: Operands, index: Any) -> tuple[Any, Any]:
        return getattr(t, first)[index(t)], getattr(t, second)[index(t)]

    return [
        *forms(lambda f, t, **given: f(getattr(t, first), getattr(t, second), **given), *options),
        lambda f, t: f(getattr(t, first), getattr(t, plain[1])),
        lambda f, t: f(getattr(t, plain[0]), getattr(t, second)),
        lambda f, t: f(*both(t, lambda t: t.mask)),
        lambda f, t: f(*both(t, lambda t: t.only)),
        lambda f, t: f(*both(t, lambda t: [3, 0, 0]), reduction="sum"),
    ]


CLASSES: list[Form] = [
    *pairs("x", "label", {"ignore_index": 1}, plain=("full", "full_label")),
    *forms(lambda f, t, **given: f(t.x, t.label, weight=t.class_weight, **given), {"ignore_index": 1}),
    lambda f, t: f(t.full, t.label, weight=t.class_weight),
    lambda f, t: f(t.x, t.full_label, t.class_weight),
    lambda f, t: f(t.c.transpose(1, 2), torch.stack([t.label, t.label], 1)),
    lambda f, t: f(input=t.x, target=t.label * 0 + 1, ignore_index=1),  # all ignored: NaN
]
WEIGHTED: list[Form] = [
    *pairs("x", "y"), lambda f, t: f(t.v, t.u), *forms(lambda f, t, **given: f(t.x, t.y, weight=t.p, **given)),
    lambda f, t: f(t.x, t.y, weight=t.full_p), lambda f, t: f(t.x[t.mask], t.y[t.mask], weight=t.p[t.mask]),
    lambda f, t: f(t.full, t.full, weight=t.p),
]  # fmt: skip
FORMS: dict[str, Sequence[Form]] = {
    "cross_entropy": [
        *CLASSES,
        *forms(lambda f, t, **given: f(t.x, t.label, label_smoothing=0.2, **given), {"weight": None}),
        *forms(lambda f, t, **given: f(t.x, t.label, t.class_weight, label_smoothing=0.2, **given)),
        *forms(lambda f, t, **given: f(t.x, t.soft, **given)),
        lambda f, t: f(t.x, t.soft, t.class_weight, label_smoothing=0.1),
        lambda f, t: f(t.x[t.mask], t.soft[t.mask]),
    ],
    "nll_loss": CLASSES,
    "l1_loss": WEIGHTED,
    "mse_loss": WEIGHTED,
    "smooth_l1_loss": pairs("x", "y", {"beta": 0.5}),
    "huber_loss": [*pairs("x", "y", {"delta": 0.5}), *forms(lambda f, t, **given: f(t.x, t.y, weight=t.p, **given))],
    "binary_cross_entropy": [
        *pairs("p", "soft", plain=("full_p", "full_p")), lambda f, t: f(t.p, t.soft, weight=t.class_weight),
        *forms(lambda f, t, **given: f(t.p, t.m.to(t.p.dtype), t.full_p.detach(), **given)),
    ],
    "binary_cross_entropy_with_logits": [
        *pairs("x", "soft"), *forms(lambda f, t, **given: f(t.x, t.m.to(t.x.dtype), weight=t.p.detach(), **given)),
        lambda f, t: f(t.x, t.soft, pos_weight=t.class_weight),
        lambda f, t: f(t.full, t.soft, pos_weight=t.class_weight),
        lambda f, t: f(t.v, t.only.to(t.v.dtype), pos_weight=t.scalar.detach().abs()),
    ],
    "kl_div": [
        *pairs("x", "soft", {"reduction": "batchmean"}), lambda f, t: f(t.x, t.y, log_target=True),
        lambda f, t: f(t.x[t.mask], t.soft[t.mask], reduction="batchmean"),
    ],
    "poisson_nll_loss": pairs("x", "p", {"full": True}, {"log_input": False}),
    "gaussian_nll_loss": [
        *forms(lambda f, t, **given: f(t.x, t.y, t.p, **given), {"full": True}), lambda f, t: f(t.x, t.full, t.spread),
        lambda f, t: f(t.x[t.only], t.y[t.only], var=t.spread[t.only]), lambda f, t: f(t.full, t.y, t.full_p),
        lambda f, t: f(t.x, t.y, t.full_p[:, 0]), lambda f, t: f(t.x, t.y, t.p[:, 0]),
        lambda f, t: f(t.x, t.y, t.full_p[:, :1]), lambda f, t: f(t.x, t.y, t.full_p[:1]),
        lambda f, t: f(t.v, t.u, t.full_p[:, 0]), lambda f, t: f(t.x, t.y, 0.5),
    ],
    "soft_margin_loss": forms(lambda f, t, **given: f(t.x, t.m.to(t.x.dtype) * 2 - 1, **given)),
    "hinge_embedding_loss": forms(lambda f, t, **given: f(t.v, t.sign, **given), {"margin": 0.5}),
    "margin_ranking_loss": forms(lambda f, t, **given: f(t.v, t.u, t.sign, **given), {"margin": 0.5}),
    "cosine_embedding_loss": [
        *forms(lambda f, t, **given: f(t.x, t.y, t.sign, **given), {"margin": 0.5}),
        lambda f, t: f(t.x[t.mask], t.y[t.mask], t.sign[t.mask]), lambda f, t: f(t.full, t.y, t.sign),
    ],
    "triplet_margin_loss": [
        *forms(lambda f, t, **given: f(t.x, t.y, t.p, **given), {"margin": 0.3, "swap": True}),
        lambda f, t: f(t.x, t.full, t.p),
    ],
    "multilabel_soft_margin_loss": [*pairs("x", "soft"), lambda f, t: f(t.x, t.soft, t.class_weight)],
    "multi_margin_loss": [
        *pairs("x", "label", {"margin": 0.5}, plain=("full", "full_label")),
        lambda f, t: f(t.x, t.label, weight=t.class_weight),
        lambda f, t: f(t.full, t.label, weight=t.class_weight),
    ],
    "multilabel_margin_loss": pairs("x", "multi", plain=("full", "full_multi")),
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_losses(name: str) -> None:
    agree(name, FORMS[name])


@on_ranks(*WORLD_SIZES)
def test_scripts() -> None:
    """Loss modules, several losses, penalties, and rows chosen twice."""
    for layout in ("tall", "square"):
        check(lambda t: torch.nn.CrossEntropyLoss(weight=t.class_weight)(t.x[t.mask], t.label[t.mask]), layout)
        check(lambda t: torch.nn.BCEWithLogitsLoss()(t.x, t.soft) + 0.1 * t.weight.square().sum(), layout)
        check(
            lambda t: F.cross_entropy((t.x @ t.matrix)[t.only], t.label[t.only]) + (t.x @ t.matrix).abs().mean(), layout
        )
        check(
            lambda t: F.nll_loss(
                t.x.log_softmax(-1)[[2, 0, 2]][t.mask[[2, 0, 2]]], t.label[[2, 0, 2]][t.mask[[2, 0, 2]]]
            ),
            layout,
        )
        check(lambda t: F.mse_loss(t.x[t.mask][[1, -1, 0, 0]], t.y[t.mask][torch.tensor([1, -1, 0, 0])]), layout)
    check(lambda t: F.cross_entropy(t.x[t.v > 99], t.label[t.v > 99], reduction="sum"))
    check(lambda t: F.cross_entropy(t.x[t.v > 99], t.label[t.v > 99]))  # NaN


REFUSED: list[Refusal] = [
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


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)
    if world_size() > 1:  # alone, the nodes may be the classes
        refuse_all([(lambda t: F.multilabel_soft_margin_loss(t.v, t.v), MixedRowsError, "expected scores and targets")])


@on_ranks(*WORLD_SIZES)
def test_targets_of_another_dtype() -> None:
    """The loss has the targets' dtype, as torch's, and the gradient the precision of the scores."""
    for reduction in REDUCTIONS:
        losses, gradients = [], []
        for distributed in (False, True):
            t = Operands("tall", distributed)
            loss = F.binary_cross_entropy_with_logits(t.x, t.m.float(), reduction=reduction)
            loss.sum().backward()
            losses.append(loss)
            gradients.append(t.x.grad.full_tensor() if distributed else t.x.grad)  # type: ignore[union-attr]
        assert losses[0].dtype == losses[1].dtype == torch.float32
        torch.testing.assert_close(losses[1].full_tensor() if reduction == "none" else losses[1], losses[0])  # type: ignore[operator]
        torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-14, atol=1e-16)
