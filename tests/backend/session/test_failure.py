"""A rank that fails takes every rank with it, soon and with its message; a rank that ends well disturbs nobody.

Nothing here looks at a time: what the others wait for takes longer than ``run_script`` waits for them.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import run_script

from pyg_dist.backend.comm.connection import is_lost

SCRIPT = Path(__file__).with_name("rank_script.py")
RANKS = 3


@pytest.mark.parametrize(
    ("launcher", "failing"),
    [
        pytest.param("torchrun", 2, marks=pytest.mark.slow),
        ("mpirun", 0),
        pytest.param("by hand", 0, marks=pytest.mark.slow),
        ("ranks", 2),
    ],
)
def test_every_rank_ends_with_the_message_of_the_one_that_raises(launcher: str, failing: int) -> None:
    ended = run_script(launcher, RANKS, SCRIPT, "raises", str(failing))
    assert 0 not in ended.codes
    assert f"RuntimeError: the fault of rank {failing}\n" in ended.stderr  # its own traceback
    for rank in {0, 1, 2} - {failing}:
        told = f"pyg_dist: rank {failing} failed: RuntimeError: the fault of rank {failing} and more"
        assert f"{told}; ending rank {rank} of 3" in ended.stderr.splitlines()


@pytest.mark.parametrize(("launcher", "other"), [("torchrun", -1), ("ranks", 2)])
def test_a_mistake_of_all_ranks_is_shown_once(launcher: str, other: int) -> None:
    """Rank 0's traceback, a line of a rank that made another mistake, and the message in torchrun's summary."""
    ended = run_script(launcher, RANKS, SCRIPT, "all raise", str(other))
    assert 0 not in ended.codes
    shown, _, summary = ended.stderr.partition("rank_script.py FAILED\n")
    assert len(re.findall(r"^.*rank_script.py\", line .*$", shown, re.M)) == 1, ended.stderr
    assert len(re.findall(r"^\S* ?RuntimeError: the fault of all$", shown, re.M)) == 1
    lines = [line for line in shown.splitlines() if line.startswith("pyg_dist: ")]
    if launcher == "torchrun":
        assert lines == []
        assert "RuntimeError: the fault of all" in summary
    else:
        assert any(line.startswith("pyg_dist: rank 2 failed: RuntimeError: another fault") for line in lines)


@pytest.mark.parametrize(
    ("case", "failing"),
    [("raises with work in flight", 0), ("raises while rank 0 computes", 0), ("raises while rank 0 computes", 2)],
)
def test_it_matters_not_what_the_others_wait_for(case: str, failing: int) -> None:
    ended = run_script("ranks", RANKS, SCRIPT, case, str(failing))
    assert ended.codes == [1, 1, 1]
    assert ended.stderr.count(f"pyg_dist: rank {failing} failed: RuntimeError: the fault of rank {failing};") == 2


def test_every_rank_ends_with_the_line_of_the_one_that_has_a_nan() -> None:
    ended = run_script("ranks", RANKS, SCRIPT, "sends NaN in two bits", "1")
    assert ended.codes == [1, 1, 1]
    told = "rank 1 failed: DataError: Expected finite features in the messages of the layer, which go in 2 bits (got"
    for rank in (0, 2):
        assert re.search(rf"{re.escape(told)} NaN at node 13\).*; ending rank {rank} of 3", ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("launcher", "killed"),
    [("ranks", 0), pytest.param("by hand", 2, marks=pytest.mark.slow), ("torchrun", 2), ("mpirun", 0)],
)
def test_a_killed_rank_ends_the_others(launcher: str, killed: int) -> None:
    ended = run_script(launcher, RANKS, SCRIPT, "is killed", str(killed))
    assert 0 not in ended.codes
    if launcher in ("by hand", "ranks"):  # the launchers kill the others themselves, maybe before they have noticed
        assert ended.codes[killed] == -9
        # gloo aborts (-6) where its own thread is the first to notice, as happens on a busy machine.
        assert all(code in (1, -6) for rank, code in enumerate(ended.codes) if rank != killed)
        assert re.search(r"pyg_dist: rank \d lost its connection to (another rank|rank \d)|gloo", ended.stderr)
        assert not re.search(r"pyg_dist: rank \d failed", ended.stderr), "a rank that noticed is blamed"


@pytest.mark.parametrize(
    ("killed", "way", "other"),
    [
        (1, "messages", "rank 1"),
        pytest.param(2, "all-to-all", "rank 2", marks=pytest.mark.slow),
        pytest.param(1, "later", "rank 1", marks=pytest.mark.slow),
    ],
)
def test_who_waits_for_a_killed_rank_says_so(killed: int, way: str, other: str) -> None:
    ended = run_script("ranks", RANKS, SCRIPT, "is killed in an exchange", str(killed), way)
    assert ended.codes[killed] == -9
    lost = f"lost its connection to {other}, which was killed or has crashed: see "
    assert re.search(rf"pyg_dist: rank \d {lost}.*; ending rank \d of 3", ended.stderr)
    assert re.search(rf"ConnectionLostError: rank \d {lost}.* \[rank \d of 3\]", ended.stderr)
    assert not re.search(r"pyg_dist: rank \d failed", ended.stderr)


def test_the_loss_of_rank_0_with_the_store_is_one_line_of_each_rank() -> None:
    """Nothing can be spread; what the store says of it is shown by none."""
    ended = run_script("ranks", RANKS, SCRIPT, "is killed in an exchange", "0", "messages")
    assert ended.codes[0] == -9
    assert set(ended.codes[1:]) <= {1, -6}
    lines = [line for line in ended.stderr.splitlines() if line.startswith("pyg_dist: ")]
    lost = "lost its connection to rank 0, which was killed or has crashed: see that rank's log"
    expected = {f"pyg_dist: rank {rank} {lost}; ending rank {rank} of 3" for rank in (1, 2)}
    assert lines, ended.stderr
    assert set(lines) <= expected, ended.stderr
    assert len(lines) == len(set(lines)), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("launcher", "early"),
    [
        ("ranks", 0),
        pytest.param("by hand", 2, marks=pytest.mark.slow),
        pytest.param("torchrun", 0, marks=pytest.mark.slow),
        ("mpirun", 0),
    ],
)
def test_a_rank_that_ends_early_and_well_is_no_failure(launcher: str, early: int) -> None:
    ended = run_script(launcher, RANKS, SCRIPT, "ends early", str(early), ends_whole=True)
    assert set(ended.codes) == {0}
    assert "pyg_dist" not in ended.stderr
    if launcher in ("by hand", "ranks"):
        assert ended.stderr == ""


@pytest.mark.parametrize(
    ("launcher", "case", "code", "concerned"), [("ranks", "exits", 3, 0), ("by hand", "is interrupted", -2, 2)]
)
def test_exit_and_interrupt_behave_as_in_any_program(launcher: str, case: str, code: int, concerned: int) -> None:
    ended = run_script(launcher, RANKS, SCRIPT, case, str(concerned), ends_whole=True)
    assert ended.codes == [code if rank == concerned else 0 for rank in range(RANKS)]
    lines = [f"pyg_dist: interrupted; ending rank {concerned} of {RANKS}"] if case == "is interrupted" else []
    assert ended.stderr.splitlines() == lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41352", True),
        (
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was "
            "a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a "
            "remote process exiting prematurely.\nLast error:\nNET/IB : Got completion from peer with error 12",
            True,
        ),
        ("ncclInternalError: Internal check failed.\nLast error:\nNet : Connection closed by remote peer host", True),
        ("NCCL communicator was aborted on rank 1. Original reason for failure was: watchdog", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:1, invalid usage, NCCL version 2.21.5\nncclInvalidUsage: ...", False),
        ("ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'", False),
    ],
)
def test_words_of_a_lost_connection(words: str, expected: bool) -> None:
    assert is_lost(RuntimeError(words)) == expected
