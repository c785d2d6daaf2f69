"""Starting under each launcher, starting twice, starting wrongly."""

from __future__ import annotations

import gc
import os
import random
import re
import socket
import sys
import threading
import weakref
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launching import run_script
from limits import COMMAND_SECONDS, TIMEOUT_SECONDS
from workers import Pools, on_ranks

from pyg_dist import errors
from pyg_dist.backend.session import session, state
from pyg_dist.errors import AgreementError, DataError, LaunchError, OptionError

SCRIPT = Path(__file__).with_name("rank_script.py")


@pytest.mark.parametrize(("launcher", "is_forked"), [("torchrun", False), ("mpirun", True), ("by hand", True)])
def test_launchers(launcher: str, is_forked: bool) -> None:
    size, total = (3, 6) if is_forked else (2, 3)
    ended = run_script(launcher, size, SCRIPT, "ends", is_forked=is_forked, ends_whole=True)
    assert set(ended.codes) == {0}
    said = [re.fullmatch(r"rank (\d) of (\d), local (\d), sum (\d)", line) for line in ended.stdout.splitlines()]
    ranks, sizes, local, sums = (
        [int(n) for n in numbers] for numbers in zip(*(m.groups() for m in said if m), strict=True)
    )
    assert sorted(ranks) == sorted(local) == [*range(size)]  # Open MPI numbers the ranks of a machine by their cores
    assert (set(sizes), set(sums)) == ({size}, {total})
    if launcher != "mpirun":
        assert ranks == local
    if launcher != "torchrun":  # which may advise on OMP_NUM_THREADS
        assert ended.stderr == ""


@pytest.mark.parametrize("launcher", ["python", "torchrun", "mpirun"])
def test_one_rank(launcher: str) -> None:
    ended = run_script(launcher, 1, SCRIPT, "ends")
    assert ended.codes == [0]
    assert ended.stdout == "rank 0 of 1, local 0, sum 1\n"


def test_before_init_in_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr(state, "_current", state.Session())  # a test before this one may have opened one here
    assert (session.rank(), session.world_size(), session.local_rank(), session.is_main()) == (0, 1, 0, True)
    assert not session.is_initialized()


def _init_twice() -> tuple[int, int, int, bool]:
    before = session.rank(), session.world_size(), session.local_rank(), session.is_main()
    session.init()
    session.init()
    assert session.is_initialized()
    assert dist.is_initialized() == (session.world_size() > 1)
    after = session.rank(), session.world_size(), session.local_rank(), session.is_main()
    assert after == before
    with pytest.raises(LaunchError, match=r"'backend'.*got mpi, it was auto"):
        session.init("mpi")
    with pytest.raises(LaunchError, match="'timeout'"):
        session.init(timeout=timedelta(seconds=5))
    return after


@pytest.mark.parametrize("world_size", [1, 3])
def test_init_is_idempotent(workers: Pools, world_size: int) -> None:
    ranks, sizes, local_ranks, are_main = zip(*workers(world_size).run(_init_twice), strict=True)
    assert (ranks, sizes) == (tuple(range(world_size)), (world_size,) * world_size)
    assert sorted(local_ranks) == list(ranks), "Open MPI counts the ranks of a machine in another order"
    assert are_main == (True, *[False] * (world_size - 1))


class _Part:
    """What some room keeps for a run."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def close(self) -> None:
        self.told.append("closed")


@on_ranks(1, 3)
def test_a_run_ends_with_its_session() -> None:
    session.shutdown()  # what watches for things left behind knows the session that there was before
    session.init()
    first, part = weakref.ref(state.current()), weakref.ref(state.current().of(_Part))
    assert part() is state.current().of(_Part)
    told = state.current().of(_Part).told
    session.shutdown()
    gc.collect()
    assert first() is None
    assert part() is None
    assert told == ["closed"]
    assert not state.current().is_joined
    assert state.current().find(_Part) is None
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("pyg_dist")]
    assert [name for name in names if name != "pyg_dist store"] == [], "where ranks have met by MPI, they meet again"
    session.init()


@on_ranks(1, 3)
def test_options_of_the_first_init_stay() -> None:
    session.shutdown()
    session.init("gloo", timedelta(minutes=3))
    session.init()  # as DistributedData does
    session.init("gloo", timedelta(minutes=3))
    with pytest.raises(LaunchError, match="'timeout'"):
        session.init("gloo", timedelta(minutes=4))
    session.shutdown()


def _random_numbers() -> list[float]:
    session.shutdown()
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(session.rank())
    session.init()
    return [*torch.rand(3).tolist(), np.random.random(), random.random()]


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_rank_draws_as_rank_0(workers: Pools, world_size: int) -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0)).tolist()
    expected += [np.random.RandomState(0).random_sample(), random.Random(0).random()]
    assert workers(world_size).run(_random_numbers) == [expected] * world_size


def _other_versions() -> str:
    session.shutdown()
    real = session._versions
    session._versions = lambda: {**real(), "torch": "1.0"} if session.rank() == 1 else real()
    try:
        with pytest.raises(AgreementError) as caught:
            session.init()
    finally:
        session._versions = real
    assert not session.is_initialized()
    session.init()
    return caught.value.message


@pytest.mark.parametrize("world_size", [2, 4])
def test_other_versions_are_named_on_every_rank(workers: Pools, world_size: int) -> None:
    messages = workers(world_size).run(_other_versions)
    assert len(set(messages)) == 1
    assert "torch (got" in messages[0]
    assert "1.0 on rank 1" in messages[0]


def _adopt() -> tuple[int, int]:
    session.shutdown()
    rank = session.rank()
    dist.init_process_group("gloo", timeout=timedelta(seconds=COMMAND_SECONDS))
    try:
        assert (session.rank(), session.world_size()) == (rank, dist.get_world_size())
        with pytest.raises(LaunchError, match=r"'gloo'.*got 'nccl'"):
            session.init("nccl")
        session.init()
        place = session.rank(), session.world_size()
        session.shutdown()
        assert dist.is_initialized()  # it is the script's
    finally:
        dist.destroy_process_group()
    return place


@pytest.mark.torchrun
@pytest.mark.parametrize("world_size", [3])
def test_a_group_of_the_script_is_used(workers: Pools, world_size: int) -> None:
    assert workers(world_size).run(_adopt) == [(rank, world_size) for rank in range(world_size)]


@on_ranks(2)
def test_collectives_have_the_timeout() -> None:
    session.shutdown()
    session.init(timeout=timedelta(seconds=TIMEOUT_SECONDS))
    store = state.current().store
    if session.rank() != 0:
        with pytest.raises(RuntimeError, match=r"[Tt]imed out"):
            dist.all_reduce(torch.ones(1))
        store.set("has raised", "")
    else:
        store.wait(["has raised"], timedelta(hours=9))
    session.shutdown()


@on_ranks(2)
def test_unknown_backend() -> None:
    session.shutdown()
    with pytest.raises(OptionError, match=r"'auto'.*'carrier pigeon'"):
        session.init("carrier pigeon")
    session.init()


def test_wrong_timeout() -> None:
    session.shutdown()
    with pytest.raises(OptionError, match="positive timedelta"):
        session.init(timeout=timedelta(0))
    with pytest.raises(OptionError, match="got 30"):
        session.init(timeout=30)  # type: ignore[arg-type]


@on_ranks(1)
def test_mpirun_without_mpi4py() -> None:
    session.shutdown()
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("RANK", "WORLD_", "MASTER_", "TORCHELASTIC_")):
                patch.delenv(name)
        patch.setenv("PMI_RANK", "0")
        patch.setenv("PMI_SIZE", "2")
        patch.setitem(sys.modules, "mpi4py", None)
        patch.setattr(state.current().meeting, "store", None)
        with pytest.raises(errors.MissingPackageError, match="pip install mpi4py"):
            session.init()


def _nobody_to_meet() -> str:
    session.shutdown()
    with socket.socket() as silent, pytest.MonkeyPatch.context() as patch:
        silent.bind(("127.0.0.1", 0))
        for name, value in {"RANK": 1, "WORLD_SIZE": 2, "MASTER_PORT": silent.getsockname()[1]}.items():
            patch.setenv(name, str(value))
        patch.setattr(state.current().meeting, "store", None)
        with pytest.raises(LaunchError) as caught:
            session.init(timeout=timedelta(seconds=1))
    return str(caught.value)


def test_a_rank_that_finds_no_other_says_where_it_looked(workers: Pools) -> None:
    (line,) = workers(1).run(_nobody_to_meet)
    assert "\n" not in line
    assert "2 ranks to meet at 127.0.0.1:" in line
    assert "check MASTER_ADDR" in line


def _error_lines() -> list[str]:
    session.init()
    return [str(DataError("wrong")), DataError("wrong").message]


def test_errors_name_the_rank(workers: Pools) -> None:
    assert workers(1).run(_error_lines) == [["wrong", "wrong"]]
    assert workers(2).run(_error_lines) == [[f"wrong [rank {rank} of 2]", "wrong"] for rank in range(2)]
