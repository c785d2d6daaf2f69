"""Writers that are killed, disks that are full, files that are damaged: the old store or none opens, all is named."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_graphs import skewed_graph, write

from pyg_dist import save_graph
from pyg_dist.data.stored_halo import edge_rows, node_rows, rank_of_part, stored_share
from pyg_dist.errors import PygDistError, StoreError
from pyg_dist.report.conversion import StoreOptions, write_halo_store
from pyg_dist.report.stored_plan import check_store
from pyg_dist.store.folder import PARTIAL
from pyg_dist.store.halo_reader import HaloStore
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.sources import open_source

PARTS = 3


def read_as_ranks(path: Path) -> None:
    """All that the ranks of a run would read, one after another."""
    store = HaloStore(path, Manifest.load(path))
    ranks = rank_of_part(store, PARTS)
    for rank in range(PARTS):
        share = stored_share(store, rank, ranks, "hybrid")
        for name in store.manifest.node_attributes:
            node_rows(store, name, [rank], share)
        for name in store.manifest.edge_attributes:
            edge_rows(store, name, [rank], share)
        for name in store.manifest.shards["other"].tensors:
            store.tensor("other", name)


def files_of(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}


def parts_of(seed: int) -> torch.Tensor:
    return torch.randint(0, PARTS, (200,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(skewed_graph(), tmp_path_factory.mktemp("store"), parts_of(0), PARTS)


def message_of(call: Callable[[], Any]) -> str:
    """The error of a store, or nothing."""
    try:
        call()
    except StoreError as error:
        return str(error)
    return ""


def corrupt(rng: random.Random, path: Path, foreign: Path) -> str:
    """Do one bad thing to the store in ``path``; returns what."""
    shards = sorted(p for p in path.iterdir() if p.suffix == ".safetensors")
    victim, kind = rng.choice(shards), rng.choice(["flip", "cut", "grow", "swap", "missing", "foreign", "manifest"])
    if kind == "foreign":  # attributes without rows are equal in both
        victim = rng.choice([p for p in shards if not p.name.startswith("other")])
    if kind == "flip":
        content = bytearray(victim.read_bytes())
        place = rng.randrange(len(content))
        content[place] ^= 1 << rng.randrange(8)
        victim.write_bytes(content)
    elif kind == "cut":
        victim.write_bytes(victim.read_bytes()[: rng.randrange(victim.stat().st_size)])
    elif kind == "grow":
        victim.write_bytes(victim.read_bytes() + rng.randbytes(rng.randint(1, 64)))
    elif kind == "swap":
        other = rng.choice([p for p in shards if p != victim])
        content = victim.read_bytes()
        victim.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == "missing":
        victim.unlink()
    elif kind == "foreign":
        (other,) = foreign.glob(victim.name[: victim.name.rindex("-")] + "-*")
        victim.write_bytes(other.read_bytes())
    else:
        victim = path / "manifest.json"
        text = bytearray(victim.read_bytes())
        how = rng.choice(["flip", "cut", "number", "key"])
        if how == "flip":
            text[rng.randrange(len(text))] ^= 1 << rng.randrange(8)
        elif how == "cut":
            text = text[: rng.randrange(len(text))]
        else:
            content = json.loads(text)
            if how == "key":
                del content[rng.choice(list(content))]
            else:
                content[rng.choice(["num_nodes", "num_edges", "num_parts", "version"])] += rng.choice([-1, 1])
            text = bytearray(json.dumps(content, indent=1).encode())
        victim.write_bytes(text)
    return f"{kind} {victim.name}"


@pytest.mark.timeout(600)
def test_500_corruptions_are_named(store: Path, tmp_path: Path) -> None:
    foreign = write(skewed_graph(seed=1), tmp_path / "foreign", parts_of(1), PARTS)
    read_as_ranks(store)
    check_store(store)
    for seed in range(500):
        rng, path = random.Random(seed), tmp_path / "bad"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(store, path)
        what = corrupt(rng, path, foreign)
        for read in (read_as_ranks, check_store):
            message = message_of(lambda path=path, read=read: read(path))
            assert message, f"{what} was not noticed by {read.__name__}, seed {seed}"
            assert "\n" not in message
            assert str(path) in message, (what, message)


def run_killed(function: Callable[[], Any], after: int) -> bool:
    """Run in a process of its own that is killed at the call number ``after``; whether it came to that."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == after:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        try:
            function()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def calls_of(function: Callable[[], Any]) -> int:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.timeout(900)
def test_killed_at_50_points(tmp_path: Path) -> None:
    for name, seed in (("old", 0), ("new", 1)):
        save_graph(skewed_graph(seed=seed), tmp_path / f"{name}.safetensors")

    def convert(name: str, out: Path, **options: bool) -> None:
        source = open_source(str(tmp_path / f"{name}.safetensors"))
        write_halo_store(source, out, StoreOptions(PARTS, "random", memory=8 << 20, **options))

    for name in ("old", "new"):
        convert(name, tmp_path / f"whole-{name}")
    wanted = {name: files_of(tmp_path / f"whole-{name}") for name in ("old", "new")}
    total = calls_of(lambda: convert("new", tmp_path / "counted"))
    assert files_of(tmp_path / "counted") == wanted["new"]
    rng, killed = random.Random(0), 0
    for number in range(50):
        out, replaces = tmp_path / f"out{number}", bool(number % 2)
        if replaces:
            shutil.copytree(tmp_path / "whole-old", out)
        killed += run_killed(lambda out=out, force=replaces: convert("new", out, force=force), rng.randrange(total))
        if (out / "manifest.json").exists():
            read_as_ranks(out)
            found = Manifest.load(out).to_json().encode()
            assert found in (wanted["old"]["manifest.json"], wanted["new"]["manifest.json"])
            assert replaces or found == wanted["new"]["manifest.json"]
        else:
            assert not replaces
            with pytest.raises(StoreError):
                Manifest.load(out)
        if (out / PARTIAL).exists():
            convert("new", out, resume=True)
        elif not (out / "manifest.json").exists():
            convert("new", out)
        if (out / "manifest.json").read_bytes() == wanted["new"]["manifest.json"]:
            assert files_of(out) == wanted["new"]
            assert not (out / PARTIAL).exists()
        shutil.rmtree(out)
    assert killed >= 45


def test_a_resumed_writer_keeps_what_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pyg_dist.store.folder import StoreFolder

    save_graph(skewed_graph(), tmp_path / "g.safetensors")
    source, options = open_source(str(tmp_path / "g.safetensors")), StoreOptions(PARTS, "random")
    made: list[str] = []
    keep = StoreFolder.keep

    def counted(self: Any, key: str, *args: Any) -> Any:
        if key == "halo-00002" and "halo-00002 fails" not in made:
            made.append("halo-00002 fails")
            raise KeyboardInterrupt
        made.append(key)
        return keep(self, key, *args)

    monkeypatch.setattr(StoreFolder, "keep", counted)
    with pytest.raises(KeyboardInterrupt):
        write_halo_store(source, tmp_path / "out", options)
    damaged = next((tmp_path / "out").glob("edges-00000-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    made[:] = ["halo-00002 fails"]
    write_halo_store(source, tmp_path / "out", StoreOptions(PARTS, "random", resume=True))
    assert made[1:] == ["edges-00000", "halo-00000", "edges-00002", "halo-00002"]
    check_store(tmp_path / "out")


def test_what_is_in_the_way(store: Path, tmp_path: Path) -> None:
    save_graph(skewed_graph(), tmp_path / "g.safetensors")

    def message(out: Path, **options: Any) -> str:
        with pytest.raises(PygDistError) as caught:
            write_halo_store(
                open_source(str(tmp_path / "g.safetensors")), out, StoreOptions(**({"parts": 2} | options))
            )
        assert "\n" not in str(caught.value)
        return str(caught.value)

    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("do not delete")
    before = files_of(store)
    assert "--force" in message(store)
    assert files_of(store) == before
    assert "choose another" in message(tmp_path / "full")
    assert "thesis.txt" in message(tmp_path / "full", force=True)
    assert "got a file" in message(tmp_path / "g.safetensors")
    assert "200 nodes" in message(tmp_path / "new", parts=201)
    assert "one part" in message(tmp_path / "new", parts=0)
    assert "--memory" in message(tmp_path / "new", memory=1 << 10)
    assert not (tmp_path / "new" / "manifest.json").exists()


def test_a_full_disk_before_and_during(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_graph(skewed_graph(), tmp_path / "g.safetensors")
    source = open_source(str(tmp_path / "g.safetensors"))
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(StoreError, match="GiB free"):
            write_halo_store(source, tmp_path / "out", StoreOptions(PARTS, "random"))
    pwrite, left = os.pwrite, 20_000

    def write_some(descriptor: int, content: Any, offset: int) -> int:
        nonlocal left
        left -= len(content)
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(descriptor, content, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", write_some)
        with pytest.raises(StoreError, match="free space and go on with --resume"):
            write_halo_store(source, tmp_path / "out", StoreOptions(PARTS, "random"))
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(StoreError, match="--resume goes on"):
        write_halo_store(source, tmp_path / "out", StoreOptions(PARTS, "random"))
    with pytest.raises(StoreError, match="of others"):
        write_halo_store(source, tmp_path / "out", StoreOptions(2, "random", resume=True))
    write_halo_store(source, tmp_path / "out", StoreOptions(PARTS, "random", resume=True))
    write_halo_store(source, tmp_path / "whole", StoreOptions(PARTS, "random"))
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
