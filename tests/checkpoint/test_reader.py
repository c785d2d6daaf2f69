"""Damaged and evil checkpoints: each is refused by its file, in one line, and nothing is loaded."""

from __future__ import annotations

import json
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import assert_all_same_bits
from random_graphs import random_graph
from torch import Tensor, nn

import pyg_dist
from pyg_dist import checkpoint
from pyg_dist.errors import DataError, StoreError
from pyg_dist.nn import NodeEmbedding
from pyg_dist.store.format import FileLayout, TensorSpec
from pyg_dist.store.manifest import digest_of
from pyg_dist.store.reader import name_digest

FOLDER = "checkpoint-00000001"


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    data = pyg_dist.DistributedData(random_graph(20, 60, seed=1), partition="random")
    return nn.Sequential(NodeEmbedding(data, 3), nn.Linear(3, 2))


def values_of(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.state_dict().values()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, model = tmp_path_factory.mktemp("run"), model_of(0)
    optimizer = torch.optim.Adam(model.parameters())
    checkpoint.save(path, model, optimizer, epoch=3)
    return path


def require_refused(path: Path, model: nn.Module, error: type[Exception] = StoreError) -> str:
    """Loading raises one line about the file, and leaves the model as it was."""
    before = values_of(model)
    with pytest.raises(error) as caught:
        checkpoint.load(path, model)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    assert_all_same_bits(values_of(model), before)
    return message


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "copy")
    return tmp_path / "copy"


def test_500_flipped_bytes(copy: Path) -> None:
    rng, model = random.Random(0), model_of(1)
    files = sorted((copy / FOLDER).iterdir())
    assert {p.name.partition("-")[0] for p in files} == {"manifest.json", "rows", "state"}
    for number in range(500):
        victim = files[number % len(files)]
        content = victim.read_bytes()
        place = rng.randrange(len(content))
        victim.write_bytes(content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :])
        assert victim.name in require_refused(copy, model) or victim.name == "manifest.json"
        victim.write_bytes(content)
    checkpoint.load(copy, model)


def test_truncated_and_longer_files(copy: Path) -> None:
    model = model_of(1)
    for victim in sorted((copy / FOLDER).iterdir()):
        content = victim.read_bytes()
        for size in (*range(0, len(content), max(len(content) // 20, 1)), len(content) - 1):
            victim.write_bytes(content[:size])
            assert "load takes the one before it" in require_refused(copy, model)
        victim.write_bytes(content + b"\0")
        require_refused(copy, model)
        victim.write_bytes(content)


def test_missing_and_foreign_files(copy: Path, tmp_path: Path) -> None:
    model = model_of(1)
    checkpoint.save(tmp_path / "other", model)
    for victim in sorted((copy / FOLDER).glob("*.safetensors")):
        content = victim.read_bytes()
        victim.unlink()
        assert victim.name in require_refused(copy, model)
        (other,) = (tmp_path / "other" / FOLDER).glob(f"{victim.name.partition('-')[0]}*")
        shutil.copy(other, victim)
        assert victim.name in require_refused(copy, model)
        victim.write_bytes(content)


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Another manifest, with the digest of what it says."""
    file = path / FOLDER / "manifest.json"
    content = json.loads(file.read_text())
    change(content)
    del content["digest"]
    file.write_text(json.dumps(content | {"digest": digest_of(content)}, indent=1))


def resized(entry: dict[str, Any], name: str, shape: list[int]) -> None:
    """A shard that says so in its manifest in all places."""
    entry["tensors"][name]["shape"] = shape
    specs = {n: TensorSpec(t["dtype"], tuple(t["shape"])) for n, t in entry["tensors"].items()}
    layout = FileLayout.of(specs)
    digests = {n: t["digest"] for n, t in entry["tensors"].items()}
    key = entry["file"].rpartition("-")[0]
    entry |= {"bytes": layout.num_bytes, "file": f"{key}-{name_digest(layout.header, digests)}.safetensors"}


EVIL: dict[str, Callable[[dict[str, Any]], None]] = {
    "a huge shape": lambda m: m["shards"]["state"]["tensors"]["model.1.weight"].update(shape=[1 << 40, 1 << 20]),
    "a huge shape everywhere": lambda m: resized(m["shards"]["state"], "model.1.weight", [1 << 24, 1 << 24]),
    "a negative shape": lambda m: m["shards"]["state"]["tensors"]["model.1.weight"].update(shape=[-2, 3]),
    "a path": lambda m: m["shards"]["state"].update(file="../state-0000000000000000.safetensors"),
    "a path as a key": lambda m: m["shards"].update({"../rows-00001": m["shards"]["rows-00000"]}),
    "an absolute path": lambda m: m["shards"]["state"].update(file="/etc/passwd"),
    "many tensors": lambda m: m["shards"]["state"]["tensors"].update(
        {f"t{k}": {"dtype": "F32", "shape": [0], "digest": ""} for k in range(100_000)}
    ),
    "a tensor that is not there": lambda m: m["state"].update(epoch={"$tensor": "no such"}),
    "an unknown kind": lambda m: m["state"].update(epoch={"$pickle": "gASVIAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOULg=="}),
    "deep lists": lambda m: m["state"].update(epoch=json.loads("[" * 900 + "]" * 900)),
    "other rows": lambda m: m["rows"]["model.0.weight"].update(sharding=7),
    "no generators": lambda m: m.update(generators={}),
    "generators that are none": lambda m: m["generators"].update(Python=[1, 2]),
    "no state": lambda m: m.update(state=[]),
    "another format": lambda m: m.update(format="pyg_dist store"),
    "another version": lambda m: m.update(version=2),
    "no rows": lambda m: m["shards"].pop("rows-00000"),
}


@pytest.mark.parametrize("name", EVIL)
def test_evil_manifests(copy: Path, name: str) -> None:
    model = model_of(1)
    rewrite(copy, EVIL[name])
    tracemalloc.start()
    try:
        require_refused(copy, model, DataError)  # some are taken for another model's
        assert tracemalloc.get_traced_memory()[1] < 100 << 20
    finally:
        tracemalloc.stop()


def test_a_manifest_of_a_million_keys_is_not_even_parsed(copy: Path) -> None:
    model, file = model_of(1), copy / FOLDER / "manifest.json"
    file.write_text('{"format": "pyg_dist checkpoint", ' + ", ".join(f'"k{k:08}": 0' for k in range(10**6)) + "}")
    tracemalloc.start()
    try:
        require_refused(copy, model)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("shape", [[4, 3], [2, 4], [2], []])
def test_tensors_of_other_shapes(copy: Path, shape: list[int]) -> None:
    rewrite(copy, lambda m: m["rows"]["model.0.weight"].update(shape=shape))
    assert "'model.0.weight'" in require_refused(copy, model_of(1), DataError)


def test_when_the_newest_is_removed_the_one_before_it_loads(copy: Path) -> None:
    model = model_of(1)
    checkpoint.save(copy, model, epoch=4)
    second = copy / "checkpoint-00000002"
    (shard,) = second.glob("rows*")
    shard.unlink()
    with pytest.raises(StoreError, match="restore it, or"):
        checkpoint.load(copy, model)
    shutil.rmtree(second)
    assert checkpoint.load(copy, model)["epoch"] == 3
