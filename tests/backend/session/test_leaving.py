"""How a rank ends: before ``init`` with word for the others, which wait for it; after it without losing a line."""

from __future__ import annotations

import atexit
import sys
import threading
from pathlib import Path

import pytest
from launching import run_script

from pyg_dist.backend.session import leaving

SCRIPT = Path(__file__).with_name("early_script.py")
RANK_SCRIPT = SCRIPT.with_name("rank_script.py")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("launcher", "case", "rank"),
    [
        ("by hand", "raises", 0),
        pytest.param("by hand", "raises", 1, marks=SLOW),
        pytest.param("by hand", "ends", 0, marks=SLOW),
        ("by hand", "ends", 1),
        ("torchrun", "ends", 1),
        pytest.param("torchrun", "ends", 0, marks=SLOW),
        pytest.param("torchrun", "raises", 1, marks=SLOW),
        ("mpirun", "raises", 1),
        pytest.param("mpirun", "raises", 0, marks=SLOW),
        pytest.param("mpirun", "ends", 0, marks=SLOW),
        ("mpirun", "ends", 1),
    ],
)
def test_the_others_end_with_its_name(launcher: str, case: str, rank: int) -> None:
    ended = run_script(launcher, 3, SCRIPT, case, str(rank))
    assert any(ended.codes)
    told = {
        "raises": f"rank {rank} failed: RuntimeError: the fault of rank {rank} and more",
        "ends": f"rank {rank} has ended before pyg_dist.init()",
    }[case]
    if (launcher, case) == ("torchrun", "raises"):  # its agent may be first to end the others
        told = f"RuntimeError: the fault of rank {rank}"
    assert told in ended.stderr, ended.stderr


@pytest.mark.parametrize(
    "launcher", ["by hand", pytest.param("torchrun", marks=SLOW), pytest.param("mpirun", marks=SLOW)]
)
def test_ranks_that_all_end_without_init_say_nothing(launcher: str) -> None:
    ended = run_script(launcher, 2, SCRIPT, "none inits", "0", ends_whole=True)
    assert set(ended.codes) == {0}
    assert "pyg_dist" not in ended.stderr


def test_what_a_rank_starts_may_end_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process inherits the variables of its rank's launcher, and is no rank."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}.items():
        monkeypatch.setenv(name, str(value))
    hooks = sys.excepthook, threading.excepthook
    monkeypatch.setenv(leaving._PROCESS, "1")  # of the rank that has started this process
    way_out = leaving.WayOut()
    try:
        way_out.watch_start()
        assert sys.excepthook == hooks[0]
        monkeypatch.delenv(leaving._PROCESS)
        way_out.watch_start()
        assert sys.excepthook != hooks[0]
    finally:
        sys.excepthook, threading.excepthook = hooks
        atexit.unregister(way_out._on_exit)


@pytest.mark.parametrize(("failing", "launcher"), [(0, "ranks"), (2, "ranks"), pytest.param(1, "mpirun", marks=SLOW)])
def test_no_line_is_lost_and_handlers_run(failing: int, launcher: str) -> None:
    """Of ranks that wait in C++ for the one that fails, too, which wrote into a pipe and did not flush."""
    ended = run_script(launcher, 3, RANK_SCRIPT, "writes and raises", str(failing), ends_whole=failing == 0)
    assert 0 not in ended.codes
    if launcher == "ranks":
        assert ended.codes == [1, 1, 1]
    lines = ended.stdout.splitlines()
    assert sorted(line for line in lines if "last" in line) == [f"the last line of rank {rank}" for rank in range(3)]
    assert f"a handler of rank {failing}" in lines


def test_a_handler_that_hangs_keeps_no_rank() -> None:
    ended = run_script("ranks", 3, RANK_SCRIPT, "raises and hangs", "1", ends_whole=True)
    assert ended.codes == [1, 1, 1]


@pytest.mark.parametrize("concerned", [0, 2])
def test_a_thread_of_the_package_that_dies_ends_the_run(concerned: int) -> None:
    ended = run_script("ranks", 3, RANK_SCRIPT, "a thread raises", str(concerned))
    assert ended.codes == [1, 1, 1]
    assert ended.stderr.count(f"pyg_dist: rank {concerned} failed: RuntimeError: the fault of a thread; ending") == 3
    assert ended.stderr.count("Traceback") == 1


def test_a_thread_of_the_script_dies_alone() -> None:
    ended = run_script("ranks", 3, RANK_SCRIPT, "a thread of the script raises", "1")
    assert ended.codes == [0, 0, 0]
    assert ended.stderr.count("RuntimeError: the fault of a thread") == 1


@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_leaves_while_others_train_has_failed(gone: int) -> None:
    ended = run_script("ranks", 3, RANK_SCRIPT, "leaves", str(gone), ends_whole=gone == 0)
    assert ended.codes == [1, 1, 1], ended.stderr
    assert f"rank {gone} ended after" in ended.stderr


def test_a_group_of_the_script_ends_well() -> None:
    ended = run_script("ranks", 3, RANK_SCRIPT, "ends with a group of its own", ends_whole=True)
    assert ended.codes == [0, 0, 0]
    assert ended.stderr == ""


@pytest.mark.parametrize(("name", "launcher"), [("SIGTERM", "ranks"), ("SIGINT", "ranks"), ("SIGUSR1", "mpirun")])
def test_a_signal_to_one_rank_stops_all_at_one_step(name: str, launcher: str) -> None:
    ended = run_script(launcher, 3, RANK_SCRIPT, "is to stop", "1", name)
    assert set(ended.codes) == {0}, ended.stderr
    assert ended.stdout.splitlines() == ["step 4"] * 3
    assert f"rank 1 got {name}: the ranks stop" in ended.stderr


_FAILS_AT_THE_END = """
from pyg_dist.backend.session.leaving import way_out
from pyg_dist.backend.session.state import current

class Part:
    def close(self):
        raise ValueError("found late")

class Other:
    def close(self):
        print("closed, too")

current().add(Other())
current().add(Part())
way_out.watch_run()
"""


def test_an_error_at_the_end_is_one_line_and_a_status(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(_FAILS_AT_THE_END)
    ended = run_script("python", 1, tmp_path / "script.py")
    assert ended.codes == [1]
    assert ended.stdout == "closed, too\n"
    assert "failed at the end: ValueError: found late" in ended.stderr
    assert "Traceback" not in ended.stderr
