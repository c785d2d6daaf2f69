"""MPI as a wire, under mpirun: the contract of all wires, sums with gloo's bits, and which wire is taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from launching import run_script
from workers import Workers

from pyg_dist.backend.comm.wires.gloo import GlooWire

pytest.importorskip("mpi4py")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_wire_contract import BODIES, reduces

SCRIPT = Path(__file__).with_name("mpi_script.py")


def sums() -> list[torch.Tensor]:
    import pyg_dist

    pyg_dist.init()
    return reduces(GlooWire(dist.group.WORLD))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_contract(workers: Callable[[int], Workers], tmp_path: Path, world_size: int) -> None:
    ended = run_script("mpirun", world_size, SCRIPT, str(tmp_path))
    assert ended.codes == [0], ended.stderr
    assert ended.stderr == "", "MPI has nothing to say of requests that are left"
    for rank in range(world_size):
        for body in BODIES:
            assert f"rank {rank}: {body.__name__}" in ended.stdout
    by_mpi = torch.load(tmp_path / "sums.pt")
    for got, want in zip(by_mpi, workers(world_size).run(sums)[0], strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize(
    ("launcher", "asked", "expected"),
    [("mpirun", "auto", "MpiWire"), ("mpirun", "gloo", "GlooWire"), ("ranks", "auto", "GlooWire")],
)
def test_choice(monkeypatch: pytest.MonkeyPatch, launcher: str, asked: str, expected: str) -> None:
    monkeypatch.setenv("PYG_DIST_WIRE", asked)
    ended = run_script(launcher, 2, SCRIPT)
    assert set(ended.codes) == {0}, ended.stderr
    assert f"rank 0: {expected}" in ended.stdout
    assert f"rank 1: {expected}" in ended.stdout


def test_mpi_without_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYG_DIST_WIRE", "mpi")
    ended = run_script("ranks", 2, SCRIPT)
    assert 0 not in ended.codes
    assert "Expected mpi4py to see the 2 ranks, for wire='mpi'" in ended.stderr


def test_a_rank_that_raises_ends_the_run() -> None:
    ended = run_script("mpirun", 3, SCRIPT, "raise", timeout=60)
    assert ended.codes != [0]
    assert "ValueError: this rank is odd" in ended.stderr
    assert ended.seconds < 40
