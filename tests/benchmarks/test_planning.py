"""The planning benchmark plans the graphs that it says. Nothing here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

from launching import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plan.py"


def test_planning() -> None:
    ended = run_script("ranks", 1, SCRIPT, "--edges", "2000", "8000", "--ranks", "5", "--json")
    assert ended.codes == [0], ended.stderr
    small, large = (json.loads(line) for line in ended.stdout.splitlines())
    assert (small["edges"], large["edges"]) == (2000, 8000)
    for measured in (small, large):
        assert measured["peak_mib"] >= measured["graph_mib"] > 0
        assert 0 < measured["rows"]["hybrid"] <= min(measured["rows"]["post"], measured["rows"]["pre"])
