"""Products of matrices and tensors: row by row, or summed over rows."""

from __future__ import annotations

from collections.abc import Sequence

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
    each,
    every_layout,
    ranks_and_names,
    refuse_all,
)
from workers import on_ranks

from pyg_dist.errors import LayoutMismatchError, MixedRowsError


def three(t: Operands) -> torch.Tensor:
    return torch.stack([t.v, t.u, t.v * t.u], 1)


MATRIX: list[Form] = [lambda f, t: f(t.x, t.matrix)]
BATCHED: list[Form] = [
    lambda f, t: f(t.c, t.d.transpose(1, 2)),
    lambda f, t: f(t.c, t.full.unsqueeze(-1)),
    lambda f, t: f(t.full.unsqueeze(1), t.d.mT),
]
VECTOR: list[Form] = [lambda f, t: f(t.x, t.vector)]
FORMS: dict[str, Sequence[Form]] = {
    **each("matmul __matmul__", [
        *MATRIX, *BATCHED, *VECTOR, lambda f, t: f(t.c, t.matrix), lambda f, t: f(t.c, t.matrix.unsqueeze(0)),
        lambda f, t: f(t.x, t.matrix[:, :1].expand(-1, 2)), lambda f, t: f(t.x[t.only], t.matrix),
    ]),
    "__rmatmul__": [lambda f, t: f(t.matrix, t.x), lambda f, t: f(t.c.mT, t.d), lambda f, t: f(t.vector, t.x)],
    "mm": MATRIX,
    "spmm": MATRIX,
    "mv": VECTOR,
    "bmm": BATCHED,
    "addmm": [
        lambda f, t: f(t.c[:, 0], t.x, t.matrix), lambda f, t: f(t.matrix[0], t.x, t.matrix, beta=0.3, alpha=-2),
        lambda f, t: f(t.full, t.x, mat2=t.weight.mT),
        lambda f, t: f(t.x.new_full((4,), torch.nan), t.x, t.matrix, beta=0),
    ],
    **each("dot vdot inner", [
        lambda f, t: f(t.v, t.u), lambda f, t: f(t.v, t.full_v), lambda f, t: f(t.full_v, t.u),
        lambda f, t: f(t.label, t.position),
    ]),
    "cross": [
        lambda f, t: f(three(t), three(t).sin(), dim=1), lambda f, t: f(three(t), t.vector[:1].expand(1, 3), dim=-1),
    ],
    "fill_diagonal_": [
        lambda f, t: f(t.x, 2.0), lambda f, t: f(t.x, 0.5, wrap=True), lambda f, t: f(t.x @ t.y.T, fill_value=1.0),
        lambda f, t: f(t.m, True),
    ],
    "einsum": [
        lambda f, t: f("nf,ng->fg", t.x, t.y), lambda f, t: f("nf,fg->ng", t.x, t.matrix), lambda f, t: f("nf->f", t.x),
        lambda f, t: f("nf->", t.x), lambda f, t: f("nhf,nhf->nh", t.c, t.d), lambda f, t: f("nf,nf->n", t.x, t.full),
        lambda f, t: f("nf,ng->fg", t.full, t.y), lambda f, t: f("fg, nf -> n", t.matrix, t.x),
        lambda f, t: f("nhf,n->nfh", [t.c, t.v]),
        lambda f, t: f("n...,n->n...", t.c, t.v), lambda f, t: f("nf,->nf", t.x, t.scalar),
        lambda f, t: f("n,n->", t.v, t.u),
        lambda f, t: f("nf,hf,ng->hg", t.x, t.weight, t.y),
        lambda f, t: f("nf,mf->nm", t.x, t.y), lambda f, t: f("nf,mf->mn", t.x, t.full).T,
        lambda f, t: f("nf,ng", t.x, t.y),
        lambda f, t: f("nf->fn", t.x).T, lambda f, t: f("...f->f", t.x), lambda f, t: f("nf", t.x).T,
        lambda f, t: f("nm,mf->nf", f("nf,mf->nm", t.x, t.y).sigmoid(), t.x), lambda f, t: f("fg,nf", t.matrix, t.x).T,
        lambda f, t: f("nhf,mhf->hnm", t.c, t.d).softmax(-1).sum(0), lambda f, t: f("nf,mf,n->m", t.x, t.y, t.v),
    ],
}  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "name"), ranks_and_names(FORMS))
def test_products(name: str) -> None:
    agree(name, FORMS[name])


TRANSPOSED: dict[str, Expression] = {
    "Gram matrix": lambda t: t.x.T @ t.x,
    "of two": lambda t: torch.mm(t.x.t(), t.y),
    "of a mean": lambda t: t.x.mT @ (t.y - t.y.mean(0)) / t.N,
    "with a vector": lambda t: t.x.T @ t.v,
    "of vectors": lambda t: t.v @ t.u * torch.matmul(t.full_v, t.v),
    "of a number for each row": lambda t: torch.matmul(t.v, t.x) + t.full_v @ t.y + t.v @ t.full,
    "of edges' numbers": lambda t: t.v[t.only] @ (t.x[t.only] - t.y[t.only]).square().sum(dim=1),
    "as it was": lambda t: t.x.transpose(0, 1).reshape(t.F, -1).T * t.x.T.contiguous().view(t.F, t.N).T,
    "with plain rows": lambda t: t.x.transpose(1, 0) @ t.full,
    "Hermitian": lambda t: t.x.H @ t.y + t.x.mH @ t.y,
    "of a selection": lambda t: t.x[t.mask].T @ t.y[t.mask],
    "of edges": lambda t: torch.matmul(t.x[t.only].swapaxes(0, -1), t.y[t.only]),
    "all pairs": lambda t: (t.x @ t.y.t()).sigmoid(),
    "diagonal of pairs": lambda t: (t.x @ t.y.T).diag() + (t.y @ t.x.T).diagonal(),
    "trace of pairs": lambda t: torch.trace(t.x @ t.y.T),
    "by name": lambda t: torch.mm(mat2=t.y, input=t.x.T),
    "all by name": lambda t: torch.matmul(other=t.y.T, input=t.x),
    "all pairs of lists": lambda t: t.c @ t.x.T,
    "attention to all": lambda t: torch.softmax(t.x @ t.y.T, dim=-1) @ torch.cat([t.x, t.column], 1),
    "attention of some to some": lambda t: (t.x[t.mask] @ t.y[t.only].T).tanh() @ t.x[t.only],
    "by heads": lambda t: torch.matmul(t.c.unsqueeze(2), t.gates[: 2 * t.F].view(2, t.F, t.F)).squeeze(2),
    "pairs of all with some": lambda t: torch.matmul(t.x, t.y[t.mask].T),
    "plain with all": lambda t: (t.weight @ t.x.T).T * t.N,
    "there and back": lambda t: t.x.T.T + t.x.t().transpose(0, 0).t(),
    "vector with all": lambda t: t.vector @ t.x.T,
    "whole": lambda t: t.x.T.full_tensor() if hasattr(t.x, "full_tensor") else t.x.T,
    "of a list": lambda t: t.v.t() * t.v.T,
    "shapes": lambda t: t.x * (t.x.T.shape[1] + len(t.x.T) + t.x.T.numel() + t.x.t().dim()) / t.N,
    "correlation": lambda t: (lambda a, b: a.T @ b / t.N)(
        *((x - x.mean(0)) / (x.std(0) + 1) for x in (t.x, t.y))
    ),
}  # fmt: skip


PLAIN_FIRST: dict[str, Expression] = {
    "sums of rows": lambda t: t.full.T @ t.x,
    "by name": lambda t: torch.mm(mat2=t.x, input=t.full.T),
    "of neighbours": lambda t: t.x + (t.full @ t.full.T) @ t.x,
    "of neighbours' numbers": lambda t: t.v * ((t.full @ t.full.T) @ t.u),
    "of selected ones": lambda t: t.full[: t.x[t.mask].shape[0]].T @ t.x[t.mask],
    "a vector": lambda t: t.full_v @ t.x + t.v @ t.x + t.v @ t.full,
    "a number": lambda t: t.full_v @ t.v + t.v @ t.u + t.v @ t.full_v,
    "with a vector": lambda t: t.full.T @ t.v,
    "sparse": lambda t: t.full.detach().T.to_sparse() @ t.x,
    "rows last, sparse": lambda t: t.x.T @ (t.full @ t.full.T).detach().to_sparse() @ t.y,
    "rows last, two sparse": lambda t: (t.full.detach().T.to_sparse() @ t.x) @ (t.x.T @ t.y),
}  # fmt: skip


@on_ranks(*WORLD_SIZES)
def test_plain_matrix_first() -> None:
    """A script's dense adjacency matrix, assignments to clusters, weights of nodes."""
    for name, expression in PLAIN_FIRST.items():
        for layout in every_layout():
            check(expression, layout, name)


@on_ranks(*WORLD_SIZES)
def test_transposed() -> None:
    """Contrastive methods' correlations of columns, decoders of all pairs."""
    for name, expression in TRANSPOSED.items():
        for layout in every_layout():
            check(expression, layout, name)


@on_ranks(*WORLD_SIZES)
def test_linear_attention() -> None:
    """Attention of all nodes to all nodes in linear time: a sum over rows that meets the rows again."""

    def attention(t: Operands) -> torch.Tensor:
        query, key = t.c / t.c.norm(p=2), t.d / t.d.norm(p=2)
        value = torch.stack([t.x, t.y], 1)
        context = torch.einsum("nhm,nhd->hmd", key, value)
        numerator = torch.einsum("nhm,hmd->nhd", query, context) + len(t.x) * value
        denominator = torch.einsum("nhm,hm->nh", query, torch.einsum("nhm->hm", key)) + len(t.x)
        return (numerator / denominator.unsqueeze(-1)).mean(1)

    for layout in ("tall", "square"):
        check(attention, layout)


NO_FIT = "of rows expected two matrices or vectors whose shapes fit (got ["
EQUATION = "expected a term for each operand, and a letter for each of its dimensions (got '"
REFUSED: list[Refusal] = [
    (lambda t: torch.cross(three(t), three(t)), MixedRowsError, "torch.cross without 'dim' may take the rows"),
    (lambda t: torch.linalg.cross(three(t), three(t), dim=0), MixedRowsError, "cross along 0 would mix rows"),
    (lambda t: t.weight @ t.x, LayoutMismatchError, NO_FIT),
    (lambda t: torch.tensor(2.0) @ t.x, LayoutMismatchError, NO_FIT),
    (lambda t: t.full @ t.x, LayoutMismatchError, NO_FIT),
    (lambda t: t.x @ t.y, LayoutMismatchError, NO_FIT),
    (lambda t: t.v @ t.matrix, LayoutMismatchError, NO_FIT),
    (lambda t: torch.mm(t.weight, t.x), LayoutMismatchError, NO_FIT),
    (lambda t: t.x @ t.gates.view(4, t.F, t.F), LayoutMismatchError, NO_FIT),
    (
        lambda t: torch.bmm(t.c, t.gates.view(4, t.F, t.F)),
        LayoutMismatchError,
        "expected a plain operand with 1 or 7 rows",
    ),
    (lambda t: torch.inner(t.x, t.y), MixedRowsError, "expected one dimension (got 2): use torch.einsum"),
    (lambda t: torch.einsum("nf,nf->f", t.x), MixedRowsError, EQUATION),
    (lambda t: torch.einsum("nn->n", t.x[:, :1].expand(-1, 7)), MixedRowsError, EQUATION),
    (lambda t: torch.einsum("nf,ng->fg", t.x, t.weight), LayoutMismatchError, "operand 1 to have 7 rows (got shape"),
    (lambda t: torch.addmm(t.x, t.weight, t.x), LayoutMismatchError, NO_FIT),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)
