"""The harness itself: results by rank, every traceback, no rank left behind, no failure carried over."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import forked_python
import numpy as np
import pytest
import torch
import torch.distributed as dist
from workers import Pools, WorkersError, pools

from pyg_dist import DistributedData
from pyg_dist.backend import ops
from pyg_dist.backend.session import session
from pyg_dist.conv import fast_paths
from pyg_dist.graph.protocol import Norm


@dataclass
class Argument:
    """A class of a test module, as argument and result."""

    value: int


def _add_rank(argument: Argument, *, factor: int = 1) -> Argument:
    session.init()
    return Argument(argument.value + factor * session.rank())


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


def _work(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def _leave(what: str) -> None:
    session.init()
    keeper = torch.ones(3)
    {
        "environment variable PYG_DIST_BITS": lambda: os.environ.update(PYG_DIST_BITS="2"),
        "the default dtype": lambda: torch.set_default_dtype(torch.float64),
        "the number of threads": lambda: torch.set_num_threads(3),
        "grad mode": lambda: torch.set_grad_enabled(False),
        "warnings' filters": lambda: warnings.simplefilter("ignore"),
        "modules that cannot be imported": lambda: sys.modules.update(mpi4py=None),  # type: ignore[arg-type]
        "the session's options": lambda: (session.shutdown(), session.init(timeout=timedelta(minutes=1))),
        "pyg_dist.backend.ops.spmm_csr": lambda: setattr(ops, "spmm_csr", print),
        "torch.distributed.all_reduce": lambda: setattr(dist, "all_reduce", print),
        "pyg_dist.data.distributed_data.DistributedData.traffic": lambda: setattr(DistributedData, "traffic", None),
        "test_workers.KEPT is another": lambda: globals().update(KEPT=[keeper]),
        "pyg_dist.conv.fast_paths.NORMS": lambda: fast_paths.NORMS.update({int: Norm.SUM}),
    }[what]()


KEPT: list[torch.Tensor] = []
LEFT = [
    "environment variable PYG_DIST_BITS", "the default dtype", "the number of threads", "grad mode",
    "warnings' filters", "modules that cannot be imported", "the session's options", "pyg_dist.backend.ops.spmm_csr",
    "torch.distributed.all_reduce", "pyg_dist.data.distributed_data.DistributedData.traffic",
    "test_workers.KEPT is another", "pyg_dist.conv.fast_paths.NORMS",
]  # fmt: skip


def _part() -> None:
    session.init()
    if session.rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def _draw() -> list[float]:
    import random

    return [float(torch.rand(1)), float(np.random.random()), random.random()]


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
    [
        ("raises", "KeyError: 'broken body'"),
        pytest.param("exits", "SystemExit: 2", marks=pytest.mark.slow),
        pytest.param("dies", "exit code 7", marks=pytest.mark.slow),
    ],
)
def test_a_failure_shows_every_rank_and_is_over(workers: Pools, how: str, words: str) -> None:
    pool = workers(3)
    before = pool.run(_process)
    with pytest.raises(WorkersError) as caught:
        pool.run(_fail, 1, how)
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
    with pytest.raises(WorkersError, match="hung \\(no progress for 3 s") as caught:
        pool.run(_sleep, patience=3.0)
    assert str(caught.value).count("in _sleep") == 2
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


@pytest.mark.slow
def test_a_body_that_works_on_does_not_hang(workers: Pools) -> None:
    workers(1).run(_work, 3.0, patience=2.0)


@pytest.mark.parametrize("what", LEFT)
def test_what_a_body_leaves_behind_is_named(workers: Pools, what: str) -> None:
    pool = workers(1)
    with pytest.raises(WorkersError, match=f"_leave left behind: {re.escape(what)}"):
        pool.run(_leave, what)
    pool.run(_process)


def test_ranks_at_different_collectives_are_told(workers: Pools) -> None:
    pool = workers(2)
    pool.run(session.init)
    with pytest.raises(WorkersError, match="_part left its ranks in different collectives"):
        pool.run(_part, patience=5.0)


def test_every_body_draws_the_same(workers: Pools) -> None:
    pool = workers(2)
    (first, other), again = pool.run(_draw), pool.run(_draw)
    assert again == [first, other] == [first, first]


def test_only_so_many_processes_are_kept() -> None:
    with pools() as pool_of:
        for world_size in (1, 3, 8, 4):
            pool_of(world_size).run(_process)
        assert {size: pool_of(size).num_processes for size in (4, 8, 1, 3)} == {4: 4, 8: 8, 1: 0, 3: 0}


def test_a_body_may_skip(workers: Pools) -> None:
    with pytest.raises(pytest.skip.Exception, match="not here"):
        workers(2).run(_skip)


def test_only_functions_found_by_name(workers: Pools) -> None:
    with pytest.raises(TypeError, match="module-level"):
        workers(1).run(lambda: None)


@pytest.mark.parametrize("said", [b"", b"\0", struct.pack("i", 100), struct.pack("i", 100) + b"[["])
def test_a_program_that_is_killed_as_it_starts_ends_no_other(said: bytes) -> None:
    program = forked_python.executable()
    with socket.socket(socket.AF_UNIX) as killed:
        killed.connect(str(Path(program).with_name("server")))
        killed.sendall(said)
    ended = subprocess.run([program, "-c", "print(1)"], capture_output=True, text=True, check=True)
    assert ended.stdout == "1\n"


def test_a_file_with_the_number_of_a_closed_one_is_another(tmp_path: Path) -> None:
    """All three can be read at once: the first closes the second, whose number the third then has."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "server"))
        listener.listen()
        server = forked_python._Server(listener, "")
        ends = [os.pipe() for _ in range(3)]
        for _, end in ends:
            os.write(end, b" ")
        (first, _), (second, _), (third, _) = ends
        called: list[str] = []

        def replace() -> None:
            called.append("first")
            server._selector.unregister(first)
            server._selector.unregister(second)
            os.dup2(third, second)
            server.when_readable(second, stop)

        def stop() -> None:
            called.append("third")
            raise KeyboardInterrupt

        server.when_readable(first, replace)
        server.when_readable(second, lambda: called.append("second"))
        with pytest.raises(KeyboardInterrupt):
            server.run()
        assert called == ["first", "third"]
        for file in (file for pair in ends for file in pair):
            os.close(file)


def test_a_server_that_is_gone_is_told(tmp_path: Path) -> None:
    (tmp_path / "server.txt").write_text("its last words")
    words = {"python": sys.executable, "isa": os.environ.get("PYG_DIST_ISA"), "signals": []}
    program = forked_python._PROGRAM.format(address=str(tmp_path / "server"), **words)
    (tmp_path / "python").write_text(program)
    ended = subprocess.run(
        [sys.executable, tmp_path / "python", "-c", "print(1)"], check=False, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("the server that forks the tests' processes is gone ([Errno 2]"), ended.stderr
    assert "its last words" in ended.stderr
