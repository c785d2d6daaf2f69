"""What one rank sets otherwise in training is named by the next sums; what ranks may set by themselves is no error."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from random_graphs import random_graph
from torch import Tensor, nn
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.conv import DistributedGCNConv as GCNConv
from pyg_dist.errors import AgreementError

LAYOUTS = [{"partition": "random"}, {"layout": "grid"}]
N, FEATURES, CLASSES = 40, 5, 3
EPOCHS = 4


def odd() -> bool:
    """Whether this is the rank that goes astray."""
    return pyg_dist.rank() == 1


class Net(nn.Module):
    """Two layers, and what can be set of them."""

    def __init__(self, num_layers: int = 2, dropout: float = 0.0, scale: float = 1.0, name: str = "convs") -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [FEATURES] + [6] * (num_layers - 1)
        self.name = name
        self.add_module(name, nn.ModuleList(map(GCNConv, widths, [*widths[1:], CLASSES])))
        self.dropout = nn.Dropout(dropout)
        self.scale = scale
        self.register_buffer("shift", torch.zeros(CLASSES))
        self.rank = pyg_dist.rank()  # a script's own
        self.double()

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        *first, last = getattr(self, self.name)
        for conv in first:
            x = self.dropout(conv(x, edges).relu())
        out = last(x, edges)
        return out * self.scale + self.shift  # type: ignore[no-any-return]


Change = Callable[[nn.Module, Any], object]


def train(
    data: Any,
    model: nn.Module | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    before: Change = lambda model, optimizer: None,
    change: Callable[[Tensor, nn.Module], Tensor] = lambda loss, model: loss,
    after: Change = lambda model, optimizer: None,
    clears: Callable[[], bool] = lambda: True,
    steps: Callable[[], bool] = lambda: True,
) -> None:
    """Some epochs, into which a case reaches at one of their places."""
    model = model or Net()
    stepping = optimizer(model.parameters(), lr=0.05)
    for _ in range(EPOCHS):
        before(model, stepping)
        if clears():
            stepping.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        change(loss, model).backward()
        after(model, stepping)
        if steps():
            stepping.step()
    data.y.sum()


def penalty(loss: Tensor, model: nn.Module) -> Tensor:
    return loss + 0.1 * sum(p.square().sum() for p in model.parameters()) if odd() else loss


def evaluate(model: nn.Module, optimizer: Any) -> None:
    if pyg_dist.is_main():
        model.eval()


def freeze(model: nn.Module, optimizer: Any) -> None:
    next(model.parameters()).requires_grad_(not odd())


def schedule(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if odd():
        optimizer.param_groups[0]["lr"] *= 0.5


def clip(model: nn.Module, optimizer: Any) -> None:
    if odd():
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def reweigh(model: nn.Module, optimizer: Any) -> None:
    model.convs[0].add_self_loops = not odd()


def decayed(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, weight_decay=0.1 * odd())


def other(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return (torch.optim.SGD if odd() else torch.optim.Adam)(parameters, lr=lr)


def half(parameters: Any, lr: float) -> torch.optim.Optimizer:
    parameters = [*parameters]
    return torch.optim.SGD(parameters[: 1 if odd() else None], lr=lr)


def functional_dropout(data: Any, p: float, training: bool = True) -> None:
    F.dropout(data.x, p, training).sum()


# What each does, and what the error says is not the same.
CASES: dict[str, tuple[Callable[[Any], object], str]] = {
    "other names": (lambda d: train(d, Net(name="layers" if odd() else "convs")), "model on every rank (got Net"),
    "another layer count": (lambda d: train(d, Net(3 if odd() else 2)), "model on every rank (got Net"),
    "another dropout": (lambda d: train(d, Net(dropout=0.6 if odd() else 0.5)), "(got Net.dropout.p 0.5 on rank 0"),
    "eval under is_main()": (lambda d: train(d, before=evaluate), "(got Net.training False on rank 0, True on rank 1)"),
    "frozen parameters": (lambda d: train(d, before=freeze), "requires_grad True on rank 0, False on rank 1"),
    "another option": (lambda d: train(d, before=reweigh), "add_self_loops True on rank 0, False on rank 1"),
    "another dtype": (lambda d: train(d, Net().float() if odd() else Net()), "model on every rank (got Net"),
    "a number drawn by rank": (
        lambda d: train(d, Net(scale=random.Random(int(odd())).random())), "number on every rank (got 0.8444",
    ),
    "a whole number": (lambda d: (d.x * (1 + odd())).sum(), "number on every rank (got 1.0 on rank 0, 2.0 on rank 1)"),
    "numpy's number": (lambda d: (d.x / np.float64(2 + odd())).sum(), "number on every rank (got 2.0"),
    "in place": (lambda d: d.x.clone().mul_(2 + odd()).sum(), "number on every rank (got 2.0"),
    "a temperature": (lambda d: (d.x / (1.5 + odd())).softmax(1).square().sum(), "number on every rank (got 1.5"),
    "a slope": (lambda d: F.leaky_relu(d.x, 0.1 + odd()).sum(), "number on every rank (got 0.1"),
    "p of a function": (lambda d: functional_dropout(d, 0.5 + 0.1 * odd()), "number on every rank (got 0.5"),
    "a function's mode": (lambda d: functional_dropout(d, 0.5, not odd()), "number on every rank (got 1.0"),
    "a loss that is NaN": (
        lambda d: train(d, change=lambda loss, _: loss * (float("nan") if odd() else 1)), " on rank 0, nan on rank 1)",
    ),
    "a constant in the loss": (lambda d: train(d, change=lambda loss, _: loss + odd()), "loss on every rank (got 1."),
    "a penalty on one rank": (lambda d: train(d, change=penalty), "loss on every rank (got 1."),
    "a loss scaled by rank": (
        lambda d: train(d, change=lambda loss, _: loss * (pyg_dist.rank() + 1)), "loss on every rank (got 1.",
    ),
    "another weight decay": (
        lambda d: train(d, optimizer=decayed), "optimizer on every rank (got weight_decay 0.0 on rank 0, 0.1 on rank 1",
    ),
    "another optimizer": (lambda d: train(d, optimizer=other), "optimizer on every rank (got Adam on rank 0, SGD"),
    "other parameters": (lambda d: train(d, optimizer=half), "number of parameters 4 on rank 0, 1 on rank 1"),
    "a scheduler on one rank": (lambda d: train(d, after=schedule), "lr 0.05 on rank 0, 0.025 on rank 1"),
    "clipped on one rank": (lambda d: train(d, after=clip), "gradient float64 ["),
    "zero_grad on one rank": (lambda d: train(d, clears=odd), "gradient float64 ["),
    "step on one rank": (lambda d: train(d, steps=odd), "steps of its optimizers 0 on rank 0, 1 on rank 1"),
}  # fmt: skip


def differing(options: dict[str, Any]) -> dict[str, str]:
    data = pyg_dist.DistributedData(random_graph(N, 160, FEATURES, CLASSES, seed=2), **options)
    found = {}
    for name, (case, _) in CASES.items():
        found[name] = "no error"
        try:
            case(data)
        except AgreementError as error:
            found[name] = error.message
    return found


@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_what_one_rank_sets_otherwise_is_named(workers: Pools, options: dict[str, Any]) -> None:
    for messages in workers(2).run(differing, options):
        for name, (_, what) in CASES.items():
            message = messages[name]
            assert message.startswith("Expected the same "), (name, message)
            assert what in message, (name, message)
            assert " at test_training_state.py:" in message, (name, message)
            assert "\n" not in message


class Reader(nn.Module):
    """A script's own layer, which knows what only its rank knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(FEATURES, CLASSES).double()
        self.weight_of_rank, self.reports = float(pyg_dist.rank()), pyg_dist.is_main()

    def forward(self, x: Tensor, edges: Any) -> Tensor:
        return self.conv(x, edges)  # type: ignore[no-any-return]


@on_ranks(2)
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_what_ranks_may_do_by_themselves(options: dict[str, Any]) -> None:
    """What ranks may do by themselves, for more steps than parameters wait for their turn."""
    data = pyg_dist.DistributedData(random_graph(N, 160, FEATURES, CLASSES, seed=2), **options)
    model, own = Reader(), nn.Linear(FEATURES, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    of_own = torch.optim.SGD(own.parameters(), lr=0.1 * (1 + odd()))
    for epoch in range(9):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        normed = F.batch_norm(model(data.x, data.edge_index), None, None, training=True)
        normed.to_local().square().sum().backward()  # the same, behind sums of all ranks' rows
        local = out.detach().to_local().requires_grad_()
        (local.sum() * (1 + odd())).backward()  # a loss of this rank's rows alone
        own(torch.full((3, FEATURES), float(odd()), dtype=torch.float64)).sum().backward()  # a model of this rank's
        of_own.step()
        if odd():
            own.eval()
        if epoch % 2 == odd():
            data.x * random.random()  # nobody else needs it
        optimizer.step()
    with torch.no_grad():
        sums = model(data.x, data.edge_index).sum().view(1)
    everyone = torch.tensor(pyg_dist.backend.comm.group.world_group().gather_counts(int(1e6 * sums)))
    assert len(everyone.unique()) == 1
