"""Training on a GPU: the CPU's numbers, warm steps that wait for nothing, and ranks that share the GPU."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch
from against_stock import Results, assert_same
from gpu_trial import IS_TRIAL
from training_cases import BATCHES, CASES, NUM_STEPS, Case, Training, graph
from workers import Pools

pytestmark = pytest.mark.gpu

SHARED = [case for case in CASES if case.model in ("sage", "gcn", "gat", "labels") and not case.setting]
"""For several ranks on the one GPU, whose messages pass host memory."""


@patch.dict(os.environ)
def train_there(case: Case, place: str, waits: bool) -> None:
    """``waits``: whether messages make steps wait."""
    os.environ.update(case.setting)
    trained: list[Results] = []
    for where in ("cpu", place):
        training = Training(case, graph(), where)
        losses = {f"loss {k}": training.step().cpu() for k in range(NUM_STEPS)}
        trained.append({**losses, **{name: p.cpu() for name, p in training.model.state_dict().items()}})
    assert_same(trained[1], trained[0], str(case))
    if place == "cuda" and not waits:
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                training.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("case", CASES[::8] if IS_TRIAL else CASES, ids=str)
def test_one_rank(pools: Pools, device: torch.device, case: Case) -> None:
    pools(1).run(train_there, case, device.type, waits=False)


def train_on_batches(case: Case, place: str) -> None:
    trained: list[Results] = []
    for where in ("cpu", place):
        training = Training(case, graph(), where)
        losses = {f"loss {k}": training.step(batch=batch).cpu() for k, batch in enumerate(training.loader())}
        trained.append({**losses, **{name: p.cpu() for name, p in training.model.state_dict().items()}})
    assert_same(trained[1], trained[0], str(case))


@pytest.mark.parametrize("case", BATCHES[::3] if IS_TRIAL else BATCHES, ids=str)
def test_batches_that_are_cut_there(pools: Pools, device: torch.device, case: Case) -> None:
    pools(1).run(train_on_batches, case, device.type)


@pytest.mark.parametrize("world_size", [2] if IS_TRIAL else [2, 4])
@pytest.mark.parametrize("case", SHARED[::4] if IS_TRIAL else SHARED, ids=str)
def test_ranks_that_share_a_gpu(pools: Pools, device: torch.device, world_size: int, case: Case) -> None:
    pools(world_size).run(train_there, case, device.type, waits=True)
