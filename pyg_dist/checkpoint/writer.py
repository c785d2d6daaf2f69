"""Writing checkpoints: each rank its shard, by a thread; rank 0 the manifest, once all shards are on the disk."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session import generators
from pyg_dist.backend.session.agreement import LONGEST_WAIT, one_line, raise_together
from pyg_dist.backend.session.state import current
from pyg_dist.checkpoint.manifest import STATE, Manifest, folder_of, numbers, remove
from pyg_dist.checkpoint.snapshot import Snapshot, take
from pyg_dist.errors import StoreError
from pyg_dist.store.folder import explained_disk_errors, finished, replace_text
from pyg_dist.store.format import ShardWriter, as_storage, spec_of, sync
from pyg_dist.store.manifest import FILE, Shard

logger = logging.getLogger("pyg_dist")


class _Saves:
    """Numbers a run's saves."""

    def __init__(self) -> None:
        self.count = itertools.count()


class Writer:
    """Writes the checkpoints of one folder, one after another, while training goes on.

    Args:
        path: the folder.
        keep: how many of the newest stay.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep
        self._future: Future[None] | None = None
        session = current()
        # A connection of its own: a waiting one is locked until its key is set.
        self._store: dist.Store | None = None if session.store is None else session.store.clone()  # type: ignore[attr-defined]  # not in the stub
        self._rank, self._world_size = session.rank, session.world_size
        session.close_at_end(self)

    def begin(self, things: Mapping[str, Any]) -> None:
        """Copy the state of ``things`` and begin to write it; what was being written is waited for (collective)."""
        self.wait()
        snapshot = take(things)
        number, error = 0, None
        if self._rank == 0:
            try:
                with explained_disk_errors(self.path, "free space"):
                    self.path.mkdir(parents=True, exist_ok=True)
                    number = max(numbers(self.path), default=0) + 1
                    shutil.rmtree(folder_of(self.path, number), ignore_errors=True)  # an interrupted run's
                    folder_of(self.path, number).mkdir()
            except (OSError, StoreError) as caught:
                error = caught
        raise_together(error)
        number = world_group().gather_counts(number)[0]
        folder = folder_of(self.path, number)
        if snapshot.pieces and not folder.is_dir():
            error = StoreError(f"Expected all ranks to see {folder}, which rank 0 has made: take a shared folder")
        raise_together(error)
        thread = ThreadPoolExecutor(1, "pyg_dist checkpoint")
        self._future = thread.submit(self._write, snapshot, folder, next(current().of(_Saves).count))
        thread.shutdown(wait=False)

    def wait(self) -> None:
        """Wait until what was begun is on the disk (collective).

        Raises:
            StoreError: A rank could not write its part. The checkpoint before it is still complete.
        """
        future, self._future = self._future, None
        error = None if future is None else future.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        raise_together(error)

    def close(self) -> None:
        """Finish what was begun. Not collective."""
        error = None if self._future is None else self._future.exception()
        if error is not None:
            logger.error("rank %d could not save a checkpoint: %s", self._rank, one_line(error))

    def _write(self, snapshot: Snapshot, folder: Path, serial: int) -> None:
        shards: dict[str, Shard] = {}
        try:
            with explained_disk_errors(folder, "free space; the checkpoint before it is complete"):
                if self._rank == 0:
                    shards[STATE] = _write_shard(folder, STATE, snapshot.tensors)
                if snapshot.pieces:
                    key = f"rows-{self._rank:05d}"
                    shards[key] = _write_shard(folder, key, snapshot.pieces)
        except BaseException:
            self._gather(serial, None)
            if self._rank == 0:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        gathered = self._gather(serial, shards)
        if self._rank:
            return
        if gathered is None:  # another rank has failed, and says why
            shutil.rmtree(folder, ignore_errors=True)
            return
        texts = generators.to_texts(snapshot.generators)
        manifest = Manifest(self._world_size, snapshot.state, texts, snapshot.rows, gathered)
        with explained_disk_errors(folder, "free space; the checkpoint before it is complete"):
            replace_text(folder / FILE, manifest.to_json())
            sync(self.path)
            remove(self.path, self.keep)

    def _gather(self, serial: int, shards: dict[str, Shard] | None) -> dict[str, Shard] | None:
        """All ranks' shards, on rank 0; ``None`` if one has failed. For the thread, beside the calls of training."""
        if self._store is None:
            return shards
        if self._rank:
            content = None if shards is None else {key: shard.to_dict() for key, shard in shards.items()}
            self._store.set(f"checkpoint/{serial}/{self._rank}", json.dumps(content))
            return None
        found: dict[str, Shard] | None = shards
        for rank in range(1, self._world_size):
            key = f"checkpoint/{serial}/{rank}"
            self._store.wait([key], LONGEST_WAIT)
            content = json.loads(self._store.get(key))
            self._store.delete_key(key)
            if content is None or found is None:
                found = None
            else:
                found |= {key: Shard.from_dict(entry) for key, entry in content.items()}
        return found


def _write_shard(folder: Path, key: str, tensors: Mapping[str, Tensor]) -> Shard:
    writer = ShardWriter(folder / f"{key}.partial", {name: spec_of(tensor) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        writer.write_whole(name, as_storage(tensor))
    return finished(folder, key, writer)
