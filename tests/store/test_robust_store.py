"""Writers that are killed, disks that are full, files that are damaged: the old store or none opens, all is named."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from killing import calls_of, run_killed
from stored_graphs import skewed_graph, write
from test_grid_store import write as write_grid
from torch_geometric.data import Data

from pyg_dist import DistributedData, save_graph
from pyg_dist.cli.conversion import StoreOptions, write_grid_store, write_halo_store
from pyg_dist.cli.stored_plan import check_store
from pyg_dist.data.grid_data import edges_of_tile, stored_grid_plan
from pyg_dist.data.stored_graph import StoreOnRanks, rank_of_part, rows_of
from pyg_dist.errors import DataError, OptionError, PygDistError, StoreError
from pyg_dist.store.folder import PARTIAL, StoreFolder, lock
from pyg_dist.store.grid_store import GridStore
from pyg_dist.store.halo_reader import HaloStore
from pyg_dist.store.manifest import Manifest, digest_of
from pyg_dist.store.sources import open_source

PARTS = 3


def read_as_ranks(path: Path) -> None:
    """All that the ranks of a run would read, one after another."""
    store = HaloStore(path, Manifest.load(path))
    ranks = rank_of_part(store.path, [store], PARTS)
    for rank in range(PARTS):
        share = StoreOnRanks(store, ranks, "hybrid").share(rank)
        for name in store.manifest.node_attributes:
            rows_of(store, "node", name, [rank], share.node_id)
        for name in store.manifest.edge_attributes:
            rows_of(store, "edge", name, [rank], share.edge_id)
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


def key(shard: Path) -> str:
    """The name without the digest."""
    return shard.name.rpartition("-")[0]


def corrupt(rng: random.Random, path: Path, foreign: Path) -> str:
    """Do one bad thing to the store in ``path``; returns what."""
    shards = sorted(p for p in path.iterdir() if p.suffix == ".safetensors")
    victim, kind = rng.choice(shards), rng.choice(["flip", "cut", "grow", "swap", "missing", "foreign", "manifest"])
    if kind == "foreign":  # some files are equal in both; a graph may need fewer orders, and tiles, than another
        like = {key(p) for p in foreign.glob("*.safetensors")}
        victim = rng.choice([p for p in shards if key(p) in like and not (foreign / p.name).exists()])
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
        (other,) = (p for p in foreign.glob("*.safetensors") if key(p) == key(victim))
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


def read_tiles(path: Path) -> None:
    """All that the ranks of a run on two by two tiles would read of a grid store."""
    store = GridStore(path, Manifest.load(path))
    plan = stored_grid_plan(store)
    edges = [edges_of_tile(store, plan.shape, plan.shape.coordinates(rank)) for rank in range(plan.ranks)]
    if edges != list(plan.edges):
        raise StoreError(f"Expected other edges by rank in {path}")
    size, num_edges = store.manifest.num_nodes, store.manifest.num_edges
    halves = [(0, size // 2), (size // 2, size)]
    for order in range(store.num_orders):
        store.order(order)
        for rows in halves:
            for columns in halves:
                store.rectangle(order, rows, columns)
    for name in store.manifest.node_attributes:
        store.range_rows("rows", name, size, 0, size)
    for name in ("source", "target", *store.manifest.edge_attributes):
        store.range_rows("edges", name, num_edges, 0, num_edges)
    for name in store.manifest.shards["other"].tensors:
        store.tensor("other", name)


def written(layout: str, folder: Path, seed: int) -> Path:
    data = skewed_graph(seed=seed)
    if layout == "grid":
        return write_grid(folder, 4, {"x": 2, "z": 2}, (2, 3), data=data)
    return write(data, folder, parts_of(seed), PARTS)


@pytest.mark.parametrize(("layout", "times"), [pytest.param("halo", 400, marks=pytest.mark.slow), ("grid", 100)])
def test_500_corruptions_are_named(tmp_path: Path, layout: str, times: int) -> None:
    store, foreign = (written(layout, tmp_path / name, seed) for seed, name in enumerate(("own", "foreign")))
    read_all = read_tiles if layout == "grid" else read_as_ranks
    read_all(store)
    check_store(store)
    for seed in range(times):
        rng, path = random.Random(seed), tmp_path / "bad"
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(store, path)
        what = corrupt(rng, path, foreign)
        for read in (read_all, check_store):
            message = message_of(lambda path=path, read=read: read(path))
            assert message, f"{what} was not noticed by {read.__name__}, seed {seed}"
            assert "\n" not in message
            assert str(path) in message, (what, message)


def test_what_cannot_be_read_is_named(store: Path, tmp_path: Path) -> None:
    for name in ("manifest.json", next(store.glob("nodes-00001-*")).name):
        path = shutil.copytree(store, tmp_path / name)
        (path / name).unlink()
        (path / name).mkdir()
        assert "Is a directory" in message_of(lambda path=path: read_as_ranks(path))


@pytest.mark.parametrize("folder", [None, 3, ("store",)])
def test_what_is_no_path(folder: object) -> None:
    with pytest.raises(StoreError, match="Expected the path of a store's folder"):
        DistributedData.open(folder)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("room", "name", "value"),
    [("graph", "key", "edges"), ("graph", "loop_rule", "none"), ("plan", "partition", 3), ("plan", "nan", {"x": "y"})],
)
def test_a_manifest_of_something_else(store: Path, tmp_path: Path, room: str, name: str, value: Any) -> None:
    shutil.copytree(store, tmp_path / "store")
    content = json.loads((store / "manifest.json").read_text())
    content[room][name] = value
    del content["digest"]
    told = json.dumps(content | {"digest": digest_of(content)}, indent=1)
    (tmp_path / "store" / "manifest.json").write_text(told)
    with pytest.raises(StoreError, match="write the store again"):
        DistributedData.open(tmp_path / "store")


@pytest.mark.parametrize("points", [12, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_many_points(tmp_path: Path, points: int) -> None:
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
    for number in range(points):
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
    assert killed >= 0.9 * points


def test_a_resumed_writer_keeps_what_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_graph(skewed_graph(), tmp_path / "g.safetensors")
    source, options = open_source(str(tmp_path / "g.safetensors")), StoreOptions(PARTS, "random")
    made: list[str] = []
    finish = StoreFolder.finish

    def counted(self: Any, key: str, *args: Any) -> Any:
        if key == "halo-00002" and "halo-00002 fails" not in made:
            made.append("halo-00002 fails")
            raise KeyboardInterrupt
        made.append(key)
        return finish(self, key, *args)

    monkeypatch.setattr(StoreFolder, "finish", counted)
    with pytest.raises(KeyboardInterrupt):
        write_halo_store(source, tmp_path / "out", options)
    damaged = next((tmp_path / "out").glob("edges-00000-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    made[:] = ["halo-00002 fails"]
    write_halo_store(source, tmp_path / "out", StoreOptions(PARTS, "random", resume=True))
    assert made[1:] == ["edges-00000", "halo-00000", "edges-00002", "halo-00002"]
    check_store(tmp_path / "out")


@pytest.mark.parametrize("layout", ["halo", "grid"])
def test_a_writer_may_end_at_any_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    save_graph(skewed_graph(), tmp_path / "g.safetensors")
    finish, left = StoreFolder.finish, 0

    def convert(out: Path, **options: Any) -> None:
        source, chosen = open_source(str(tmp_path / "g.safetensors")), StoreOptions(PARTS, "random", **options)
        if layout == "grid":
            write_grid_store(source, out, chosen, (2, 2))
        else:
            write_halo_store(source, out, chosen)

    def counted(self: Any, *args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return finish(self, *args)

    convert(tmp_path / "whole")
    wanted = files_of(tmp_path / "whole")
    monkeypatch.setattr(StoreFolder, "finish", counted)
    for number in range(0, len(wanted) - 1, 2):
        out, left = tmp_path / f"out{number}", number
        with pytest.raises(KeyboardInterrupt):
            convert(out)
        assert not (out / "manifest.json").exists()
        left = 1000
        convert(out, resume=True)
        assert files_of(out) == wanted


def test_what_is_in_the_way(store: Path, tmp_path: Path) -> None:
    save_graph(skewed_graph(), tmp_path / "g.safetensors")

    def message(out: Path, **options: Any) -> str:
        with pytest.raises(PygDistError) as caught:
            write_halo_store(
                open_source(str(tmp_path / "g.safetensors")), out, StoreOptions(**({"parts": 2} | options))
            )
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def saved(path: Path, name: str = "x") -> str:
        data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
        data[name] = torch.ones(2)
        with pytest.raises(PygDistError) as caught:
            save_graph(data, path)
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
    assert not (tmp_path / "new").exists()  # nothing is in the way of other options
    with lock(tmp_path / "new" / ".partial" / "lock"):
        assert "Expected no other writer" in message(tmp_path / "new")
    assert "Expected no interrupted work" in message(tmp_path / "new")
    assert "make it" in saved(tmp_path / "none" / "g.safetensors")
    assert "'__metadata__'" in saved(tmp_path / "g.safetensors", "__metadata__")


def test_a_wrong_input_leaves_nothing(store: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "edges.txt", tmp_path / "out"
    for before in (None, store):
        if before is not None:
            shutil.copytree(before, out)
        text.write_text("0 1\n1 x\n")
        with pytest.raises(DataError, match="line 2"):
            write_halo_store(open_source(str(text)), out, StoreOptions(2, "random", force=before is not None))
        assert (files_of(out) if out.exists() else None) == (before and files_of(before))
        assert not (out / PARTIAL).exists()
    shutil.rmtree(out)
    text.write_text(f"0 1\n1 {10**13}\n")
    with pytest.raises(OptionError, match=r"the largest id is in .*, line 2"):
        write_halo_store(open_source(str(text)), out, StoreOptions(2, "random"))


def test_a_full_disk_before_and_during(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_graph(skewed_graph(), tmp_path / "g.safetensors")
    source = open_source(str(tmp_path / "g.safetensors"))
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
        with pytest.raises(StoreError, match=r"Expected .* (KiB|MiB) free in .*got 0.*(KiB|MiB)\)"):
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
