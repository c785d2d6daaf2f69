"""Writing checkpoints: each rank its shard, by a thread; rank 0 the manifest, once all shards are on the disk."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import IO, NamedTuple

from torch import Tensor

from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.plain_json import typed
from pyg_dist.backend.session.agreement import LONGEST_WAIT, one_line, raise_together, raised_on_all_ranks
from pyg_dist.backend.session.rendezvous import own_connection
from pyg_dist.backend.session.state import current
from pyg_dist.checkpoint.manifest import LOCK, Manifest, folder_of, name_run, numbers, remove, rows_of, state_of
from pyg_dist.checkpoint.snapshot import Snapshot, take
from pyg_dist.errors import StoreError
from pyg_dist.store.folder import explained_disk_errors, finish_shard, lock, replace_text
from pyg_dist.store.format import ShardWriter, as_storage, spec_of, sync
from pyg_dist.store.manifest import FILE, Shard, to_json

logger = logging.getLogger("pyg_dist")

_LOCK_SECONDS = 10.0
"""How long to wait for the lock, which processes that a killed rank has left behind may still hold."""
_LONGEST_END = 1800.0
"""Seconds that the end of a run waits for other ranks' parts, as long as torch's collectives."""
_REMEDY = "free space; the checkpoint before it is complete"


class _Saves:
    """Numbers a run's saves."""

    def __init__(self) -> None:
        self.count = itertools.count()


class _Save(NamedTuple):
    """A save that goes on in a thread; ``has_told`` is set once this rank's shards are written and rank 0 is told."""

    serial: int
    thread: ThreadPoolExecutor
    future: Future[None]
    has_told: threading.Event


class Writer:
    """Writes the checkpoints of one folder, one after another, while training goes on.

    ``keep``: how many of the newest stay.
    """

    def __init__(self, path: Path, keep: int) -> None:
        self.path, self.keep = path, keep
        self._lock: IO[str] | None = None
        self._saving: _Save | None = None
        self._number: int | None = None  # of the latest one, while no other run may save
        session = current()
        self._store = None if session.store is None else own_connection(session.store)
        self._rank, self._world_size = session.rank, session.world_size
        session.close_at_end(self)
        self._hold()

    def _hold(self) -> None:
        """Lock the folder against other runs, and find the latest number in it (collective)."""
        number = 0
        with raised_on_all_ranks():
            if self._rank == 0:
                self._lock = lock(self.path / LOCK, _LOCK_SECONDS)
                name_run(self._lock)
                number = max(numbers(self.path, are_complete=False), default=0)
        self._number = world_group().gather_counts(number)[0]

    def begin(self, things: Mapping[str, object]) -> None:
        """Wait for the previous checkpoint, copy the state of ``things`` and begin to write it (collective).

        Raises:
            StoreError: A rank could not write its part of the checkpoint before.
        """
        snapshot = take(things, is_writer=True, failure=self._failure())
        snapshot.keep_share(self._rank, self._world_size)
        snapshot.copy()
        if self._number is None:
            self._hold()
        self._number = number = (self._number or 0) + 1
        folder, serial = folder_of(self.path, number), next(current().of(_Saves).count)
        thread, has_told = ThreadPoolExecutor(1, "pyg_dist checkpoint"), threading.Event()
        future = thread.submit(self._write, snapshot, folder, serial, has_told)
        self._saving = _Save(serial, thread, future, has_told)
        thread.shutdown(wait=False)  # it ends with this save

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk, and let other runs save in the folder (collective).

        Raises:
            StoreError: A rank could not write its part. The checkpoint before it is still complete.
        """
        failure = self._failure()
        self.close()
        raise_together(failure)

    def _failure(self) -> Exception | None:
        """Wait for the checkpoint, and return this rank's error, if there was one (collective).

        Raises:
            ConnectionLostError: A rank was killed, and rank 0 would wait for its shards.
        """
        if self._saving is not None:
            self._saving.has_told.wait()
            try:
                world_group().barrier("checkpoint")
            except BaseException:
                self._give_up(self._saving.serial)
                raise
        return self._own_failure()

    def _own_failure(self, longest: float | None = None) -> Exception | None:
        """As :meth:`_failure`, once all ranks have told rank 0, or after ``longest`` seconds. Not collective."""
        if self._saving is None:
            return None
        saving, self._saving = self._saving, None
        saving.has_told.wait()
        if wait([saving.future], longest).done:
            error = saving.future.exception()
        else:
            self._give_up(saving.serial)
            error = saving.future.exception() or StoreError(
                f"Expected every rank's part within {longest:g} s of the end (got none of some rank, which may be "
                f"dead): the checkpoint before it loads"
            )
        saving.thread.shutdown()
        if error is not None and not isinstance(error, Exception):
            raise error
        return error

    def close(self) -> None:
        """Finish the checkpoint, and let other runs save in the folder. Not collective."""
        error = self._own_failure(_LONGEST_END)
        self._number = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if error is not None:
            logger.error("rank %d could not save a checkpoint: %s", self._rank, one_line(error))

    def _write(self, snapshot: Snapshot, folder: Path, serial: int, has_told: threading.Event) -> None:
        """The work of the thread."""
        written: dict[str, Shard] | None = {}
        try:
            with explained_disk_errors(folder, _REMEDY):
                written = self._write_shards(snapshot, folder)
        except BaseException:
            written = None
            raise
        finally:
            try:
                if self._rank == 0:
                    has_told.set()
                written = self._gather(serial, written)
            finally:
                has_told.set()
            if self._rank == 0 and written is None:  # a rank has failed, and says why
                shutil.rmtree(folder, ignore_errors=True)
        if self._rank == 0 and written is not None:
            for shard in written.values():
                if not (folder / shard.file).exists():
                    raise StoreError(f"Expected one {self.path} for all ranks (got several): take a shared folder")
            manifest = Manifest(
                self._world_size, snapshot.state, snapshot.generators, snapshot.rows, dict(sorted(written.items()))
            )
            with explained_disk_errors(folder, _REMEDY):
                try:
                    replace_text(folder / FILE, manifest.to_json())
                except OSError:  # the next checkpoint will need the room
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                sync(self.path)
                remove(self.path, self.keep)

    def _write_shards(self, snapshot: Snapshot, folder: Path) -> dict[str, Shard]:
        given = {state_of(self._rank): snapshot.tensors, rows_of(self._rank): snapshot.pieces}
        if any(given.values()):
            folder.mkdir(parents=True, exist_ok=True)
        return {key: write_shard(folder, key, tensors) for key, tensors in given.items() if tensors}

    def _gather(self, serial: int, shards: dict[str, Shard] | None) -> dict[str, Shard] | None:
        """All ranks' shards, on rank 0; ``None`` if one has failed. By the store: the thread may not use the groups."""
        if self._store is None:
            return shards
        if self._rank:
            self._store.set(_key(serial, self._rank), to_json(shards))
            return None
        found: dict[str, Shard] | None = shards
        for rank in range(1, self._world_size):
            key = _key(serial, rank)
            self._store.wait([key], LONGEST_WAIT)
            content = json.loads(self._store.get(key))
            self._store.delete_key(key)
            if content is None or found is None:
                found = None
            else:
                found |= typed(dict[str, Shard], content)
        return found

    def _give_up(self, serial: int) -> None:
        """End the waiting of rank 0's thread: ranks that have not told it count as failed."""
        store = current().store  # the thread's is locked while it waits
        if self._rank == 0 and store is not None:
            for rank in range(1, self._world_size):
                store.compare_set(_key(serial, rank), "", to_json(None))


def _key(serial: int, rank: int) -> str:
    return f"checkpoint/{serial}/{rank}"


def write_shard(folder: Path, key: str, tensors: Mapping[str, Tensor]) -> Shard:
    """Write tensors on the CPU into a file of a checkpoint."""
    writer = ShardWriter(folder / f"{key}.partial", {name: spec_of(tensor) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        writer.append({name: as_storage(tensor)})
    return finish_shard(folder, key, writer)
