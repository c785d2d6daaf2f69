"""The benchmark of neighbour sampling runs on a tiny graph. Nothing here looks at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run_script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "neighbours.py"


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_neighbours(num_ranks: int) -> None:
    options = ("--nodes", "2000", "--edges", "20000", "--batch-size", "64", "--rounds", "2")
    ended = run_script("ranks", num_ranks, SCRIPT, *options)
    assert ended.codes == [0] * num_ranks, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if "edges/s and core" in line]
    of = f"graph, {num_ranks} ranks"
    assert [line.split(":")[0] for line in lines] == [f"{of}, [15, 10, 5]", f"{of}, [10, 10]"]
    assert all(line.endswith("MB of ids a rank 0") == (num_ranks == 1) for line in lines)
