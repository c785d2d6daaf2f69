"""Processes of their own, which keep the device that they load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fake_device
import pytest
from workers import Pools, Workers


@pytest.fixture(scope="session")
def library() -> Path:
    return fake_device.build()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    pools = {size: Workers(size) for size in (1, 2)}
    yield pools.__getitem__
    for pool in pools.values():
        pool.close()
