"""Ranks that diverge: no wrong number is printed, and the run ends with one line that names the lines of all.

Each fault is one of rank 1 (``fault_script.py``). The runs are short and mostly wait, so several go on at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from launching import Ended, run_script

SCRIPT = Path(__file__).with_name("fault_script.py")
SOURCE = SCRIPT.read_text().splitlines()
FAULTS = [
    "an extra collective", "a skipped epoch", "a skipped conv", "another order", "another mask", "an early break",
    "an early end", "one more backward", "a metric under is_main()", "a gather on one rank",
    "an evaluation on one rank", "other batches",
]  # fmt: skip
LAYOUTS = (2, "halo"), (3, "grid")
Case = tuple[str, int, str]


def cases(faults: Sequence[str]) -> list[Any]:
    """Each fault on both layouts, of which one, in turn, is marked slow."""
    return [
        pytest.param(
            (fault, *layout), id="-".join(map(str, (fault, *layout))), marks=[pytest.mark.slow] * (k % 2 != turn)
        )
        for k, fault in enumerate(faults)
        for turn, layout in enumerate(LAYOUTS)
    ]


@pytest.fixture(scope="module")
def all_ended(request: pytest.FixtureRequest) -> dict[Case, Ended]:
    """What every chosen case ended with."""
    chosen = [item.callspec.params["case"] for item in request.session.items if "all_ended" in _fixtures(item)]

    def run(case: Case) -> Ended:
        fault, size, layout = case
        return run_script("ranks", size, SCRIPT, fault, layout, "--quick")

    with ThreadPoolExecutor(4) as pool:
        return dict(zip(chosen, pool.map(run, chosen), strict=True))


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def lines_named(stderr: str) -> set[int]:
    """The lines of the script in the message about calls that differ."""
    told = [line for line in stderr.splitlines() if "Expected the same calls on every rank" in line]
    assert told, stderr
    return {int(line) for line in re.findall(r"fault_script\.py:(\d+)", told[0])}


@pytest.mark.parametrize("case", cases(FAULTS))
def test_ranks_that_diverge_end_with_both_lines(all_ended: dict[Case, Ended], case: Case) -> None:
    ended = all_ended[case]
    assert "WRONG" not in ended.stdout
    assert any(ended.codes), ended.stdout
    assert len(lines_named(ended.stderr)) >= 2, ended.stderr
    assert "killed or has crashed" not in ended.stderr


@pytest.mark.parametrize("case", [("a slow rank", 2, "halo")], ids=["halo"])
def test_a_slow_rank_is_no_error_and_is_told_once_a_line(all_ended: dict[Case, Ended], case: Case) -> None:
    ended = all_ended[case]
    assert ended.codes == [0, 0], ended.stderr
    assert "WRONG" not in ended.stdout
    assert ended.stdout.count("right") == 2 * 4
    notices = [line for line in ended.stderr.splitlines() if "has waited" in line]
    told = [re.findall(r"(rank \d) has waited \d+ s at (.*?); rank", line) for line in notices]
    waits = [wait for (wait,) in told]  # how many depends on how busy the machine is
    assert len(waits) == len(set(waits)), ended.stderr
    slow = r"rank 0 has waited \d+ s at fault_script.py:\d+ .*; rank 1 computing after fault_"
    assert any(re.search(slow, line) for line in notices), ended.stderr


@pytest.mark.parametrize("stopped", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stopped_rank_is_named_again_and_again_and_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, stopped: int
) -> None:
    monkeypatch.setenv("PYG_DIST_WATCH_SECONDS", "3")
    ended = run_script("by hand", 3, SCRIPT, f"stopped {stopped}", "halo", "--quick")
    others = {0, 1, 2} - {stopped}
    assert [ended.codes[rank] for rank in others] == [1, 1], ended.stderr
    for rank in others:
        notices = [line for line in ended.stderr.splitlines() if line.startswith(f"rank {rank} has waited")]
        assert len(notices) >= 2, ended.stderr
        named = "rank 0 or torchrun's agent" if stopped == 0 else "rank 1 not answering"
        assert any(named in line for line in notices), ended.stderr
    assert "PYG_DIST_WATCH_SECONDS allows" in ended.stderr


@pytest.mark.slow
def test_under_torchrun() -> None:
    """Under mpirun: ``test_mpi_faults``."""
    ended = run_script("torchrun", 2, SCRIPT, "an extra collective", "halo")
    assert "WRONG" not in ended.stdout
    assert any(ended.codes)
    assert len(lines_named(ended.stderr)) == 2
