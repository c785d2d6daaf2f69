"""A loop that is stopped, or killed, and goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import Ended, run_script
from torch import nn

from pyg_dist.checkpoint import Checkpointer

SCRIPT = Path(__file__).with_name("resume_script.py")


def run(folder: Path, *args: str, launcher: str = "ranks") -> Ended:
    return run_script(launcher, 2, SCRIPT, str(folder), *args)


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    ended = run(tmp_path_factory.mktemp("whole"))
    assert ended.codes == [0, 0], ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.parametrize("last", [7, pytest.param(8, marks=pytest.mark.slow)])
def test_a_signal_stops_all_ranks_after_the_same_step(lines: list[str], tmp_path: Path, last: int) -> None:
    """Step 8 ends an epoch."""
    stopped = run(tmp_path, f"SIGTERM:{last}")
    assert stopped.codes == [0, 0], stopped.stderr
    assert stopped.stdout.splitlines()[:-1] == lines[:last]
    resumed = run(tmp_path, "--seed=9")
    assert resumed.codes == [0, 0], resumed.stderr
    assert resumed.stdout.splitlines()[:-1] == lines[last:-1]


@pytest.mark.parametrize("launcher", ["ranks", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_from_the_last_checkpoint(lines: list[str], tmp_path: Path, launcher: str) -> None:
    killed = run(tmp_path, "SIGKILL:15", launcher=launcher)
    assert any(killed.codes)
    resumed = run(tmp_path, "--seed=9", launcher=launcher)
    assert not any(resumed.codes), resumed.stderr
    assert resumed.stdout.splitlines() == lines[8:], "two epochs of four steps were saved"


def test_a_run_that_has_ended_has_nothing_left_to_do(lines: list[str], tmp_path: Path) -> None:
    first, again = run(tmp_path), run(tmp_path)
    assert first.stdout.splitlines() == lines
    assert again.stdout.splitlines() == lines[-1:]


def test_what_could_not_go_on_is_refused_when_it_begins() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"'best' to have load_state_dict.*: put what else .* into .* state"):
        Checkpointer(None, model=model, best=0.5)
    with pytest.raises(ValueError, match="Expected a loader that is saved"):
        next(Checkpointer(None, model=model).batches([1, 2]))
    checkpointer = Checkpointer(None, model=model)
    assert [*checkpointer.epochs(2)] == [0, 1]
    with pytest.raises(ValueError, match="Expected one loop over epochs"):
        next(checkpointer.epochs(2))


def test_torchrun_starts_killed_ranks_again_and_they_go_on(
    lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its agent's store still has the failure of the ranks before them."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    ended = run(tmp_path, "SIGKILL:15", launcher="torchrun")
    assert ended.codes == [0], ended.stderr
    printed = ended.stdout.splitlines()
    # The step that rank 1 is killed after is rank 0's, too, but it may end before it prints.
    assert printed in (lines[:15] + lines[8:], lines[:14] + lines[8:])
