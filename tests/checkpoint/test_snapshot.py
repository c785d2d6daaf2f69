"""What a snapshot says, where it is described once and its tensors are the same from step to step, and where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import assert_all_same_bits
from torch import nn

from pyg_dist.checkpoint.snapshot import Description, take


class Trained:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.notes: dict[str, Any] = {"best": [1, 0.5], "mean": torch.tensor(0.0)}

    def step(self) -> None:
        self.model(torch.randn(5, 3)).square().sum().backward()
        self.optimizer.step()

    def things(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "notes": self.notes}


def other_tensors(trained: Trained) -> None:
    """As some optimizers do in each step."""
    for state in trained.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"] + 1


def other_memory(trained: Trained) -> None:
    trained.model[0].weight.data = torch.randn(3, 2).t()


def other_dtype(trained: Trained) -> None:
    trained.model.double()


def momentum_again(trained: Trained) -> None:
    trained.optimizer.state.clear()


def scheduled(trained: Trained) -> None:
    trained.scheduler.step()


def noted(trained: Trained) -> None:
    trained.notes["best"].append(None)


def true_for_one(trained: Trained) -> None:
    trained.notes["best"][0] = True


def another_mean(trained: Trained) -> None:
    trained.notes["mean"] = trained.notes["mean"] + 1


CHANGES: list[Callable[[Trained], None]] = [
    Trained.step, other_tensors, other_memory, other_dtype, momentum_again, scheduled, noted, another_mean,
    true_for_one,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_description_holds_until_something_changes(change: Callable[[Trained], None]) -> None:
    trained, known = Trained(), dict[str, Description]()
    take(trained.things(), is_writer=True, known=known)
    trained.step()
    for _ in range(3):
        found = take(trained.things(), is_writer=True, known=known)
        anew = take(trained.things(), is_writer=True)
        assert found.state == anew.state
        assert found.texts == anew.texts
        names = [name for name in anew.tensors if not name.startswith("$generators")]
        assert {*names} <= found.tensors.keys()
        assert_all_same_bits([found.tensors[n].detach() for n in names], [anew.tensors[n].detach() for n in names])
        change(trained)


def test_what_stays_is_described_once() -> None:
    trained, known = Trained(), dict[str, Description]()
    trained.step()
    take(trained.things(), is_writer=True, known=known)
    before = dict(known)
    trained.step()
    take(trained.things(), is_writer=True, known=known)
    assert {name for name in known if known[name] is before[name]} == {"model", "optimizer", "scheduler"}


def test_names_of_tensors_never_meet() -> None:
    a, b = torch.tensor([1.0]), torch.tensor([2.0])
    known: dict[str, Description] = {}
    for things in ({"x": {"y.z": a, "y": {"z": b}}}, {"x.y": {"z": b}, "x": {"y.z": a}}, {"x": {"y.z": a}, "x.y": [b]}):
        for kept in (None, known):
            tensors = take(things, is_writer=True, known=kept).tensors
            assert sorted(t.item() for name, t in tensors.items() if name[0] == "x") == [1.0, 2.0]
