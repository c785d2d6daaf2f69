"""Checkpoints that are interrupted, fail or do not fit on the disk: the one before them is what loads."""

from __future__ import annotations

import errno
import os
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from killing import calls_of, run_killed
from launching import run_script
from torch import nn
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import checkpoint
from pyg_dist.backend.session import state
from pyg_dist.backend.session.leaving import StopRequest
from pyg_dist.checkpoint import writer
from pyg_dist.checkpoint import writer as writer_module
from pyg_dist.checkpoint.writer import Writer
from pyg_dist.nn import NodeEmbedding


def model_of(value: int) -> nn.Module:
    model = nn.Linear(40, 30)
    nn.init.constant_(model.weight, value)
    return model


def write(path: Path, value: int) -> None:
    """Save a model of some value in this process."""
    checkpoint.save(path, model_of(value), number=value, keep=2)


class Immediate:
    """A pool that runs what it is given at once: a profiler that counts calls sees one thread."""

    def __init__(self, *args: Any) -> None: ...

    def submit(self, function: Callable[..., Any], *args: Any) -> Any:
        from concurrent.futures import Future

        future: Future[Any] = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait: bool = True) -> None: ...


def loaded(path: Path) -> int:
    model = nn.Linear(40, 30)
    number: int = checkpoint.load(path, model)["number"]
    assert torch.equal(model.weight, torch.full_like(model.weight, number))
    return number


def test_the_newest_stay(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path, number)
        assert loaded(tmp_path) == number
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-00000004", "checkpoint-00000005", "lock"]


def test_killed_anywhere_the_one_before_it_or_the_new_one_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "ThreadPoolExecutor", Immediate)
    path = tmp_path / "run"
    for number in range(3):
        write(path, number)
    total = calls_of(lambda: write(path, 3))
    rng, number, killed = random.Random(0), 3, 0
    for _ in range(30):
        killed += run_killed(lambda value=number + 1: write(path, value), rng.randrange(total // 3, total))
        found = loaded(path)
        assert found in (number, number + 1)
        number = found
    assert killed >= 25
    assert number > 3
    write(path, number + 1)
    assert len([*path.glob("checkpoint-*")]) == 2, "what the killed ones have left is gone"


def test_killed_at_every_rename_and_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "ThreadPoolExecutor", Immediate)
    path = tmp_path / "run"
    write(path, 0)
    for call in ("fsync", "replace", "pwrite", "unlink", "rmdir", "mkdir"):
        for after in range(1, 12):
            number = loaded(path)
            child = os.fork()
            if child == 0:
                left, own = after, getattr(os, call)

                def count(*args: Any, own: Any = own, **kwargs: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left == 0:
                        os._exit(9)
                    return own(*args, **kwargs)

                setattr(os, call, count)
                try:
                    write(path, number + 1)
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            assert loaded(path) in (number, number + 1)
            if os.waitstatus_to_exitcode(status) == 0:  # fewer calls than that
                break


@on_ranks(1)
def test_two_runs_in_one_folder(tmp_path: Path) -> None:
    first = checkpoint.Checkpointer(tmp_path, model=model_of(1))
    with (
        patch.object(writer, "_LOCK_SECONDS", 0.0),
        pytest.raises(ValueError, match=r"Expected no other writer in .* \(another process holds lock\)"),
    ):
        write(tmp_path, 2)
    assert list(first.epochs(1)) == [0]
    state.current().of(StopRequest).close()  # which epochs() asks
    write(tmp_path, 2)
    assert loaded(tmp_path) == 2


keeps_its_own = pytest.mark.skipif(sys.version_info < (3, 11), reason="pathlib has os.mkdir by another name")


@pytest.mark.parametrize("what", ["pwrite", "replace", "fsync", pytest.param("mkdir", marks=keeps_its_own)])
def test_a_full_disk_is_told_and_leaves_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """``replace``: the room ends with the manifest."""
    write(tmp_path, 1)
    own = getattr(os, what)

    def full(*args: Any, **kwargs: Any) -> Any:
        if what == "replace" and not str(args[1]).endswith("manifest.json"):
            return own(*args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, what, full)
        with pytest.raises(ValueError, match=r"Expected room to write in .*checkpoint-00000002 .*No space") as caught:
            write(tmp_path, 2)
    assert "\n" not in str(caught.value)
    assert loaded(tmp_path) == 1
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-00000001"]


@pytest.mark.parametrize("name", ["run", "run/deep"])
def test_a_file_where_the_folder_is_to_be(tmp_path: Path, name: str) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ValueError, match=r"Expected .*run.* to be a folder that can be written \(got: ") as caught:
        write(tmp_path / name, 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("killed", [0, 2])
def test_a_rank_that_is_killed_as_it_writes_ends_the_others(tmp_path: Path, killed: int) -> None:
    """Rank 0's thread waits for its word in the store, and main threads for rank 0's."""
    ended = run_script("ranks", 3, Path(__file__).with_name("killed_script.py"), str(tmp_path / "run"), str(killed))
    assert ended.codes[killed] == -9
    assert 0 not in ended.codes
    lost = rf"pyg_dist: rank \d lost its connection to (rank {killed}|another rank), which was killed or has crashed"
    assert re.search(lost, ended.stderr), ended.stderr
    assert loaded(tmp_path / "run") == 1


def one_rank_fails(path: str, failing: int) -> tuple[str, int]:
    from random_graphs import random_graph

    data = pyg_dist.DistributedData(random_graph(20, 60), partition="random")
    model = nn.Sequential(NodeEmbedding(data, 3), nn.Linear(3, 2))
    checkpoint.save(path, model, number=1)
    own = os.pwrite

    def broken(*args: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    os.pwrite = broken if pyg_dist.rank() == failing else own
    try:
        with pytest.raises((ValueError, OSError)) as caught:
            checkpoint.save(path, model, number=2)
    finally:
        os.pwrite = own
    number: int = checkpoint.load(path, model)["number"]
    checkpoint.save(path, model, number=3)
    assert checkpoint.load(path, model)["number"] == 3
    return str(caught.value), number


@pytest.mark.parametrize("failing", [0, 2])
def test_one_rank_cannot_write(workers: Pools, tmp_path: Path, failing: int) -> None:
    for rank, (message, number) in enumerate(workers(3).run(one_rank_fails, str(tmp_path), failing)):
        assert number == 1
        assert "Input/output error" in message
        assert rank == failing or message.startswith(f"Rank {failing} failed")


def ends_without_the_part_of(path: str, silent: int) -> tuple[list[str], int]:
    model = nn.Linear(3, 2)
    checkpoint.save(path, model, number=1)
    said = list[str]()
    with pytest.MonkeyPatch.context() as changes:
        changes.setattr(writer_module, "_LONGEST_END", 0.2)
        changes.setattr(writer_module.logger, "error", lambda form, *given: said.append(form % given))
        if pyg_dist.rank() == silent:
            changes.setattr(Writer, "_gather", lambda *_: None)
        writer = Writer(Path(path), keep=2)
        writer.begin({"model": model, "number": 2})
        writer.close()
    number: int = checkpoint.load(path, model)["number"]
    return said, number


def test_a_run_ends_without_the_part_of_a_rank_that_is_gone(workers: Pools, tmp_path: Path) -> None:
    (of_0, number), (of_1, _) = workers(2).run(ends_without_the_part_of, str(tmp_path), 1)
    assert [len(of_0), len(of_1), number] == [1, 0, 1]
    assert "part within 0.2 s of the end (got none of some rank" in of_0[0]
