"""A rank that fails or ends before ``init`` ends the others, which wait for it there, with its name."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run_script

from pyg_dist.backend.session import early_end

SCRIPT = Path(__file__).with_name("early_script.py")
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
    ended = run_script(launcher, 2, SCRIPT, "none inits", "0")
    assert set(ended.codes) == {0}
    assert "pyg_dist" not in ended.stderr


def test_what_a_rank_starts_may_end_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child process inherits the variables of its rank's launcher, and is no rank."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29511}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(early_end, "_early", [])
    monkeypatch.setenv(early_end._PROCESS, "1")  # of the rank that has started this process
    early_end.watch()
    assert not early_end._early
    monkeypatch.delenv(early_end._PROCESS)
    early_end.watch()
    assert len(early_end._early) == 1
    early_end.end()
