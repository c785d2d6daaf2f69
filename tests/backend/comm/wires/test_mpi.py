"""MPI as a wire, under mpirun: the contract of all wires, sums with gloo's bits, and which wire is taken."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launching import run_script
from workers import Pools

import pyg_dist
from pyg_dist.backend.comm.wires.gloo import GlooWire

pytest.importorskip("mpi4py")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from test_wire_contract import BODIES, reduces

SCRIPT = Path(__file__).with_name("mpi_script.py")


def sums() -> list[str]:
    pyg_dist.init()
    return reduces(GlooWire(dist.group.WORLD))


@pytest.mark.parametrize("world_size", [3])
def test_contract(workers: Pools, tmp_path: Path, world_size: int) -> None:
    ended = run_script("mpirun", world_size, SCRIPT, "contract", str(tmp_path))
    assert ended.codes == [0], ended.stderr
    assert ended.stderr == "", "MPI has nothing to say of requests that are left"
    for rank in range(world_size):
        for body in BODIES:
            assert f"rank {rank}: {body.__name__}" in ended.stdout
    by_mpi = torch.load(tmp_path / "sums.pt")
    assert by_mpi == workers(world_size).run(sums)[0]


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


def said(num_ranks: int, case: str) -> list[str]:
    ended = run_script("mpirun", num_ranks, SCRIPT, case)
    assert (ended.codes, ended.stderr) == ([0], ""), ended.stderr
    return sorted(ended.stdout.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3])
def test_losses_have_the_same_bits(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    found = []
    for launcher, asked in (("mpirun", "auto"), ("mpirun", "gloo"), ("torchrun", "auto")):
        monkeypatch.setenv("PYG_DIST_WIRE", asked)
        ended = run_script(launcher, num_ranks, SCRIPT, "losses")
        assert set(ended.codes) == {0}, ended.stderr
        found.append(sorted(ended.stdout.splitlines()))
    assert len(found[0]) == num_ranks * 6
    assert found[0] == found[1] == found[2]


def test_ranks_have_no_sockets_until_the_script_asks() -> None:
    """Beside MPI's own, and the one on which torch's process group would hear."""
    found = said(3, "sockets")
    assert found == [line for rank in range(3) for line in (f"rank {rank}: 1 sockets", f"rank {rank}: sum 3")]


def test_a_wait_that_is_too_long_is_named() -> None:
    ended = run_script("mpirun", 2, SCRIPT, "waits too long")
    assert 0 not in ended.codes
    assert "pyg_dist: rank 0 has waited 1 s, the timeout of init(), for rank 1 at mpi_script.py:" in ended.stderr
    assert "a sum of 1 uint8 among ranks 0-1: see that rank's log; ending rank 1 of 2" in ended.stderr


@pytest.mark.parametrize("progress", ["none", "thread"])
def test_progress(monkeypatch: pytest.MonkeyPatch, progress: str) -> None:
    """With a thread, large messages arrive while Python does something else."""
    monkeypatch.setenv("PYG_DIST_MPI_PROGRESS", progress)
    found = said(2, "progress")
    if progress == "thread":
        assert found == [f"rank {rank}: arrived by itself: True" for rank in range(2)]


def test_workers_of_a_loader() -> None:
    """Forked from a process in which MPI runs, with plain tensors."""
    assert said(2, "workers") == [f"rank {rank}: sum 56" for rank in (0, 0, 1, 1)]


@pytest.mark.slow
def test_many_ranks_on_few_cores(shared_data: Path) -> None:
    script = SCRIPT.with_name("many_ranks_script.py")
    (alone,), many = (
        re.findall(
            r"rank \d+: (\S+) (\d+) MiB", run_script(launcher, num_ranks, script, str(shared_data / "cora.npz")).stdout
        )
        for launcher, num_ranks in (("python", 1), ("mpirun", 16))
    )
    assert len(many) == 16
    assert {loss for loss, _ in many} == {many[0][0]}
    assert float(many[0][0]) == pytest.approx(float(alone[0]), rel=1e-4)
    assert max(int(size) for _, size in many) < 150
