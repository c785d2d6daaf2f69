"""One set of ranks for this folder: its modules are many, and their bodies leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from workers import Workers, pools


@pytest.fixture(scope="package")
def workers() -> Iterator[Callable[[int], Workers]]:
    """A function from a world size to its pool."""
    with pools() as pool_of:
        yield pool_of
