"""Lists of rows beside other rows, by position: the two ends of edges, as decoders of link prediction take them."""

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
    node_rows,
    ranks_and_names,
    refuse_all,
)
from torch import Tensor
from torch_geometric.nn import GCNConv
from workers import on_ranks

from pyg_dist.conv import DistributedGCNConv
from pyg_dist.errors import LayoutMismatchError
from pyg_dist.tensor import NodeTensor

SOURCE, TARGET = torch.tensor([0, 3, 3, 1, 2, 0]), torch.tensor([2, 3, 0, 0, 1, 1])
LABEL = torch.tensor([1.0, 0, 1, 1, 0, 0])

PAIRS: dict[str, Callable[[Operands], Any]] = {
    "dot product": lambda t: (t.x[SOURCE] * t.y[TARGET]).sum(-1),
    "distance": lambda t: (t.x[SOURCE] - t.x[TARGET]).pow(2).sum(-1).sqrt().add(1).log(),
    "columns": lambda t: torch.cat([t.x[SOURCE], t.y[TARGET], t.x[TARGET]], dim=-1).relu() @ t.x.new_ones(3 * t.F, 2),
    "stack": lambda t: torch.stack([t.v[SOURCE], t.v[TARGET]], 1),
    "cosine": lambda t: F.cosine_similarity(t.x[SOURCE], t.y[TARGET]),
    "einsum": lambda t: torch.einsum("ef,fg,eg->e", t.x[SOURCE], t.x.new_ones(t.F, t.F), t.y[TARGET]),
    "mean squared error": lambda t: F.mse_loss(t.x[SOURCE], t.y[TARGET]),
    "cross entropy": lambda t: F.binary_cross_entropy_with_logits(
        (t.x[SOURCE] * t.x[TARGET]).sum(-1), LABEL.to(t.x.dtype)
    ),
    "masks": lambda t: torch.where(t.mask[SOURCE] & t.mask[TARGET], t.v[SOURCE], t.v[TARGET]),
    "in place": lambda t: t.x[SOURCE].clone().mul_(t.y[TARGET]),
    "selection of pairs": lambda t: (t.x[SOURCE] * t.y[TARGET])[LABEL > 0],
    "pairs of selections": lambda t: t.x[SOURCE][[4, 1]] * t.x[TARGET][[0, 5]],
    "of a mask": lambda t: t.x[t.v > -99] * t.y[list(range(t.N))[::-1]],
    "all rows and a permutation": lambda t: t.x - t.x[torch.arange(t.N).roll(2)],
    "a permutation and all rows": lambda t: t.x[torch.arange(t.N).roll(2)] - t.y,
    "small integers": lambda t: (t.v[SOURCE] * 9).to(torch.int16) == (t.v[TARGET] * 9).to(torch.int16),
    "nothing": lambda t: t.x[SOURCE[:0]] * t.x[TARGET[:0]],
}


@on_ranks()
@pytest.mark.parametrize(("world_size", "kind"), ranks_and_names(PAIRS))
def test_pairs(kind: str) -> None:
    for layout in every_layout():
        check(PAIRS[kind], layout, kind)


@on_ranks(1, 3)
def test_second_derivatives() -> None:
    """The way back is a move as well, which has its own way back."""

    def penalty(x: Tensor) -> Tensor:
        energy = (x[SOURCE] * x[TARGET]).pow(2).sum()
        (grad,) = torch.autograd.grad(energy, x, create_graph=True)
        return grad.pow(2).sum()

    full = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = full.clone().requires_grad_()
    got = distribute(full, node_rows()).requires_grad_()
    for x in (want, got):
        penalty(x).backward()
    torch.testing.assert_close(got.grad.full_tensor(), want.grad, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr]


@on_ranks(*WORLD_SIZES)
def test_permuted_features() -> None:
    """``conv(x[perm], edge_index)``: the corruption of Deep Graph Infomax; ``x[perm][row]``."""
    from against_torch import graph

    data = graph("tall")
    node = torch.arange(7)
    edge_index = torch.stack([torch.cat([node[:-1], node[1:2]]), torch.cat([node[1:], node[:1]])])
    full = torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3])
    torch.manual_seed(2)
    stock = GCNConv(3, 2).double()
    ours = DistributedGCNConv(3, 2).double()
    ours.load_state_dict(stock.state_dict())
    x, y = full.clone().requires_grad_(), distribute(full, node_rows()).requires_grad_()
    want, got = stock(x[order], edge_index), ours(y[order], data.edge_index)
    assert isinstance(got, NodeTensor)
    torch.testing.assert_close(got.full_tensor(), want, rtol=1e-12, atol=1e-12)
    for out in (want, got):
        out.pow(2).sum().backward()
    torch.testing.assert_close(y.grad.full_tensor(), x.grad, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr]
    torch.testing.assert_close(ours.lin.weight.grad, stock.lin.weight.grad, rtol=1e-12, atol=1e-12)
    for end in (0, 1):
        at_ends = (y[order] + y)[data.edge_index[end]]
        torch.testing.assert_close(at_ends.full_tensor(), (x[order] + x)[edge_index[end]], rtol=1e-12, atol=1e-12)


REFUSED: list[Refusal] = [
    (lambda t: t.x[SOURCE] * t.x[TARGET[:-1]], LayoutMismatchError, "of another graph or selection"),
    (lambda t: t.x[SOURCE] * t.x, LayoutMismatchError, "of another graph or selection"),
    (lambda t: t.x[t.mask] * t.x[t.other_mask], LayoutMismatchError, "of another graph or selection"),
]


@on_ranks(1, 3)
def test_refused() -> None:
    """Other numbers of rows; and two masks, whose rows have no order that a script would have meant."""
    refuse_all(REFUSED)
