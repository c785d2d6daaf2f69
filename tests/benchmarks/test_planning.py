"""The planning benchmark plans the graphs that it says. Nothing here looks at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from limits import COMMAND_SECONDS

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "plan.py"


@pytest.mark.timeout(300)  # new Python processes, on a machine that may be busy
def test_planning() -> None:
    command = [sys.executable, str(SCRIPT), "--edges", "2000", "8000", "--ranks", "5", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    assert ended.returncode == 0, ended.stderr
    small, large = (json.loads(line) for line in ended.stdout.splitlines())
    assert (small["edges"], large["edges"]) == (2000, 8000)
    for measured in (small, large):
        assert measured["peak_mib"] >= measured["graph_mib"] > 0
        assert 0 < measured["rows"]["hybrid"] <= min(measured["rows"]["post"], measured["rows"]["pre"])
