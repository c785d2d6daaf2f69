"""Training on a device: the CPU's numbers, no tensor on the wrong device, and no step that waits for it.

The device is the one of ``fake_device``. Each case trains twice, on the CPU and there; then warm steps run in which
what a GPU would be waited for raises.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_device
import pytest
import torch
from against_stock import Results, assert_same
from torch import Tensor
from training_cases import CASES, HALO, NUM_CLASSES, NUM_STEPS, Case, Training, graph
from workers import Workers


@contextlib.contextmanager
def staging_may_wait() -> Iterator[None]:
    """Messages pass the host, since no process group carries this device: those copies alone are waited for."""
    from pyg_dist.backend.comm import transport
    from pyg_dist.backend.staging import Stage

    def exempted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with fake_device.exempt():
                return function(*args)

        return run

    with (
        patch.object(Stage, "lift", exempted(Stage.lift)),
        patch.object(Stage, "land", staticmethod(exempted(Stage.land))),
        patch.object(transport.StagedMessages, "_land", exempted(transport.StagedMessages._land)),
    ):
        yield


@patch.dict(os.environ)
def train_there(case: Case, library: Path) -> None:
    os.environ.update(case.setting)
    device = fake_device.load(library)
    trained: list[Results] = []
    for place in ("cpu", device):
        training = Training(case, graph(), place)
        losses = {f"loss {k}": training.step().cpu() for k in range(NUM_STEPS)}
        trained.append({**losses, **{name: p.cpu() for name, p in training.model.state_dict().items()}})
    assert_same(trained[1], trained[0], str(case))
    with fake_device.strict(), staging_may_wait():
        for _ in range(2):
            training.step()


# Alone a rank takes a few ways of its own: nothing travels.
@pytest.mark.parametrize(
    ("case", "world_size"), [*((case, 2) for case in CASES), *((case, 1) for case in CASES[::4])], ids=str
)
def test_training_is_the_cpus_and_waits_for_nothing(
    pools: Callable[[int], Workers], library: Path, world_size: int, case: Case
) -> None:
    pools(world_size).run(train_there, case, library)


def fail_as_planted(library: Path) -> None:
    device = fake_device.load(library)
    training = Training(Case(HALO, "sage"), graph(), device)
    for _ in range(NUM_STEPS):
        training.step()
    mistakes: dict[str, Callable[[Tensor], Any]] = {
        "_local_scalar_dense": lambda out: out * (out.to_local().sum().item() * 0 + 1),
        "nonzero": lambda out: out + out.to_local().nonzero()[0, 0] * 0,
        "aten::equal": lambda out: out * torch.equal(out.to_local(), out.to_local()),
        "nonzero|by a mask": lambda out: out + out.to_local()[out.to_local() > 0].sum() * 0,
        f"from {device} to cpu": lambda out: out * len(out.to_local().detach().cpu().numpy()),
        "same device": lambda out: out + torch.zeros(NUM_CLASSES),
    }
    for words, mistake in mistakes.items():
        with fake_device.strict(), staging_may_wait(), pytest.raises(RuntimeError, match=words):
            training.step(mistake)


def test_what_waits_is_found(pools: Callable[[int], Workers], library: Path) -> None:
    pools(1).run(fail_as_planted, library)
