"""The store by which ranks meet under mpirun, as torch's stores are used."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import run_script

pytest.importorskip("mpi4py")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_store(num_ranks: int) -> None:
    ended = run_script("mpirun", num_ranks, Path(__file__).with_name("mpi_store_script.py"))
    assert (ended.codes, ended.stderr) == ([0], "")
    assert sorted(ended.stdout.splitlines()) == [f"rank {rank}: done" for rank in range(num_ranks)]
