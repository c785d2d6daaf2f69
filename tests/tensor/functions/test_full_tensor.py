"""Functions that need every row, in the original order; and the ones that show rows without gathering."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from against_torch import (
    LAYOUTS,
    WORLD_SIZES,
    Form,
    Operands,
    Refusal,
    agree,
    check,
    distribute,
    each,
    every_layout,
    node_rows,
    ranks_and_names,
    refuse_all,
)
from bits import assert_same_bits
from workers import Pools, on_ranks

from pyg_dist.backend.comm.group import world_group


def one(values: torch.Tensor) -> torch.Tensor:
    """A row tensor of one element."""
    return values[[2]]


FORMS: dict[str, Sequence[Form]] = {
    "tolist": [lambda f, t: f(t.x), lambda f, t: f(t.i), lambda f, t: f(t.x[t.mask]), lambda f, t: f(t.v[[3, 0, 3]])],
    **each("numpy __array__", [lambda f, t: f(t.x.detach()), lambda f, t: f(t.m), lambda f, t: f(t.label[t.only])]),
    "__array_wrap__": [lambda f, t: f(t.x.detach(), np.arange(3.0)), lambda f, t: np.sqrt(t.p.detach().double())],
    **each("item __float__", [lambda f, t: f(one(t.v)), lambda f, t: f(one(t.label))]),
    **each("__int__ __index__", [lambda f, t: f(one(t.label))]),
    "__bool__": [lambda f, t: f(one(t.mask)), lambda f, t: f(one(t.column))],
    "__contains__": [lambda f, t: f(t.label, 1), lambda f, t: f(t.label, 99), lambda f, t: f(t.v, 0.0)],
    "__reversed__": [lambda f, t: f(t.x), lambda f, t: f(t.label), lambda f, t: [*f(t.v[t.mask])]],
    "unique": [
        lambda f, t: f(t.i), lambda f, t: f(t.label, return_inverse=True, return_counts=True),
        lambda f, t: f(t.ties.detach(), dim=0),
        lambda f, t: f(t.label[t.mask]), lambda f, t: f(t.m),
    ],
    "unique_consecutive": [lambda f, t: f(t.label), lambda f, t: f(t.sign, return_counts=True)],
    "bincount": [
        lambda f, t: f(t.label), lambda f, t: f(t.label, minlength=9),
        lambda f, t: f(t.label, weights=t.v.detach().double()),
        lambda f, t: f(t.label[t.mask], t.v[t.mask].detach()),
    ],
    "histc": [lambda f, t: f(t.x.detach(), 4), lambda f, t: f(t.v.detach(), bins=3, min=-1, max=1)],
    **each("median nanmedian", [
        lambda f, t: f(t.x), lambda f, t: f(t.x, 0), lambda f, t: f(t.x, 1), lambda f, t: f(t.c, dim=-1, keepdim=True),
        lambda f, t: f(t.v),
        lambda f, t: f(t.holes), lambda f, t: f(t.holes, dim=0), lambda f, t: f(t.i), lambda f, t: f(t.v[t.mask]),
    ]),
    **each("quantile nanquantile", [
        lambda f, t: f(t.x, 0.3), lambda f, t: f(t.x, 0.5, 0), lambda f, t: f(t.x, 0.5, 1),
        lambda f, t: f(t.x, q=0.25, dim=-1, keepdim=True),
        lambda f, t: f(t.v, torch.tensor([0.1, 0.9], dtype=t.v.dtype)),
        lambda f, t: f(t.x, torch.tensor([0.1, 0.9], dtype=t.x.dtype), 1),
        lambda f, t: f(t.x, torch.tensor(0.1, dtype=t.x.dtype), dim=1), lambda f, t: f(t.holes, 0.4, dim=0),
    ]),
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_gathers(name: str) -> None:
    agree(name, FORMS[name])


@on_ranks(*WORLD_SIZES)
def test_full_tensor() -> None:
    """Rows in the original order, differentiable; every dtype that features, labels and masks come in."""
    for layout in every_layout():
        check(lambda t: whole(t.x) @ t.x.new_ones(t.F), layout)
        check(lambda t: whole(t.x[t.mask]).cumsum(0), layout)
        check(lambda t: whole(t.x[t.mask][t.position[t.mask] > 1]).cumsum(0), layout)
        check(lambda t: whole(t.x[[2, 0, 2]]).cumsum(0), layout)
        check(lambda t: whole(t.x).t() @ whole(t.y) + whole(t.x).mean(), layout)
        check(lambda t: t.x * whole(t.x).mean(0), layout)
        check(lambda t: t.x - whole(t.v[t.only]), layout)
    rows = node_rows()
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
                  torch.float16, torch.bfloat16, torch.float32, torch.float64):  # fmt: skip
        full = (torch.arange(14).view(7, 2) % 3).to(dtype)
        if dtype.is_floating_point:
            full[2], full[5] = -0.0, torch.nan
        assert_same_bits(distribute(full, rows).full_tensor(), full, f"{dtype}")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@on_ranks(2)
def test_evaluators() -> None:
    """OGB's and scikit-learn's metrics give what they give for plain tensors, on every rank."""
    from sklearn.metrics import accuracy_score, f1_score, roc_auc_score

    pytest.importorskip("ogb")
    from ogb.nodeproppred import Evaluator

    def ogb_accuracy(t: Operands) -> object:
        prediction = t.x.argmax(dim=-1, keepdim=True)
        split = {"train": t.mask, "valid": torch.tensor([4, 0, 5]) % t.N, "test": ~t.mask}
        evaluator = Evaluator(name="ogbn-arxiv")
        label = t.label.unsqueeze(1)
        return [evaluator.eval({"y_true": label[i], "y_pred": prediction[i]})["acc"] for i in split.values()]

    def ogb_rocauc(t: Operands) -> object:
        evaluator = Evaluator(name="ogbn-proteins")
        evaluator.num_tasks = t.F
        return evaluator.eval({"y_true": t.m.long(), "y_pred": t.x})["rocauc"]

    def scores(t: Operands) -> object:
        y, prediction = t.label[t.mask].cpu().numpy(), t.x.argmax(1)[t.mask].cpu().numpy()
        score = t.x[:, 0].detach().cpu().numpy()
        return [
            accuracy_score(y, prediction),
            f1_score(y, prediction, average="macro"),
            roc_auc_score(t.m[:, 0].cpu().numpy(), score),
        ]

    for layout in every_layout():
        check(ogb_accuracy, layout)
        check(scores, layout)
        check(lambda t: np.asarray(t.x.detach()).mean(0), layout)
        check(lambda t: np.sqrt(t.p.detach().cpu().numpy()), layout)
    check(ogb_rocauc)


@on_ranks(*WORLD_SIZES)
def test_iteration() -> None:
    """Python's loops see plain rows in the original order, with gradients."""
    for layout in every_layout():
        check(lambda t: torch.tensor([int(max(t.label)) + 1, int(min(t.label)), int(sum(t.label))]), layout)
        check(lambda t: torch.stack([k * row.sum() for k, row in enumerate(t.x)]), layout)
        check(lambda t: torch.stack([a * b.sin() for a, b in zip(t.v, t.x, strict=True)]), layout)
        check(lambda t: torch.stack([*t.x[t.mask], t.x.sum(0)]), layout)
        check(lambda t: sum(row.square().sum() for row in t.x) * t.x.mean(), layout)
        check(lambda t: torch.tensor([*dict(zip(t.label.tolist(), t.mask, strict=True)).values()]), layout)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_representation(workers: Pools, world_size: int) -> None:
    """One rank alone may print a tensor: it talks to nobody."""
    local = LAYOUTS["tall"].parts[world_size].count(0)
    assert workers(world_size).run(prints_alone)[0] == [f"NodeTensor(shape=[7, 3], local rows {local}: "] * 2


def prints_alone() -> list[str]:
    t = Operands("tall", True)
    x, rank = t.x, node_rows().group.rank
    return [text.split("tensor")[0] for text in (repr(x), f"{x}")] if rank == 0 else []


def test_places_of_sorted_types(workers: Pools) -> None:
    """What HeteroLinear asks of sorted types."""
    for world_size in (1, 2):
        assert workers(world_size).run(places_of_types) == [[0, 2, 2, 6, 7]] * world_size


def places_of_types() -> list[int]:
    types = distribute(torch.tensor([0, 0, 2, 2, 2, 2, 3]), node_rows())
    return torch._convert_indices_from_coo_to_csr(types, 4).tolist()


REFUSED: list[Refusal] = [
    (lambda t: t.x.item(), RuntimeError, "cannot be converted to Scalar"),
    (lambda t: bool(t.mask), RuntimeError, "ambiguous"),
    (lambda t: t.x.numpy(), RuntimeError, "requires grad"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)


@on_ranks(2)
def test_elements_that_one_rank_keeps() -> None:
    """The collector of cycles, which an exception's traceback is, runs at another time on each rank."""
    for layout in LAYOUTS:
        x = Operands(layout, True).x.detach()
        some, kept = torch.tensor([4, 1, 2]), [x.flatten()]
        first = [kept[0].full_tensor(), kept[0][some].sum(), kept[0][2:5].sum()]
        if world_group().rank == 1:
            kept.clear()
            gc.collect()
        again = [x.flatten().full_tensor(), x.flatten()[some].sum(), x.flatten()[2:5].sum()]
        assert all(map(torch.equal, again, first)), layout
