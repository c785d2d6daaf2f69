"""Rows one after another, and what is done with such lists: scores of positive and negative pairs, parts of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_torch import (
    WORLD_SIZES,
    Operands,
    Refusal,
    check,
    distribute,
    every_layout,
    graph,
    node_rows,
    ranks_and_names,
    refuse_all,
)
from torch import Tensor
from workers import on_ranks

from pyg_dist.errors import LayoutMismatchError
from pyg_dist.tensor import EdgeTensor, NodeTensor

POSITIVE, NEGATIVE = torch.tensor([[0, 3, 3, 1], [2, 3, 0, 0]]), torch.tensor([[2, 1], [0, 3]])


def scores(t: Operands, pairs: Tensor) -> Tensor:
    return (t.x[pairs[0]] * t.y[pairs[1]]).sum(-1)


def all_scores(t: Operands) -> Tensor:
    return torch.cat([scores(t, POSITIVE), scores(t, NEGATIVE)])


def label(t: Operands) -> Tensor:
    return torch.tensor([1.0, 1, 1, 1, 0, 0]).to(t.x.dtype)


EXPRESSIONS: dict[str, Callable[[Operands], Any]] = {
    "pairs": all_scores,
    "with a plain label": lambda t: F.binary_cross_entropy_with_logits(all_scores(t), label(t)),
    "with an appended label": lambda t: F.binary_cross_entropy_with_logits(
        all_scores(t), torch.cat([torch.ones_like(scores(t, POSITIVE)), torch.zeros_like(scores(t, NEGATIVE))])
    ),
    "with appended zeros": lambda t: all_scores(t) - torch.cat([t.v[POSITIVE[0]], t.v.new_zeros(2)]),
    "twice the same": lambda t: all_scores(t) * all_scores(t),
    "masks": lambda t: torch.cat([t.x[t.mask], t.x[~t.mask], t.y]),
    "nested": lambda t: torch.cat([torch.cat([t.x, t.y]), t.x[:2]]).sum(0),
    "selected": lambda t: torch.cat([t.x, t.y])[[0, t.N + 1, 2 * t.N - 1, 0]],
    "masked": lambda t: torch.cat([t.v, t.u])[torch.arange(2 * t.N) % 3 > 0],
    "its own mask": lambda t: (lambda both: both[both > 0])(torch.cat([t.v, t.u])),
    "there and back": lambda t: torch.cat([t.x, t.y]).chunk(2)[1] * t.y,
    "users and items": lambda t: (lambda users, items: users[[0, 1]] @ t.matrix + items[[1, 0]] @ t.matrix)(
        *t.x.split([2, t.N - 2])
    ),
    "cut from the end of the dimensions": lambda t: [
        *t.x.split(3, dim=-2),
        *t.c.chunk(2, dim=-3),
        *t.x.tensor_split(2, dim=-2),
    ],
    "narrowed": lambda t: [t.x.narrow(0, 1, 3), t.x.narrow(-2, 1, 3), torch.narrow(t.x, dim=-2, start=2, length=1)],
    "of ranks without rows": lambda t: torch.cat([t.x[[2]], t.x[[2, 2]]]) * 2,
    "of nothing": lambda t: torch.cat([t.x[:0], t.x]),
    "flat and empty": lambda t: torch.cat([torch.empty(0).to(t.x.dtype), t.x]),
    "mixed dtypes": lambda t: torch.cat([t.x, t.i]),
    "cubes": lambda t: torch.cat((t.c, t.d)).mean((0, 1)),
    "argmax of an evaluation": lambda t: torch.cat([t.x]).argmax(-1),
}


@on_ranks()
@pytest.mark.parametrize(("world_size", "kind"), ranks_and_names(EXPRESSIONS))
def test_equals_torch(kind: str) -> None:
    for layout in every_layout():
        check(EXPRESSIONS[kind], layout, kind)


@on_ranks(*WORLD_SIZES)
def test_a_mask_over_edges_selects_pairs() -> None:
    data, x = graph("tall"), torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    node = torch.arange(7)
    source, target = torch.cat([node[:-1], node[1:2]]), torch.cat([node[1:], node[:1]])
    z = distribute(x, node_rows())
    pairs = (z[source] * z[target]).sum(-1)
    mask = torch.tensor([True, False, True, True, False, False, True])
    held = mask.to(torch.int64).index_select(0, data.graph.edge_sharding.position).bool()
    over_edges = EdgeTensor.from_local(held, data.graph.edge_sharding)
    for _ in range(2):
        chosen = pairs[over_edges]
        assert isinstance(chosen, NodeTensor)
        torch.testing.assert_close(chosen.full_tensor(), (x[source] * x[target]).sum(-1)[mask])


@on_ranks(*WORLD_SIZES)
def test_normal_distributions() -> None:
    """With the check of their arguments, which asks for all rows at once."""
    full = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
    results = []
    for mean in (full, distribute(full, node_rows())):
        normal = torch.distributions.Normal(mean, mean.exp())
        results.append(normal.log_prob(mean * 0.5))
        with pytest.raises(ValueError, match="to satisfy the constraint"):
            torch.distributions.Normal(mean, mean)
    torch.testing.assert_close(results[1].full_tensor(), results[0])  # type: ignore[attr-defined]


REFUSED: list[Refusal] = [
    (lambda t: all_scores(t) * torch.cat([t.v, t.u]), LayoutMismatchError, "of another graph or selection"),
    (lambda t: torch.cat([t.x, t.y]) + torch.cat([t.x[t.mask], t.y[t.mask]]), LayoutMismatchError, "same rows"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    refuse_all(REFUSED)
