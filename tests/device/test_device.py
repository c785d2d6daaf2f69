"""Training on a device: the CPU's numbers, no tensor on the wrong device, and no step that waits for it.

The device is the one of ``fake_device``. Each case trains twice, on the CPU and there; then warm steps run in which
what a GPU would be waited for raises.
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fake_device
import pytest
import torch
from against_stock import Results, assert_same
from torch import Tensor
from training_cases import BATCHES, CASES, GRID, HALO, NUM_CLASSES, NUM_STEPS, WAITING, Case, Training, graph
from workers import Pools

from pyg_dist.backend.comm.wires.point_to_point import Then
from pyg_dist.backend.comm.wires.staged import StagedWire
from pyg_dist.loader import prefetch


@contextlib.contextmanager
def staging_may_wait() -> Iterator[None]:
    """Messages pass the host, since no process group carries this device: those copies alone are waited for."""

    def exempted(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with fake_device.exempt():
                return function(*args)

        return run

    with (
        patch.object(StagedWire, "_lift", exempted(StagedWire._lift)),
        patch.object(StagedWire, "_land", staticmethod(exempted(StagedWire._land))),
        patch.object(Then, "wait", exempted(Then.wait)),
    ):
        yield


FACTORIES = (
    "arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip


@contextlib.contextmanager
def made_nowhere() -> Iterator[list[str]]:
    """A list of the calls that make a tensor without saying where: on the host, as it happens.

    Functions are replaced: a mode of torch's is left behind where a device's backward runs, in a thread of its own.
    """
    calls: list[str] = []

    def listed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is None and not kwargs.get("pin_memory"):
                frame = traceback.extract_stack(limit=2)[0]
                calls.append(f"torch.{name} at {frame.filename}:{frame.lineno}")
            return function(*args, **kwargs)

        return run

    with contextlib.ExitStack() as stack:
        for name in FACTORIES:
            stack.enter_context(patch.object(torch, name, listed(name, getattr(torch, name))))
        yield calls


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
    with fake_device.strict(), staging_may_wait(), made_nowhere() as made:
        for _ in range(2):
            training.step()
    assert not made, made


def train_on_batches(case: Case, library: Path) -> None:
    """A thread cuts them on the device, and waits for it; what trains does not."""
    device = fake_device.load(library)
    made = prefetch._timed

    def exempted(*args: Any) -> Any:
        with fake_device.exempt():
            return made(*args)

    trained: list[Results] = []
    for place in ("cpu", device):
        training = Training(case, graph(), place)
        loader = training.loader()
        with patch.object(prefetch, "_timed", exempted):
            losses = {f"loss {k}": training.step(batch=batch).cpu() for k, batch in enumerate(loader)}
            trained.append({**losses, **{name: p.cpu() for name, p in training.model.state_dict().items()}})
            if place == device and not (case.layout == GRID and case.model in WAITING):
                with fake_device.strict(), staging_may_wait():
                    for batch in loader:
                        training.step(batch=batch)
    assert_same(trained[1], trained[0], str(case))


SPLIT_COLUMNS = Case({**GRID, "mesh": {"y": 2}}, "epilogue")
"""A norm over columns that two ranks have."""


def alone(cases: list[Case]) -> list[Any]:
    """Alone a rank takes a few ways of its own: nothing travels. Most cases would repeat there what two ranks show."""
    found = enumerate(cases[::2])
    return [pytest.param(case, 1, marks=[] if place % 2 == 0 else pytest.mark.slow) for place, case in found]


@pytest.mark.parametrize(
    ("case", "world_size"), [*((case, 2) for case in (*CASES, SPLIT_COLUMNS)), *alone(CASES)], ids=str
)
def test_training_is_the_cpus_and_waits_for_nothing(pools: Pools, library: Path, world_size: int, case: Case) -> None:
    pools(world_size).run(train_there, case, library)


@pytest.mark.parametrize(("case", "world_size"), [*((case, 2) for case in BATCHES), *alone(BATCHES)], ids=str)
def test_training_on_batches(pools: Pools, library: Path, world_size: int, case: Case) -> None:
    pools(world_size).run(train_on_batches, case, library)


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

    def late(out: Tensor) -> Tensor:
        out.register_hook(lambda grad: grad * torch.ones(()))
        return out

    # What has no dimensions may be mixed: nothing else would tell.
    for mistake in (lambda out: out * torch.ones(()), late):
        with fake_device.strict(), staging_may_wait(), made_nowhere() as made:
            training.step(mistake)
        assert len(made) == 1
        assert made[0].startswith(f"torch.ones at {__file__}")


def test_what_waits_or_is_made_on_the_host_is_found(pools: Pools, library: Path) -> None:
    pools(1).run(fail_as_planted, library)
