"""A store's folder while it is written: shards first, the manifest last, so that the old store or the new one opens.

Work in progress is in ``OUT/.partial``: intermediate files, and a JSON file for each step that is complete. A shard is
synced and gets its final name, which ends in its digest, before its step is; nothing that the old manifest names is
ever written to. Replacing the manifest is the commit; what only the old one named is removed after that.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, TypeVar

from pyg_dist.backend.plain_json import typed
from pyg_dist.errors import DataError, OptionError, StoreError
from pyg_dist.partition.solver import shortage
from pyg_dist.store.format import ShardWriter, sync
from pyg_dist.store.manifest import FILE, NO_BLOCKS, Blocks, Manifest, Shard, StoredTensor, to_json
from pyg_dist.store.reader import check_shard, name_digest

T = TypeVar("T")
PARTIAL = ".partial"
_PATTERN = "*-????????????????.safetensors"


class StoreFolder:
    """The folder ``path``, to be filled by one process.

    ``identity`` is a digest of the input and the options: only work with the same one can be resumed. ``resume`` goes
    on with the work of an interrupted writer; ``force`` replaces such work, or a store.
    """

    def __init__(self, path: Path, identity: str, resume: bool = False, force: bool = False) -> None:
        self.path = path
        self.work = path / PARTIAL
        self._check(resume, force)
        self._lock = lock(self.work / "lock")
        known = self.known("identity", str) if resume else None
        if known is None:
            clear(self.work)
            self.note("identity", identity)
        elif known != identity:
            raise StoreError(
                f"Expected the interrupted work in {path} to be of this input and these options (it is of others): "
                f"--force starts anew"
            )

    def _check(self, resume: bool, force: bool) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"Expected a folder in {self.path} (got a file): choose another name")
        if not self.path.exists() or force:
            names = {p.name for p in self.path.iterdir()} if self.path.exists() else set()
            foreign = names - {FILE, FILE + ".new", PARTIAL} - {p.name for p in self.path.glob(_PATTERN)}
            if foreign:
                raise StoreError(
                    f"Expected nothing but a store in {self.path} (got {sorted(foreign)[0]!r}): choose another folder"
                )
            return
        if self.work.exists():
            if not resume:
                lock(self.work / "lock").close()  # raises where another writer is at work
                raise StoreError(f"Expected no interrupted work in {self.path}: --resume goes on, --force starts anew")
        elif (self.path / FILE).exists():
            raise StoreError(f"Expected no store in {self.path} (there is one): --force replaces it")
        elif any(self.path.iterdir()):
            raise StoreError(f"Expected an empty folder in {self.path} (it has files): choose another one")

    def __enter__(self) -> StoreFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()
        is_wrong = isinstance(error, (DataError, OptionError)) and not isinstance(error, StoreError)
        if is_wrong and self.known("parts", str) is None:  # the input or the options have to change
            shutil.rmtree(self.work)
            if not any(self.path.iterdir()):
                self.path.rmdir()

    def known(self, step: str, kind: type[T]) -> T | None:
        """The content that :meth:`note` has stored for a finished step; ``None``: there is none of this type."""
        try:
            return typed(kind, json.loads((self.work / f"{step}.json").read_text()))
        except (OSError, ValueError):
            return None

    def note(self, step: str, content: object) -> None:
        """Note that a step is finished; its files are on the disk."""
        replace_text(self.work / f"{step}.json", to_json(content))

    def finished(self, *keys: str) -> dict[str, Shard]:
        """The shards that an interrupted writer has finished: their files are there, and their digests hold."""
        found = {}
        for key in keys:
            if (shard := self.known(f"shard {key}", Shard)) is not None:
                with suppress(StoreError):
                    check_shard(self.path, shard)
                    found[key] = shard
        return found

    def finish(self, key: str, writer: ShardWriter, blocks: Blocks = NO_BLOCKS) -> Shard:
        """Give a written file its name, and note it."""
        shard = finish_shard(self.path, key, writer, blocks)
        self.note(f"shard {key}", shard)
        return shard

    def finish_all(self, writers: Mapping[str, ShardWriter]) -> dict[str, Shard]:
        """:meth:`finish` of several files, by key."""
        return {key: self.finish(key, writer) for key, writer in writers.items()}

    def commit(self, manifest: Manifest) -> None:
        """Make the store the one that ``manifest`` describes, and remove the files that it does not name."""
        replace_text(self.path / FILE, manifest.to_json())
        named = {shard.file for shard in manifest.shards.values()}
        for path in self.path.glob(_PATTERN):
            if path.name not in named:
                path.unlink()
        self._lock.close()
        shutil.rmtree(self.work)


def clear(folder: Path, *kept: str) -> None:
    """Empty a folder, but for its lock and the names that are ``kept``."""
    for path in folder.iterdir():
        if path.name in kept:
            continue
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def lock(file: Path, seconds: float = 0.0) -> IO[str]:
    """Lock a file, whose folder is made if need be, until the returned stream is closed; wait for ``seconds`` at most.

    On file systems without locks this holds nobody off.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream, end = file.open("a+"), time.monotonic() + seconds
    except OSError as error:
        raise StoreError(
            f"Expected {file.parent} to be a folder that can be written (got: {error.strerror}): choose another one"
        ) from error
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return stream
        except BlockingIOError as error:
            if time.monotonic() >= end:
                stream.close()
                raise StoreError(
                    f"Expected no other writer in {file.parent} (another process holds {file.name}): wait for it, or "
                    f"take another folder"
                ) from error
            time.sleep(0.1)
        except OSError:  # a file system without locks
            return stream


def finish_shard(path: Path, key: str, writer: ShardWriter, blocks: Blocks = NO_BLOCKS) -> Shard:
    """Give a written file its name in the folder ``path``: the key, then its digest."""
    digests, layout = writer.close(), writer.layout
    name = f"{key}-{name_digest(layout.header, digests)}.safetensors"
    os.replace(writer.path, path / name)
    sync(path)
    tensors = {name: StoredTensor(spec.dtype, spec.shape, digests[name]) for name, spec in layout.tensors.items()}
    return Shard(name, layout.num_bytes, tensors, blocks)


def replace_text(file: Path, text: str) -> None:
    """Replace the content of a file at once: a crash leaves the old content or the new one."""
    new = file.with_name(file.name + ".new")
    with new.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(new, file)
    sync(file.parent)


@contextmanager
def explained_disk_errors(path: Path, remedy: str = "free space and go on with --resume") -> Iterator[None]:
    """Context in which the system's errors about a full disk become one line with a remedy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise StoreError(f"Expected room to write in {path} (got: {error.strerror}): {remedy}") from error


def require_space(path: Path, num_bytes: int) -> None:
    """Refuse to begin where ``num_bytes`` will not fit on the disk."""
    place = next(folder for folder in (path, *path.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < num_bytes:
        needed, there = shortage(num_bytes, free)
        raise StoreError(
            f"Expected {needed} free in {place} for the store and the work on it (got {there}): free space, or choose "
            f"another folder"
        )
