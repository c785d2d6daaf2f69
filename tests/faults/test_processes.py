"""Rows, edges and data in other processes of a rank: who waits for them gets a one-line error (`process_script.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run_script

SCRIPT = Path(__file__).with_name("process_script.py")
OWN = "belongs to this run", "each rank holds some of its rows"


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_nothing_waits_for_what_cannot_be_sent(num_ranks: int) -> None:
    ended = run_script("ranks", num_ranks, SCRIPT)
    assert ended.codes == [0] * num_ranks, ended.stderr
    told = [line.split(" | ") for line in ended.stdout.splitlines() if " | " in line]
    assert len(told) == num_ranks * 10
    for name, line in told:
        if "a sum" in name and num_ranks == 1:
            assert line in ("nothing: 24.0", "nothing: [24.0]")  # it needs nobody else
        elif "a sum" in name or (name == "RandomNodeLoader" and num_ranks > 1):
            assert "Expected calls of all ranks in the processes that have joined the run" in line
        else:
            assert line.startswith("MixedRowsError: A "), (name, line)
            assert any(words in line for words in OWN), (name, line)
    assert ended.stdout.count("goes on: 24.0") == num_ranks
