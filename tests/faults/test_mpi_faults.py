"""Ranks under mpirun, which send by MPI and go wrong: the run ends with one clear message, and no process stays.

Each fault is one of a rank of three (``mpi_fault_script.py``).
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked_python
import limits
import pytest
from launching import Ended, mpirun, plain_environ, run_script
from mpirun_ranks import is_running

pytest.importorskip("mpi4py")

SCRIPT = Path(__file__).with_name("mpi_fault_script.py")
RANKS = 3


def assert_none_left(stdout: str) -> None:
    """The launcher ends the other ranks, some of them after itself."""
    pids = [int(pid) for pid in re.findall(r"^process (\d+)$", stdout, re.M)]
    assert pids
    end = time.monotonic() + limits.STALL_SECONDS
    while any(map(is_running, pids)):
        assert time.monotonic() < end, f"processes {[pid for pid in pids if is_running(pid)]} are left"
        time.sleep(0.1)


def run(fault: str, rank: int) -> Ended:
    ended = run_script("mpirun", RANKS, SCRIPT, fault, str(rank))
    assert_none_left(ended.stdout)
    return ended


def test_a_good_run_says_nothing() -> None:
    ended = run("none", 0)
    assert (ended.codes, ended.stderr) == ([0], "")


@pytest.mark.parametrize(
    ("fault", "rank", "message"),
    [
        pytest.param("raises in forward", 0, "the fault in forward", marks=pytest.mark.slow),
        pytest.param("raises in backward", 1, "the fault in backward", marks=pytest.mark.slow),
        ("raises with a thread alive", 2, "the fault beside a thread"),
    ],
)
def test_a_rank_that_raises(fault: str, rank: int, message: str) -> None:
    ended = run(fault, rank)
    assert 0 not in ended.codes
    own = [line for line in ended.stderr.splitlines() if line.startswith(f"[rank{rank}]: ")]
    assert own[-1].endswith(f"ValueError: {message}"), ended.stderr
    assert not any("pyg_dist: " in line for line in own), ended.stderr
    for other in {0, 1, 2} - {rank}:  # the launcher brings the ranks' lines in any order
        line = f"pyg_dist: rank {rank} failed: ValueError: {message}; ending rank {other} of 3"
        assert line in ended.stderr.splitlines(), ended.stderr


@pytest.mark.parametrize(("fault", "rank"), [("raises before init", 2), ("raises before init with MPI running", 0)])
def test_a_rank_that_raises_while_others_start(fault: str, rank: int) -> None:
    ended = run(fault, rank)
    assert 0 not in ended.codes
    assert f"pyg_dist: rank {rank} failed: ValueError: the fault before init; ending the run" in ended.stderr


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank(rank: int) -> None:
    """The launcher says so, and ends the others."""
    ended = run("is killed", rank)
    assert 0 not in ended.codes
    assert re.search(r"(?i)killed", ended.stdout + ended.stderr)
    assert not re.search(r"pyg_dist: rank \d failed", ended.stderr), "a rank that noticed is blamed"


def test_a_call_that_other_ranks_do_not_make() -> None:
    ended = run("calls what others do not", 1)
    assert 0 not in ended.codes
    told = [line for line in ended.stderr.splitlines() if "Expected the same calls on every rank" in line]
    assert told, ended.stderr
    assert len(set(re.findall(r"mpi_fault_script\.py:(\d+)", told[0]))) == 2, ended.stderr


@pytest.mark.slow
def test_the_mpirun_of_another_library() -> None:
    ended = run("another library's mpirun", 0)
    assert 0 not in ended.codes
    assert "Expected mpi4py to see the 3 ranks of mpirun (got 1, with" in ended.stderr


@pytest.mark.slow
def test_an_mpirun_that_is_asked_to_end() -> None:
    command = [*mpirun(RANKS), forked_python.executable(), str(SCRIPT), "waits", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": sys.stderr, "text": True}
    launcher = subprocess.Popen(command, env=plain_environ(), start_new_session=True, **pipes)  # type: ignore[call-overload]
    try:
        lines = []
        while "all wait\n" not in lines:
            lines.append(launcher.stdout.readline())
            assert lines[-1], "it has ended"
        launcher.send_signal(signal.SIGTERM)
        rest, _ = launcher.communicate(timeout=limits.STALL_SECONDS)
    finally:
        launcher.kill()
    assert launcher.returncode != 0
    assert_none_left("".join(lines) + rest)
