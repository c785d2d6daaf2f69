"""Indexing: masks, lists of ids, slices; selections of selections, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from against_torch import (
    WORLD_SIZES,
    Expression,
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
from workers import on_ranks

from pyg_dist import NodeTensor
from pyg_dist.errors import AgreementError, DataError, LayoutMismatchError, MixedRowsError

Index = Callable[[Operands], Any]

ROWS: dict[str, Index] = {
    "mask": lambda t: t.mask,
    "computed mask": lambda t: (t.v > 0) & ~t.only,
    "plain mask": lambda t: torch.arange(t.N) % 2 == 0,
    "numpy mask": lambda t: np.arange(t.N) % 2 == 0,
    "list of bool": lambda t: [k != 1 for k in range(t.N)],
    "no row": lambda t: t.v > 99,
    "one row": lambda t: t.only,
    "every row": lambda t: t.v < 99,
    "ids": lambda t: torch.tensor([0, 2, 3]),
    "unsorted ids": lambda t: torch.tensor([3, 0, 2]),
    "repeated ids": lambda t: torch.tensor([3, 0, 3, 3, 1]),
    "negative ids": lambda t: torch.tensor([-1, 0, -3]),
    "int32 ids": lambda t: torch.tensor([3, 0], dtype=torch.int32),
    "list of ids": lambda t: [1, 3, 1],
    "tuple-free range": lambda t: range(1, 4),
    "numpy ids": lambda t: np.array([2, 2, 0], dtype=np.int32),
    "no id": lambda t: [],
    "no tensor id": lambda t: torch.zeros(0, dtype=torch.int64),
    "permutation": lambda t: torch.arange(t.N - 1, -1, -1),
    "slice": lambda t: slice(1, 4),
    "open slice": lambda t: slice(None, -1),
    "stepped slice": lambda t: slice(0, None, 2),
    "empty slice": lambda t: slice(3, 1),
    "whole slice": lambda t: slice(None),
    "ellipsis": lambda t: Ellipsis,
}
# What may follow an index of rows; a list may only where all rows are taken.
WITHIN: list[Index] = [
    lambda t: (0,),
    lambda t: (slice(0, 1),),
    lambda t: (slice(1, None), None),
    lambda t: (None,),
    lambda t: (Ellipsis,),
    lambda t: (Ellipsis, -1),
]
COLUMNS: list[Index] = [
    *WITHIN,
    lambda t: ([0, 2],),
    lambda t: (torch.tensor([1, 1, 0]),),
    lambda t: (torch.arange(t.F) > 0,),
    lambda t: (np.array([0, 1]),),
]


@on_ranks()
@pytest.mark.parametrize(("world_size", "kind"), ranks_and_names(ROWS))
def test_rows(kind: str) -> None:
    """``x[index]``, for outputs and labels alike, and within the selected rows."""
    index = ROWS[kind]
    for layout in every_layout():
        check(lambda t: [t.x[index(t)], t.label[index(t)], t.c[index(t)]], layout, kind, must_distribute=True)
        check(lambda t: (t.x[index(t)].exp() * t.y[index(t)]).sum(), layout, kind)
        check(lambda t: t.x[index(t)] * t.vector - t.x[index(t)].sum(0), layout, kind, must_distribute=True)
        for within in WITHIN:
            check(
                lambda t, within=within: t.x[(index(t), *within(t))],
                layout,
                kind,
                must_distribute=True,
                must_work=False,
            )


@on_ranks(*WORLD_SIZES)
@pytest.mark.parametrize("kind", ["mask", "no row", "one row", "unsorted ids", "repeated ids", "no id", "slice"])
def test_selections_of_selections(kind: str) -> None:
    """Lists count within the selection, masks are selected alike, values and gradients follow."""
    first = ROWS[kind]
    for layout in every_layout():
        plain = Operands(layout, False)
        size = len(plain.x[first(plain)])
        ids = [size - 1, 0, -1, 0, 0] if size else []

        def nested(t: Operands, ids: list[int] = ids, size: int = size) -> list[Any]:
            x, y, other = t.x[first(t)], t.y[first(t)], t.other_mask[first(t)]
            chosen = [x[other], x[ids], x[torch.tensor(ids, dtype=torch.int64)], x[:2], x[x[:, 0] > 0]]
            deeper = [
                x[other][y[other][:, 0] > 0],
                x[ids][y[ids][:, 0] > 0],
                x[ids][[0, 4, 0, -2] if size else []],
                x[:2][y[:2, 0] > 0],
            ]
            return [*chosen, *deeper, x[other] * y[other], (x[ids] * y[ids]).sum(0)]

        check(nested, layout, kind)


ELEMENTS: dict[str, Callable[[Operands], Any]] = {
    "of a matrix": lambda t: t.x[t.m],
    "computed": lambda t: t.x[~(t.y < 0)] * 2,
    "of three dimensions": lambda t: [t.c[t.m[:, : t.c.shape[1]]], t.c[t.c > 0]],
    "none": lambda t: [t.x[t.x > 99], t.x[t.x > 99].sum()],
    "plain": lambda t: t.x[torch.arange(t.N * t.F).view(t.N, t.F) % 3 == 0],
    "of selected rows": lambda t: t.x[t.mask][t.m[t.mask]],
    "of a list": lambda t: t.x[[3, 0, 3]][t.m[[3, 0, 3]]],
    "selected again": lambda t: t.x[t.m][t.y[t.m] > 0],
    "losses": lambda t: [torch.nn.functional.mse_loss(t.x[t.m], t.y[t.m]), (t.x[t.m] - t.y[t.m]).abs().mean()],
    "two equal masks": lambda t: t.x[t.m] * t.y[t.m.clone()],
    "masked_select": lambda t: t.x.masked_select(t.m),
    "one of each row": lambda t: [t.x[hot(t)] - t.y.sum(1), t.y.sum(1) * t.x[hot(t)], t.x[hot(t)] * t.y[hot(t, 1)]],
    "all others of each row": lambda t: t.x[~hot(t)].view(t.N, -1) * t.y[:, 1:] + t.x[hot(t)].view(-1, 1),
    "as many of each selected row": lambda t: of_each(t.x[t.mask], hot(t)[t.mask]),
    "of mixed up labels": lambda t: t.x[t.m] * t.y[torch.arange(t.N).flip(0)][t.m],
    "assigned": lambda t: filled(t.x * 1, t.m, t.y[t.m] * 2),
    "assigned a number": lambda t: filled(t.x * 1, torch.arange(t.N * t.F).view(t.N, t.F) % 3 == 0, 2.0),
    "assigned mixed up rows": lambda t: filled(t.x * 1, t.m, t.y[torch.arange(t.N).flip(0)][t.m]),
    "assigned rows of three": lambda t: filled(t.c * 1, t.m[:, : t.c.shape[1]], t.vector[: t.c.shape[2]]),
}


def hot(t: Operands, shift: int = 0) -> Any:
    """A mask with one element of each row."""
    return torch.nn.functional.one_hot((t.label + shift) % t.F, t.F).bool()


def of_each(x: Any, mask: Any) -> Any:
    return x[~mask].view(x.shape[0], -1).amax(1) - x[mask]


def filled(x: Any, mask: Any, value: Any) -> Any:
    x[mask] = value
    return x


@on_ranks(*WORLD_SIZES)
def test_elements() -> None:
    """Masks with columns, as labels of several tasks have them, some of them missing."""
    for layout in every_layout():
        for name, expression in ELEMENTS.items():
            check(expression, layout, name)
    t = Operands("tall", True)
    missing = ~t.m
    assert t.x[missing]._sharding is t.y[missing]._sharding, "a mask is counted once"


TABLE = torch.tensor([[0, 3], [3, 3], [1, 0], [2, 1], [0, 2]])
PAIRED: dict[str, Callable[[Operands], Any]] = {
    "labels mixed up": lambda t: t.x[t.mask] * t.y[torch.arange(t.N).flip(0)][t.mask],
    "ids of rows": lambda t: [t.x[t.position], t.x[t.position] * t.y, t.v[t.position[t.mask]]],
    "tables of ids": lambda t: [
        t.x[TABLE].prod(1),
        t.x[TABLE.T].prod(0),
        t.v[TABLE],
        t.c[TABLE][:, 0],
        t.x[TABLE[:, None].expand(-1, 3, -1)],
        t.x[t.mask][TABLE % 2],
        t.x[TABLE - 1][:, 1] * t.y[TABLE[:, 0]],
    ],
    "a plain tensor by a mask": lambda t: [t.full[t.mask], t.full[t.mask, 0], torch.arange(t.N)[t.mask]],
    "and its rows beside others": lambda t: (t.full[t.mask] * t.x[t.mask]).sum(0),
    "assigned": lambda t: permuted_column(t),
    "a distance to each of a few": lambda t: torch.cdist(t.x, t.weight[:2, : t.F]),
    "distances of all pairs": lambda t: torch.cdist(t.x, t.y[:, : t.F].sin()),
    "distances of matrices": lambda t: torch.cdist(t.c, t.full.unsqueeze(1)),
    "a plain tensor and its bounds": lambda t: torch.zeros(t.N, t.F).to(t.x.dtype).clamp_(min=t.x),
    "added to plain rows": lambda t: torch.zeros(t.N, t.F).to(t.x.dtype).add_(t.x).sin(),
    "written to plain rows": lambda t: torch.zeros(t.N, t.F).to(t.x.dtype).copy_(t.x).sin(),
}


def permuted_column(t: Operands) -> Any:
    x = t.x * 1
    x[:, 0] = t.y[torch.arange(t.N).flip(0)][:, 0]
    return x


@on_ranks(*WORLD_SIZES)
def test_paired() -> None:
    for layout in every_layout():
        for name, expression in PAIRED.items():
            check(expression, layout, name)


@on_ranks(*WORLD_SIZES)
def test_within_rows() -> None:
    """``x[:, i]``, one row, masks of shape [N, 10], look-ups in plain tables."""
    for layout in every_layout():
        for within in COLUMNS:
            check(lambda t, within=within: t.x[(slice(None), *within(t))], layout, must_distribute=True)
        check(
            lambda t: [
                t.c[:, 0],
                t.c[:, :, 1],
                t.c[:, 0, 1],
                t.c[..., 0],
                t.c[:, [0, 1], [1, 0]],
                t.c[:, [1]],
                t.c[:, None, :, 0],
            ],
            layout,
        )
        check(
            lambda t: [t.c[..., 0, :], t.c[..., [0, 1]], t.x[...], t.x[..., None], t.v[..., None], t.v[:, None]], layout
        )
        check(
            lambda t: [
                t.x[0],
                t.x[-1],
                t.x[1, 2],
                t.c[2, 1],
                t.v[3],
                t.x[0, [0, 2]],
                t.x[torch.tensor(2)],
                t.x[np.int64(1)],
            ],
            layout,
        )
        check(lambda t: t.x - t.x[0] * t.x[-1, 0], layout)
        check(lambda t: [t.x[t.m[:, k]] for k in range(t.F)], layout)
        check(
            lambda t: [t.table[t.label], t.vector[t.label], t.table[t.i % t.F], t.table[t.label[t.mask]]],
            layout,
            must_distribute=True,
        )
        check(lambda t: t.x + t.table[:, : t.F][t.label % t.F][:, : t.F].sum(1, keepdim=True), layout)


FORMS: dict[str, Sequence[Form]] = {
    "__getitem__": [lambda f, t: f(t.x, t.mask), lambda f, t: f(t.x, [1, 0]), lambda f, t: f(t.table, t.label)],
    "index_select": [
        lambda f, t: f(t.x, 0, torch.tensor([3, 0, 3])), lambda f, t: f(t.x, dim=1, index=torch.tensor([1, 0])),
        lambda f, t: f(t.c, -1, torch.tensor([0])), lambda f, t: f(t.table, 0, t.label),
        lambda f, t: f(t.x, 0, torch.tensor(3)), lambda f, t: f(t.c, 1, torch.tensor(0)),
    ],
    "select": [lambda f, t: f(t.x, 1, 0), lambda f, t: f(t.x, 0, 2), lambda f, t: f(t.c, dim=-1, index=-1)],
    **each("index_copy index_copy_", [
        lambda f, t: f(t.x * 2, 0, torch.tensor([3, 0]), t.full[:2]),
        lambda f, t: f(t.x * 2, dim=0, index=torch.tensor([3, 0]), source=t.y[[3, 0]]),
        lambda f, t: f(t.x * 2, -1, torch.tensor([1, 0]), t.y[:, :2]),
    ]),
    **each("index_fill index_fill_", [
        lambda f, t: f(t.x * 2, 0, torch.tensor([3, 0]), 7.0), lambda f, t: f(t.v * 2, 0, torch.tensor([1]), t.scalar),
        lambda f, t: f(t.x * 2, dim=1, index=torch.tensor([1]), value=-1.0),
        lambda f, t: f(t.x * 2, 0, torch.tensor([3, 0, 3]), t.scalar),
        lambda f, t: f(t.x * 2, -1, torch.tensor([1, 1]), t.scalar),
    ]),
    **each("index_put index_put_", [
        lambda f, t: f(t.x * 2, (torch.tensor([3, 0]),), t.full[:2]), lambda f, t: f(t.x * 2, (t.mask,), t.scalar),
        lambda f, t: f(t.x * 2, [torch.tensor([1, -1])], t.full[:2], accumulate=True),
        lambda f, t: f(t.x * 2, [torch.tensor([1, 1])], t.scalar, accumulate=True),
        lambda f, t: f(t.x * 2, (t.x > 0,), t.scalar),
        lambda f, t: f(torch.zeros_like(t.table[:, : t.F]), (t.label,), t.x, accumulate=True),
        lambda f, t: f(torch.zeros(9, t.N, 2).double(), (t.label, t.order[:, 0] - 1), t.x[:, :2], True),
        lambda f, t: f(torch.ones(2, 9), [torch.arange(t.N) % 2, t.label], torch.ones(t.N), accumulate=True),
    ]),
    "masked_select": [lambda f, t: f(t.v, t.mask), lambda f, t: f(t.v, mask=torch.arange(t.N) > 1)],
    **each("nonzero argwhere", [
        lambda f, t: f(t.mask), lambda f, t: f(t.m), lambda f, t: f(t.ties), lambda f, t: f(t.v > 99),
        lambda f, t: f(t.mask[t.other_mask]),
    ]),
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_selection(name: str) -> None:
    agree(name, FORMS[name])


@on_ranks(*WORLD_SIZES)
def test_ids_of_masks() -> None:
    check(lambda t: torch.where(t.mask)[0])
    check(lambda t: torch.nonzero(t.m, as_tuple=True))
    check(lambda t: torch.where(t.m.any(1)))


@on_ranks(1, 3)
def test_selections_are_kept() -> None:
    """A mask and a list are looked up once, and again when their values change, whoever changed them."""
    t = Operands("tall", True)
    assert t.x[t.mask]._sharding is t.label[t.mask]._sharding
    assert t.x[[3, 0]]._sharding is t.label[torch.tensor([3, 0])]._sharding
    mask = t.mask.clone()
    before = t.x[mask]._sharding
    mask[0] = False
    assert t.x[mask]._sharding is not before
    assert t.x[mask].shape[0] == before.size - 1
    array = np.array([3, 0, 1])
    index = torch.from_numpy(array)
    full = Operands("tall", False).x.detach()
    assert torch.equal(t.x[index].full_tensor(), full[[3, 0, 1]])
    array[:] = 5  # behind torch's back: the version of the tensor stays
    assert torch.equal(t.x[index].full_tensor(), full[[5, 5, 5]])
    assert t.y.requires_grad
    with torch.inference_mode():  # what is kept from evaluation serves training
        assert torch.equal(t.x[t.mask.clone()].full_tensor(), full[[0, 2, 3, 5, 6]])
        assert torch.equal(t.y[t.other_mask][[0, -1]].full_tensor(), t.y.full_tensor()[[2, 6]])
    t.y[t.other_mask][[0, -1]].sum().backward()
    assert t.y.grad.sum() == 6


@on_ranks(3)
def test_unseeded_lists() -> None:
    t = Operands("tall", True)
    with pytest.raises(AgreementError, match="Expected the same list of nodes on every rank") as caught:
        t.x[[0, 1, 2 + node_rows().group.rank]]
    assert "\n" not in str(caught.value)
    known = [torch.tensor([0, 1, 2]), torch.tensor([3, 1])]
    for index in known:
        t.x[index]
    with pytest.raises(AgreementError, match="Expected the same list of nodes on every rank"):
        t.x[known[node_rows().group.rank % 2].clone()]
    assert t.x[known[0]]._sharding is t.x[[0, 1, 2]]._sharding


SEVERAL = "with a list of rows and several of places within them is x.flatten(1, 2)[rows, i * x.shape[2] + j]"
REFUSED: list[Refusal] = [
    (lambda t: t.x[:, t.label], MixedRowsError, "within rows by a distributed index is .gather(1, index)"),
    (lambda t: t.c[[0, 1], [0, 1], [0, 1]], MixedRowsError, SEVERAL),
    (lambda t: t.c[[0, 1], :, [0, 1, 2]], DataError, "Expected as many columns as rows, 2 positions"),
    (
        lambda t: t.x[t.mask, [0, 1]],
        DataError,
        "Expected as many columns as rows, 5 positions (got torch.int64 of shape",
    ),
    (lambda t: t.x[[0, 1], t.label], DataError, "Expected as many columns as rows, 2 positions"),
    (lambda t: t.x[..., 0, 0], MixedRowsError, "leaves no dimension for the rows"),
    (lambda t: t.c.unsqueeze(1)[:, [0], :, [1]], MixedRowsError, "not neighbours"),
    (lambda t: t.x[t.c > 0], IndexError, "Expected a mask of x's elements"),
    (lambda t: t.x[torch.ones(t.N + 1, t.F) > 0], IndexError, "Expected a mask of x's elements [7, 3] (got [8, 3])"),
    (lambda t: t.x[torch.ones(t.N - 1, t.F) > 0], IndexError, "Expected a mask of x's elements [7, 3] (got [6, 3])"),
    (lambda t: t.x[t.order], DataError, "one-dimensional bool mask or list of ids (got"),
    (lambda t: t.x[torch.zeros(7)], DataError, "use .bool() or .long()"),
    (lambda t: t.x[torch.zeros(7, dtype=torch.uint8)], DataError, "use .bool() or .long()"),
    (lambda t: t.x[torch.ones(5, dtype=torch.bool)], DataError, "Expected a mask over 7 nodes (got 5 entries)"),
    (
        lambda t: t.x[t.mask][t.mask],
        LayoutMismatchError,
        "Expected a mask with the same rows (got 5 nodes and 7 nodes, of another graph or selection)",
    ),
    (lambda t: t.x[[0, 7]], IndexError, "index 7 is out of bounds for 7 nodes: expected -7 <= index < 7"),
    (lambda t: t.x[[-8]], IndexError, "index -8 is out of bounds"),
    (
        lambda t: torch.zeros(9, t.N - 1).index_put_((t.label, torch.arange(t.N)), torch.ones(t.N), accumulate=True),
        IndexError,
        "an index is out of bounds for dimension 1 with size 6",
    ),
    (
        lambda t: torch.zeros(9, 9).index_put_((t.label, t.order[:, 0] - 11), t.v.float(), accumulate=True),
        IndexError,
        "an index is out of bounds for dimension 1 with size 9",
    ),
    (lambda t: t.x[9], IndexError, "index 9 is out of bounds"),
    (lambda t: t.x[[0, 1], [0, 3]], IndexError, "index 3 is out of bounds for dimension 1 with size 3"),
    (lambda t: t.c[[2], :, [-9]], IndexError, "index -9 is out of bounds for dimension 2"),
    (lambda t: t.x[t.mask][[5]], IndexError, "index 5 is out of bounds for 5 nodes"),
    (lambda t: t.x[::-1], ValueError, "step must be greater than zero"),
    (lambda t: t.x.index_select(1, t.label), MixedRowsError, "by a distributed index would mix rows"),
    (lambda t: t.table.index_select(1, t.label), MixedRowsError, "by a distributed index would mix rows"),
    (lambda t: t.x.masked_select(t.mask), MixedRowsError, "by a mask of other dimensions would mix rows"),
    (lambda t: t.x[t.mask] + t.y[t.other_mask], LayoutMismatchError, "of another graph or selection"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)


@on_ranks(3)
def test_other_graphs() -> None:
    """Two graphs of one size are two graphs."""
    from against_torch import graph

    x = distribute(torch.ones(7, 2), node_rows())
    graph.cache_clear()
    twin = distribute(torch.ones(7, 2), node_rows())
    for expression in (lambda: x + twin, lambda: x[twin[:, 0] > 0], lambda: torch.cat([x, twin], 1)):
        with pytest.raises(LayoutMismatchError):
            expression()
    assert isinstance(x + twin.full_tensor(), NodeTensor)


def places_assigned(t: Operands) -> Any:
    c = t.c * 2
    c[torch.arange(t.N), t.label % 2] = t.x
    c[[3, 0], :, [0, 2]] = t.matrix[:2, :2]
    c[[1, 2], [0, 1]] = t.scalar
    return c


# An element of each row, or one of a dimension.
PAIRS: dict[str, Expression] = {
    "of all": lambda t: t.x[torch.arange(t.N), t.label],
    "by a range": lambda t: t.x[range(t.N), t.label] * t.v,
    "by a mask": lambda t: t.x[t.mask, t.label[t.mask]],
    "of some": lambda t: t.x[torch.tensor([2, 0, 2]), t.label[torch.tensor([2, 0, 2])]],
    "by plain lists": lambda t: t.x[[2, 0, 2], [1, -1, 0]],
    "by a plain list of all": lambda t: t.x[torch.arange(t.N), t.full_label - t.F].log_softmax(0),
    "of a sequence": lambda t: t.c[torch.arange(t.N), t.label % 2],
    "of the last dimension": lambda t: t.c[[2, 0, 2], :, [1, -1, 0]],
    "assigned": lambda t: places_assigned(t),
    "loss": lambda t: -t.x.log_softmax(1)[np.arange(t.N), t.label][t.mask].mean(),
}


@on_ranks(*WORLD_SIZES)
def test_pairs_of_rows_and_columns() -> None:
    for layout in every_layout():
        for name, expression in PAIRS.items():
            check(expression, layout, name)


@on_ranks(*WORLD_SIZES)
def test_columns_of_a_mask_of_nodes() -> None:
    """A matrix of all pairs of nodes, of which a mask of nodes selects columns."""

    def cut(t: Operands) -> Any:
        similar = t.x @ t.y.T
        kept = similar * 1
        kept[:, ~t.mask] = 0
        return [similar[:, t.mask], similar[t.mask][:, t.v > 0], similar[t.mask, t.mask], kept]

    for layout in every_layout():
        check(cut, layout, "columns of a mask")
