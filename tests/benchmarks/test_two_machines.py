"""Epochs over a rate-limited link: every variant trains alike, fewer bits send less, and nothing is left behind."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import two_machines
from launching import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "two_machines.py"


def test_one_rank_on_a_machine_has_no_two_levels() -> None:
    assert {*two_machines.variants_for(2)} - {*two_machines.variants_for(1)} == {"two levels", "two levels, 2 bits"}


def left_behind() -> set[str]:
    """The namespaces whose process has ended; other tests may have theirs at the same time."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    made = re.findall(r"^pyg_dist_(\d+)_\d", listed, re.MULTILINE)
    return {process for process in made if not Path("/proc", process).exists()}


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    output, left_before = tmp_path / "two.json", left_behind()
    options = "--graph tiny --epochs 1 --rates 1000 --assumed --ranks-per-machine 2 --output".split()
    ended = run_script("ranks", 1, SCRIPT, *options, str(output), is_forked=False)
    assert ended.codes == [0], ended.stderr
    if ended.stdout.startswith("skipped"):
        pytest.skip(ended.stdout)
    rows = {row["variant"]: row for row in json.loads(output.read_text())["rows"]}
    assert list(rows) == two_machines.variants_for(2)
    crossed = [rows[name]["crossed_mib"] for name in ("halo, hybrid", "two levels", "two levels, 2 bits")]
    assert crossed == sorted(crossed, reverse=True)
    assert rows["two levels"]["loss"] == pytest.approx(rows["halo, hybrid"]["loss"], abs=1e-3)
    sent = [rows[f"halo, {name}"]["sent_mib"] for name in ("post", "hybrid", "8 bits", "2 bits")]
    assert sent == sorted(sent, reverse=True)
    assert sent[-1] < sent[0]
    exact = [rows[name]["loss"] for name in ("halo, post", "halo, hybrid", "grid")]
    assert exact == pytest.approx([exact[0]] * 3, abs=1e-3)
    assert not (left_behind() - left_before), "namespaces of a run that has ended"
