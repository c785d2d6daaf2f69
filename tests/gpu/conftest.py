"""Tests for a machine with a GPU: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from gpu_trial import IS_TRIAL
from workers import Pools, Workers, forked, spawned

from pyg_dist.backend.ops import library


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU, or the CPU in its place."""
    if IS_TRIAL:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    assert library.no_cuda() is None, library.no_cuda()
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def size() -> int:
    """Edges of a hub; ``PYG_DIST_GPU_TESTS_SIZE`` asks for others, for instance under a sanitizer."""
    return int(os.environ.get("PYG_DIST_GPU_TESTS_SIZE", 2_000 if IS_TRIAL else 1_000_000))


@pytest.fixture(scope="module")
def pools(device: torch.device) -> Iterator[Pools]:
    """Processes of their own, which start the GPU; without one they are forked (``test_nccl`` has one that is not)."""
    made = {size: Workers(size, forked if IS_TRIAL else spawned) for size in (1, 2, 4)}
    yield made.__getitem__
    for pool in made.values():
        pool.close()
