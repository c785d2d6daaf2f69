"""The harness itself: results by rank, every traceback, no rank left behind, no failure carried over."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from workers import Workers, WorkersError

from pyg_dist.backend.session import session

Pools = Callable[[int], Workers]


@dataclass
class Argument:
    """A class of a test module, as argument and result."""

    value: int


def _add_rank(argument: Argument, *, factor: int = 1) -> Argument:
    return Argument(argument.value + factor * int(os.environ["RANK"]))


def _process() -> int:
    return os.getpid()


def _fail(rank: int, how: str) -> None:
    session.init()
    print(f"rank {session.rank()} was here")
    if session.rank() == rank and how == "raises":
        raise KeyError("broken body")
    if session.rank() == rank and how == "exits":
        raise SystemExit(2)
    if session.rank() == rank and how == "dies":
        os._exit(7)
    dist.all_reduce(torch.ones(1))


def _sleep() -> None:
    time.sleep(1000.0)


def _skip() -> None:
    pytest.skip("not here")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_results_by_rank_from_the_same_processes(workers: Pools, world_size: int) -> None:
    pool = workers(world_size)
    assert pool is workers(world_size)
    expected = [Argument(5 + 2 * rank) for rank in range(world_size)]
    assert pool.run(_add_rank, Argument(5), factor=2) == expected
    processes = pool.run(_process)
    assert len({os.getpid(), *processes}) == world_size + 1
    assert pool.run(_process) == processes


@pytest.mark.parametrize(
    ("how", "words"),
    [("raises", "KeyError: 'broken body'"), ("exits", "SystemExit: 2"), ("dies", "exit code 7")],
)
def test_a_failure_shows_every_rank_and_is_over(workers: Pools, how: str, words: str) -> None:
    pool = workers(3)
    before = pool.run(_process)
    start = time.monotonic()
    with pytest.raises(WorkersError) as caught:
        pool.run(_fail, 1, how)
    assert time.monotonic() - start < 20.0
    report = str(caught.value)
    assert words in report
    assert report.count("was here") == 3
    assert report.count("--- rank") == 3
    assert report.count("all_reduce") >= 2  # where the others stood, or what they raised
    after = pool.run(_process)
    assert not set(after) & set(before)


def test_a_body_that_hangs_is_killed(workers: Pools) -> None:
    pool = workers(2)
    processes = pool.run(_process)
    with pytest.raises(WorkersError, match="took over 1 s") as caught:
        pool.run(_sleep, timeout=1.0)
    assert str(caught.value).count("in _sleep") == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_a_body_may_skip(workers: Pools) -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        workers(2).run(_skip)


def test_only_functions_found_by_name(workers: Pools) -> None:
    with pytest.raises(TypeError, match="module-level"):
        workers(1).run(lambda: None)
