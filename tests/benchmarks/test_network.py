"""The benchmark of the network runs, and the plan command reads what it writes. Nothing here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import run_script

from pyg_dist.plan import Machine

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "network.py"


@pytest.mark.timeout(300)  # new Python processes, on a machine that may be busy
def test_network(tmp_path: Path) -> None:
    output = tmp_path / "machine.json"
    ended = run_script(
        "torchrun", 2, SCRIPT, "--rows", "1", "64", "--repeats", "3", "--output", str(output), timeout=280
    )
    assert ended.codes == [0], ended.stderr
    rates = Machine(**json.loads(output.read_text()))
    assert rates.bandwidth > 0
    assert rates.aggregation > 0
    assert "65,536 B" in ended.stdout
