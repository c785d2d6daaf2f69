"""Sums, means and other reductions: within rows, over rows, over everything."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from against_torch import (
    WORLD_SIZES,
    Form,
    Refusal,
    agree,
    check,
    distribute,
    each,
    node_rows,
    ranks_and_names,
    refuse_all,
)
from workers import on_ranks

from pyg_dist.errors import LayoutMismatchError, UnsupportedError

DIMS: list[Form] = [
    lambda f, t: f(t.x),
    lambda f, t: f(t.x, 0),
    lambda f, t: f(t.x, 1),
    lambda f, t: f(t.x, dim=-2, keepdim=True),
    lambda f, t: f(t.x, axis=0),
    lambda f, t: f(t.x, axis=0, keepdims=True),
    lambda f, t: f(t.v),
    lambda f, t: f(t.v, 0, True),
    lambda f, t: f(t.c, -1),
]
SEVERAL_DIMS: list[Form] = [
    lambda f, t: f(t.x, (0, 1)),
    lambda f, t: f(t.c, (0, 2)),
    lambda f, t: f(t.c, [1, 2]),
    lambda f, t: f(t.c, dim=(0, 1, 2), keepdim=True),
    lambda f, t: f(input=t.x, dim=0),
]
FORMS: dict[str, Sequence[Form]] = {
    **each("sum nansum", [
        *DIMS, *SEVERAL_DIMS, lambda f, t: f(t.i), lambda f, t: f(t.m), lambda f, t: f(t.m, 0),
        lambda f, t: f(t.i.short(), 0),
        lambda f, t: f(t.x, dtype=torch.float32), lambda f, t: f(t.i, 0, dtype=torch.float64),
        lambda f, t: f(t.holes, 0),
        lambda f, t: f(t.x / 0, 0), lambda f, t: f(t.x, None),
    ]),
    "mean": [
        *DIMS, *SEVERAL_DIMS, lambda f, t: f(t.i, 0, dtype=torch.float64), lambda f, t: f(t.holes, 0),
        lambda f, t: f(t.x, None, True),
    ],
    "nanmean": [*DIMS, *SEVERAL_DIMS, lambda f, t: f(t.holes, 0), lambda f, t: f(t.holes), lambda f, t: f(t.holes, 1)],
    "count_nonzero": [
        lambda f, t: f(t.m), lambda f, t: f(t.m, 0), lambda f, t: f(t.m, dim=1), lambda f, t: f(t.x > 0, (0, 1)),
        lambda f, t: f(t.i),
    ],
    **each("any all", [
        lambda f, t: f(t.m), lambda f, t: f(t.m, 0), lambda f, t: f(t.m, dim=1), lambda f, t: f(t.m, -2, True),
        lambda f, t: f(t.only),
        lambda f, t: f(t.i), lambda f, t: f(t.ties, 0), lambda f, t: f(t.m, (0, 1)), lambda f, t: f(t.i.byte(), 0),
        lambda f, t: f(t.x > 9),
        lambda f, t: f(t.x > -9),
    ]),
    **each("_is_any_true _is_all_true", [
        lambda f, t: f(t.m), lambda f, t: f(t.only), lambda f, t: f(t.x > 9), lambda f, t: f(t.x > -9),
    ]),
    "prod": [
        *DIMS, lambda f, t: f(t.i), lambda f, t: f(t.m, 0), lambda f, t: f(t.x, dtype=torch.float32),
        lambda f, t: f(t.ties, 0),
        lambda f, t: f(t.x * t.other_mask.view(-1, 1), 0),
    ],
    **each("softmax log_softmax", [
        lambda f, t: f(t.x, 1), lambda f, t: f(t.x, dim=-1), lambda f, t: f(t.x, dim=0), lambda f, t: f(t.v, 0),
        lambda f, t: f(t.c, 0),
        lambda f, t: f(t.x.detach().float(), dim=0, dtype=torch.float64),
        lambda f, t: f(t.x, dim=1, dtype=torch.float32).detach(),
        lambda f, t: f(t.x.masked_fill(t.m, -torch.inf), 0),
    ]),
    "allclose": [
        lambda f, t: f(t.x, t.x + 1e-12), lambda f, t: f(t.x, t.y), lambda f, t: f(t.x, t.full),
        lambda f, t: f(t.x, t.x, atol=0.0),
    ],
    "equal": [
        lambda f, t: f(t.x, t.x + 0), lambda f, t: f(t.x, t.y), lambda f, t: f(t.x, t.full), lambda f, t: f(t.x, t.c),
    ],
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_reductions(name: str) -> None:
    agree(name, FORMS[name])


@on_ranks(*WORLD_SIZES)
def test_metrics() -> None:
    """The lines with which scripts and torchmetrics count."""
    check(lambda t: (t.x.argmax(1) == t.label).sum() / t.mask.sum())
    check(lambda t: int((t.x.argmax(-1)[t.mask] == t.label[t.mask]).sum()) / int(t.mask.sum()))
    check(lambda t: (t.x.argmax(1) == t.label)[t.mask].float().mean().item())
    check(lambda t: (t.x.argmax(1) == t.label).double().mul(t.mask).sum() / t.mask.sum().clamp(min=1))
    check(lambda t: f"{F.cross_entropy(t.x[t.mask], t.label[t.mask]):.4f}")
    check(lambda t: [((t.label == k) & (t.x.argmax(1) == k)).sum().item() for k in range(t.F)])
    check(lambda t: float((t.x.detach().sigmoid() > 0.5).eq(t.m).double().mean()))
    check(lambda t: torch.stack([t.x.argmax(1)[m].eq(t.label[m]).sum() for m in (t.mask, t.only, ~t.mask)]))


@on_ranks(*WORLD_SIZES)
def test_statistics_enter() -> None:
    """Reductions that meet the rows again: their gradient comes from every rank."""
    for layout in ("tall", "square"):
        check(lambda t: t.x - t.x.mean(0), layout)
        check(lambda t: (t.x - t.x.mean(0)) / t.x.std(0), layout)
        check(lambda t: (t.x - t.x.amin(0)) / (t.x.amax(0) - t.x.amin(0)), layout)
        check(lambda t: t.x * (t.x.sum() * t.scalar).sigmoid(), layout)
        check(lambda t: t.x / t.x.norm(dim=0, keepdim=True), layout)
        check(lambda t: (t.x[t.mask].mean(0) @ t.matrix, t.y * t.x[t.only].sum(0)), layout)


@on_ranks(3)
def test_half_sums_are_wide() -> None:
    rows = node_rows()
    big = torch.full((7, 1), torch.finfo(torch.float16).max / 4, dtype=torch.float16)
    x = distribute(torch.cat([big, -big], 1), rows)
    assert torch.equal(x.sum(), torch.zeros((), dtype=torch.float16))
    assert torch.equal(x.mean(0), torch.cat([big[0], -big[0]]))
    assert torch.equal(x.var(0, correction=0), torch.zeros(2, dtype=torch.float16))
    many = distribute(torch.tensor([256.0] + 6 * [1.0], dtype=torch.bfloat16), rows)  # 256 + 1 = 256 in bfloat16
    assert many.sum() == 262


REFUSED: list[Refusal] = [
    (lambda t: t.i.mean(0), RuntimeError, "floating"),
    (lambda t: F.softmax(t.x), UnsupportedError, "softmax expects dim for a NodeTensor (got None): pass dim=-1"),
    (lambda t: t.x + t.x[t.mask], LayoutMismatchError, "of another graph or selection"),
]


@on_ranks(3)
def test_refused() -> None:
    refuse_all(REFUSED)


@on_ranks(1, 3)
def test_softmax_of_large_logits() -> None:
    """Softmax over rows is as exact where its logits are large, and in bfloat16: stock PyG's rounding, not more."""
    for dtype, size, bound in ((torch.float32, 1e5, 1e-5), (torch.bfloat16, 50.0, 1e-2)):
        logits = (torch.randn(7, 3, generator=torch.Generator().manual_seed(0)) + size).to(dtype)
        ours = distribute(logits, node_rows())
        for function in (torch.softmax, torch.log_softmax):
            expected = function(logits.double(), 0)
            torch.testing.assert_close(function(ours, 0).double(), expected, rtol=bound, atol=bound)


@on_ranks(1, 3)
def test_of_nothing() -> None:
    nothing = distribute(torch.randn(7, 3), node_rows())[distribute(torch.zeros(7, dtype=torch.bool), node_rows())]
    assert torch.equal(nothing.logsumexp(0), torch.full((3,), -torch.inf))
    assert nothing.softmax(0).shape == (0, 3)
