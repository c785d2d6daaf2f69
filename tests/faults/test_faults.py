"""Ranks that diverge: no wrong number is printed, and the run ends with one line that names the lines of all.

Each fault is one of rank 1 (``fault_script.py``). The runs are short and mostly wait, so several go on at a time.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import pytest
from launching import Ended, run_script

SCRIPT = Path(__file__).with_name("fault_script.py")
SOURCE = SCRIPT.read_text().splitlines()
FAULTS = [
    "an extra collective", "a skipped epoch", "a skipped conv", "another order", "another mask", "an early break",
    "an early end", "one more backward", "a metric under is_main()", "a gather on one rank",
    "an evaluation on one rank", "other batches",
]  # fmt: skip
CASES = [(fault, size, layout) for fault in FAULTS for size, layout in ((2, "halo"), (3, "grid"))]
SLOW = ("a slow rank", 2, "halo")


@cache
def all_ended() -> dict[tuple[str, int, str], Ended]:
    """Every case, run once in a session of pytest."""
    with ThreadPoolExecutor(4) as pool:

        def run(case: tuple[str, int, str]) -> Ended:
            fault, size, layout = case
            return run_script("ranks", size, SCRIPT, fault, layout, "--quick")

        return dict(zip([*CASES, SLOW], pool.map(run, [*CASES, SLOW]), strict=True))


def lines_named(stderr: str) -> set[int]:
    """The lines of the script in the message about calls that differ."""
    told = [line for line in stderr.splitlines() if "Expected the same calls on every rank" in line]
    assert told, stderr
    return {int(line) for line in re.findall(r"fault_script\.py:(\d+)", told[0])}


@pytest.mark.parametrize(("fault", "size", "layout"), CASES)
def test_ranks_that_diverge_end_with_both_lines(fault: str, size: int, layout: str) -> None:
    ended = all_ended()[fault, size, layout]
    assert "WRONG" not in ended.stdout
    assert any(ended.codes), ended.stdout
    assert len(lines_named(ended.stderr)) >= 2, ended.stderr
    assert "killed or has crashed" not in ended.stderr


def test_a_slow_rank_is_no_error_and_is_told_once_a_line() -> None:
    ended = all_ended()[SLOW]
    assert ended.codes == [0, 0], ended.stderr
    assert "WRONG" not in ended.stdout
    assert ended.stdout.count("right") == 2 * 4
    notices = [line for line in ended.stderr.splitlines() if "has waited" in line]
    told = [re.findall(r"(rank \d) has waited \d+ s at (.*?); rank", line) for line in notices]
    waits = [wait for (wait,) in told]  # how many depends on how busy the machine is
    assert len(waits) == len(set(waits)), ended.stderr
    slow = r"rank 0 has waited \d+ s at fault_script.py:\d+ .*; rank 1 computes after fault_"
    assert any(re.search(slow, line) for line in notices), ended.stderr


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "mpirun"])
def test_under_a_launcher(launcher: str) -> None:
    ended = run_script(launcher, 2, SCRIPT, "an extra collective", "halo")
    assert "WRONG" not in ended.stdout
    assert any(ended.codes)
    assert len(lines_named(ended.stderr)) == 2
