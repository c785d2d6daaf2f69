"""States in the machines' memory: which one is the newest that is whole, damage, lost machines, and killed ranks."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from bits import assert_all_same_bits
from launching import run_script
from random_graphs import random_graph
from torch import Tensor, nn
from workers import Pools

import pyg_dist
from pyg_dist.backend.comm.wires.wire import Machines
from pyg_dist.backend.session import session
from pyg_dist.backend.session.state import current
from pyg_dist.checkpoint import memory
from pyg_dist.checkpoint.checkpoint import load_into
from pyg_dist.checkpoint.memory import Part, newest_complete
from pyg_dist.checkpoint.record import read_record
from pyg_dist.nn import NodeEmbedding

SCRIPT = Path(__file__).with_name("resume_script.py")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What takes the place of ``/dev/shm``."""
    path = tmp_path / "memory"
    path.mkdir()
    monkeypatch.setattr(memory, "_base", lambda: path)
    return path


def part(number: int, kind: str = "state", attempt: str = "a", holders: tuple[int, ...] = ()) -> Part:
    return Part(number, attempt, kind, list(holders), 0)


def test_the_newest_state_of_which_all_is_there() -> None:
    assert newest_complete([[], []]) == {}
    assert newest_complete([[part(3)], [part(4)]])["state"].number == 4
    whole = [part(3, holders=(0, 2)), part(3, "rows-00000"), part(3, "rows-00002")]
    assert newest_complete([whole, [part(4, holders=(0, 2)), part(4, "rows-00000")]])["state"].number == 3
    other = part(4, "rows-00002", attempt="b")
    found = newest_complete([[*whole, part(4, holders=(0, 2)), part(4, "rows-00000"), other]])
    assert [(p.number, p.attempt) for p in found.values()] == [(3, "a")] * 3, "rows of another attempt belong to it"
    assert newest_complete([[part(9, "rows-00000")]]) == {}


@contextmanager
def machines_of(ranks: str, base: str) -> Iterator[None]:
    """The ranks on several machines, whose memory is in the folder ``base``."""
    session.init()
    of_rank = current().of(Machines)
    before, of_rank.of_rank, os.environ["PYG_DIST_MACHINES"] = of_rank.of_rank, (), ranks
    try:
        with mock.patch.object(memory, "_base", return_value=Path(base)):
            yield
    finally:
        del os.environ["PYG_DIST_MACHINES"]
        of_rank.of_rank = before


class Training:
    """Trained rows, and a layer that all ranks have."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        data = pyg_dist.DistributedData(random_graph(20, 60, seed=1), partition="random")
        self.model = nn.ModuleDict({"rows": NodeEmbedding(data, 3), "last": nn.Linear(3, 2)})
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model["last"](self.model["rows"]()).square().sum().backward()
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        state = [v for p in self.model.parameters() for v in self.optimizer.state[p].values()]
        state = [v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for v in state]
        return [v.clone() for v in self.model.state_dict().values()] + state


def kept(path: str, base: str, machines: str) -> list[list[Tensor]]:
    """The values after each of three steps, of which the newest two are kept."""
    with machines_of(machines, base):
        training, kept = Training(0), memory.MachineMemory(Path(path))
        values = []
        for number in (1, 2, 3):
            training.step()
            kept.keep(number, {"model": training.model, "optimizer": training.optimizer, "number": number})
            values.append(training.values())
        kept.close()
        return values


def restored(path: str, base: str, machines: str) -> tuple[int, list[Tensor]]:
    with machines_of(machines, base):
        training, kept = Training(1), memory.MachineMemory(Path(path))
        found = kept.newest(0)
        if found is None:
            return 0, []
        left = load_into(found, {"model": training.model, "optimizer": training.optimizer})
        kept.forget_restored()
        values = training.values()
        training.step()
        kept.keep(left["number"] + 1, {"model": training.model, "optimizer": training.optimizer, "number": 9})
        kept.close()
        return left["number"], values


@pytest.mark.parametrize(
    ("lost", "expected"), [("nothing", 3), ("a machine", 3), ("both machines' newest rows", 2), ("all", 0)]
)
def test_a_lost_machine_costs_nothing(workers: Pools, tmp_path: Path, base: Path, lost: str, expected: int) -> None:
    """Four ranks on two machines; three ranks on three others go on, of which two have nothing in their memory."""
    path = tmp_path / "run"
    path.mkdir()
    (path / "lock").write_text("name")
    values = workers(4).run(kept, str(path), str(base), "0,0,1,1")[0]
    first, second = sorted(base.iterdir())
    assert {p.stem for p in second.glob("*.?")} == {"state", *(f"rows-{rank:05d}" for rank in range(4))}
    if lost == "a machine":
        shutil.rmtree(first)
    elif lost != "nothing":
        for folder in (first, second):
            for file in folder.glob("rows-00002.?"):
                told = read_record(file)
                assert told is not None
                if lost == "all" or told[0]["number"] == 3:
                    file.write_bytes(file.read_bytes()[:-1])
    for number, found in workers(3).run(restored, str(path), str(base), "1,2,3"):
        assert number == expected
        if number:
            assert_all_same_bits(found, values[number - 1])
    assert not [*base.glob("*/checkpoint")]


def test_memory_without_room_is_told_once_and_training_goes_on(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "run"
    path.mkdir()
    (path / "lock").write_text("name")
    kept, model = memory.MachineMemory(path), nn.Linear(2, 2)
    kept.keep(1, {"model": model})
    monkeypatch.setattr(os, "posix_fallocate", full)
    with caplog.at_level("WARNING", "pyg_dist"):
        kept.keep(2, {"model": model})
        kept.keep(3, {"model": model})
    assert caplog.text.count("keeps no states in memory") == 1
    assert kept.newest(0) is None
    assert memory.MachineMemory(path).newest(0) is None


def test_what_other_runs_have_left_is_removed(tmp_path: Path, base: Path) -> None:
    paths = [tmp_path / name for name in ("gone", "begun anew", "there")]
    for path in paths:
        path.mkdir()
        (path / "lock").write_text(f"name of {path.name}")
        memory.MachineMemory(path)
    shutil.rmtree(paths[0])
    (paths[1] / "lock").write_text("another name")
    memory.MachineMemory(paths[2])
    assert [folder.name.partition("name")[2] for folder in base.iterdir()] == [" of there"]


@pytest.mark.slow
def test_a_killed_rank_costs_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is on the disk; the steps around the kill, and all losses, are those of a run that nobody disturbs."""
    whole = run_script("ranks", 2, SCRIPT, str(tmp_path / "whole"))
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    options = "SIGKILL:15", "--every=100", "--memory=1"
    ended = run_script("torchrun", 2, SCRIPT, str(tmp_path / "run"), *options)
    assert ended.codes == [0], ended.stderr
    lines, printed = whole.stdout.splitlines(), ended.stdout.splitlines()
    # Rank 1 is killed after step 15, before it has kept it; rank 0 may end before it prints it.
    assert printed in (lines[:15] + lines[14:], lines), ended.stdout
    assert not [*Path("/dev/shm").glob(f"pyg_dist-{os.getuid()}-{(tmp_path / 'run' / 'lock').read_text()}*")]
