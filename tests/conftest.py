"""Fixtures for every test: ranks to run bodies on, and the real graphs where they lie beside the repository."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).resolve().parent
for _folder in (TESTS, TESTS.parent):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

SLOW_FOLDERS = ("benchmarks", "docs", "examples", "release")
TRANSPORT = os.environ.get("PYG_DIST_TEST_TRANSPORT", "gloo")
QUICK_FILES = ("test_generated.py", "test_links.py", "test_where.py")
LONG_FILES = ("test_ops_cuda.py", "test_ops_isa.py", "test_gpu_all.py", "test_examples.py", "test_mpi.py")
"""With tests of a minute or more, from the longest on."""

import bytecode  # noqa: E402, F401
import leftovers  # noqa: E402
import shortcuts  # noqa: E402
from mpirun_ranks import by_mpirun  # noqa: E402
from workers import Pools, forked, pools  # noqa: E402

# There are more processes than processors. A message that arrives must not take the processor from its sender, who
# still holds the lock that gloo's receiving thread would then spin for.
if hasattr(os, "SCHED_BATCH"):
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

# Graphs of tests are small: their convs would run PyG's own code (tests/conv/test_one_rank.py lets them).
os.environ.setdefault("PYG_DIST_STOCK_ELEMENTS", "0")

# torch's store looks up the name of each peer, which takes 5 s whenever a name server does not answer.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files whose tests are all slow where no slow test is asked for: what they import takes seconds."""
    if config.option.markexpr != "not slow" or TESTS not in collection_path.parents:
        return None
    return _is_slow(collection_path) or None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, object, object]:
    """Mark what is slow; xdist's workers begin with what takes longest, for which all would wait at the end."""
    _mark(items)
    chosen = yield
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    long = [[item for item in items if item.path.name == name] for name in LONG_FILES]
    others = [item for item in items if item.path.name not in LONG_FILES]
    ordered: list[pytest.Item] = []
    for number in range(num_workers):  # as "worksteal" deals them out
        size = (len(items) - len(ordered)) // (num_workers - number)
        share = list(itertools.chain(*long[number::num_workers]))
        filled = max(0, size - len(share))
        ordered += share + others[:filled]
        del others[:filled]
    items[:] = ordered + others
    return chosen


def pytest_collection_finish() -> None:
    """Each later collection of garbage passes over all that was imported: it would take a third of a second."""
    gc.collect()
    gc.freeze()


def _mark(items: list[pytest.Item]) -> None:
    """Mark as slow what tests no part of the package, and 2 and 4 ranks of what also runs on 3.

    3 is the smallest number whose ranks have two different peers. Grids need 4 for two axes, so 4 counts by the name
    ``world_size`` alone, not by ``num_ranks``.
    """
    for item in items:
        if TRANSPORT == "mpi" and item.get_closest_marker("torchrun"):
            item.add_marker(pytest.mark.skip(reason="it is about the ranks of torchrun, or their wire"))
        if _is_slow(item.path):
            item.add_marker(pytest.mark.slow)
    sizes: dict[object, set[object]] = defaultdict(set)
    found = [(item, name, size) for item in items for name, size in _num_ranks(item)]
    for item, _, size in found:
        sizes[item.function].add(size)
    for item, name, size in found:
        if 3 in sizes[item.function] and (size == 2 or (size == 4 and name == "world_size")):
            item.add_marker(pytest.mark.slow)


def _is_slow(path: Path) -> bool:
    folder, name = path.relative_to(TESTS).parts[0], path.name
    return folder in SLOW_FOLDERS and name.startswith("test_") and name not in QUICK_FILES


def _num_ranks(item: pytest.Item) -> Iterator[tuple[str, object]]:
    params = item.callspec.params if hasattr(item, "callspec") else {}
    yield from ((name, params[name]) for name in ("world_size", "num_ranks") if name in params)


@pytest.fixture(scope="session")
def workers() -> Iterator[Pools]:
    """A function from a world size to its pool; the pools live as long as the tests.

    Ranks are torchrun's, which send by gloo; those of ``PYG_DIST_TEST_TRANSPORT=mpi`` are mpirun's, which send by MPI.
    """
    starts = {"gloo": forked, "mpi": by_mpirun}
    with pools(starts[TRANSPORT]) as pool_of:
        yield pool_of


@pytest.fixture(scope="session", autouse=True)
def _propagates() -> None:
    shortcuts.take()
    leftovers.write_propagates()


_last: leftovers.State | None = None  # what the last test left, whose copies of namespaces serve the next one


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """A test in this process, too, draws fresh numbers, and fails if it leaves a setting or a patch behind."""
    global _last
    before = leftovers.state(has_caches=False, before=_last)
    leftovers.fresh_generators()
    yield
    _last = leftovers.state(has_caches=False, before=before)
    left = leftovers.difference(before, _last)
    assert not left, f"left behind: {'; '.join(left)}"


@pytest.fixture
def matmul_precision() -> Iterator[Callable[[str], None]]:
    """A function that sets ``torch.backends.mkldnn.matmul.fp32_precision`` until the test ends."""
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    yield functools.partial(setattr, matmul, "fp32_precision")
    matmul.fp32_precision = before


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real graphs, ``../shared/data`` next to the repository."""
    shared = TESTS.parent.parent / "shared"
    if not shared.is_dir():
        pytest.skip("the optional folder ../shared of real graphs is not there")
    return shared / "data"
