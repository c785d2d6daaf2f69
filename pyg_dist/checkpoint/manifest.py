"""The folder of a run's checkpoints: one folder each, complete if it has a manifest.

``PATH/checkpoint-00000012/`` has ``state-….safetensors``, tensors that are equal on all ranks; where these are large,
``state-00003-….safetensors`` with those that rank 3 has written; ``rows-00003-….safetensors``, rank 3's rows with their
numbers; and ``manifest.json``, everything else. ``PATH/lock`` is locked by the run that saves there, and has its name.
"""

from __future__ import annotations

import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar

from pyg_dist.store.format import sync
from pyg_dist.store.manifest import FILE, Kind, Shard, Signed

_NAME = re.compile(r"checkpoint-(\d{8})")

LOCK = "lock"

STATE, PARTS = "state", "$parts"
"""The shard in which rank 0 writes tensors that are equal on all ranks; the tensor there with the graph's parts."""


def state_of(rank: int) -> str:
    """The shard in which a rank writes tensors that are equal on all ranks."""
    return f"{STATE}-{rank:05d}" if rank else STATE


def rows_of(rank: int) -> str:
    """The shard of a rank's rows."""
    return f"rows-{rank:05d}"


@dataclass(frozen=True)
class Rows:
    """A tensor whose rows are spread over the shards."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]  # of the whole tensor
    sharding: int  # the number of the distribution: a shard has the numbers of its rows once for all tensors of one

    @property
    def positions(self) -> str:
        """The name of the tensor, in each shard, with the numbers of its rows."""
        return f"$positions {self.sharding}"

    @property
    def first_column(self) -> str:
        """The name of the tensor, in each shard, with the number of its first column."""
        return f"$first column {self.sharding}"


@dataclass(frozen=True)
class Manifest(Signed):
    """The manifest of a checkpoint."""

    kind: ClassVar[Kind] = Kind(
        "checkpoint", 1, "save one with pyg_dist.checkpoint", "remove its folder: load takes the one before it", 1 << 23
    )

    num_ranks: int  # ranks that saved it
    state: dict[str, object]  # JSON of the states by name, see plain_json; a tensor is ``{"$tensor": name}``
    generators: dict[str, object]  # likewise of the generators' states
    rows: dict[str, Rows]  # the tensors that are spread over shards, by name
    shards: dict[str, Shard]  # files by key
    digest: str = ""  # of all of the above


def numbers(path: Path, are_complete: bool = True) -> list[int]:
    """The numbers of the checkpoints in a folder, ascending; incomplete ones count, too, unless ``are_complete``."""
    names = (_NAME.fullmatch(p.name) for p in path.iterdir()) if path.is_dir() else ()
    return sorted(int(name[1]) for name in names if name and (not are_complete or (path / name[0] / FILE).exists()))


def folder_of(path: Path, number: int) -> Path:
    """The folder of a checkpoint."""
    return path / f"checkpoint-{number:08d}"


def remove(path: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest ``keep``, and all incomplete ones."""
    complete = numbers(path)
    for number in complete[:-keep]:
        (folder_of(path, number) / FILE).unlink()  # from here on it is incomplete
        sync(folder_of(path, number))
    kept = {folder_of(path, number).name for number in complete[-keep:]}
    for folder in path.iterdir():
        if _NAME.fullmatch(folder.name) and folder.name not in kept:
            shutil.rmtree(folder)


def name_run(lock: IO[str]) -> None:
    """Write a name for the run into its lock file, unless there is one."""
    lock.seek(0)
    if not lock.read():
        lock.write(secrets.token_hex(16))
        lock.flush()


def run_of(path: Path) -> str:
    """The name of the run that saves, or has saved, in a folder."""
    return (path / LOCK).read_text()
