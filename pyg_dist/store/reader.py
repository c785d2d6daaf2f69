"""Slices of tensors in a safetensors file, mapped without a copy."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import xxhash
from torch import Tensor

from pyg_dist.errors import StoreError, refusing
from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import FileLayout, TensorSpec, as_torch, slices, storage_dtype
from pyg_dist.store.manifest import Shard

_PIECE_BYTES = 1 << 20
"""Read at a time where a tensor is read in pieces, whose pages are released one by one."""


class TensorFile:
    """A safetensors file, mapped read-only. Its header has to be that of the known layout.

    Attributes:
        path: the file.
        tensors: type and shape by name.
    """

    def __init__(self, path: Path, layout: FileLayout) -> None:
        self.path, self.tensors, self._start = path, layout.tensors, layout.start
        remedy = "restore it, or write it again"
        with (
            refusing(StoreError, f"a safetensors file in {path}", remedy, OSError, ValueError),
            path.open("rb") as file,
        ):
            header, size = file.read(len(layout.header)), path.stat().st_size
            if header != layout.header:
                raise ValueError("other tensors than the manifest says")
            if size != layout.num_bytes:
                cut = next((name for name in layout.tensors if layout.end(name) > size), "")
                missing = f", without the end of {cut!r}" if cut else ""
                raise ValueError(f"{size} bytes for {layout.num_bytes}{missing}")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def rows(self, name: str, low: int = 0, high: int | None = None) -> Array:
        """Rows ``low`` to ``high`` of a tensor (a scalar has one), a view of the file in :func:`storage_dtype`."""
        spec = self.spec(name)
        high = spec.num_rows if high is None else high
        count, first = (high - low) * spec.row_bytes, self._start[name] + low * spec.row_bytes
        flat = np.frombuffer(self._map, np.uint8, count, first) if count else np.empty(0, np.uint8)
        return flat.view(storage_dtype(spec.dtype)).reshape(high - low, *spec.shape[1:])

    def pieces(self, name: str, low: int = 0, high: int | None = None) -> Iterator[Array]:
        """The same rows in pieces; the pages of one are released when the next is read."""
        spec = self.spec(name)
        high = spec.num_rows if high is None else high
        for piece in slices(high, spec.row_bytes, _PIECE_BYTES, low):
            yield self.rows(name, piece.start, piece.stop)
            self.release()

    def spec(self, name: str) -> TensorSpec:
        """Type and shape of a tensor."""
        if name not in self.tensors:
            raise StoreError(
                f"Expected a tensor '{name}' in {self.path} (got {', '.join(self.tensors) or 'none'}): write it again"
            )
        return self.tensors[name]

    def release(self) -> None:
        """Drop all pages of the file, which are read again when used: the system also maps pages around those read."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def digest(self, name: str, take: Callable[[int, Array], None] | None = None) -> str:
        """The XXH3-128 digest of a tensor's bytes; ``take`` is given each piece, and the number of its first row."""
        hasher, low = xxhash.xxh3_128(), 0
        for piece in self.pieces(name):
            hasher.update(piece.reshape(-1).view(np.uint8).data)
            if take is not None:
                take(low, piece)
            low += len(piece)
        return str(hasher.hexdigest())


def name_digest(header: bytes, digests: Mapping[str, str]) -> str:
    """The digest of a file's header and tensors, in which its name ends."""
    hasher = xxhash.xxh3_64(header)
    for name in sorted(digests):
        hasher.update(digests[name].encode())
    return str(hasher.hexdigest())


def open_shard(path: Path, shard: Shard) -> TensorFile:
    """Map a shard whose header is that of the manifest."""
    return TensorFile(path / shard.file, FileLayout.of(shard.tensors))


def check_shard(path: Path, shard: Shard) -> None:
    """Check all tensors of a shard by their digests."""
    file = open_shard(path, shard)
    for name, stored in shard.tensors.items():
        require_digest(file.path, name, file.digest(name), stored.digest)


def require_digest(path: Path, what: str, found: str, expected: str) -> None:
    """Raise the error of damaged content unless the digests are equal."""
    if found != expected:
        raise StoreError(
            f"Expected '{what}' in {path} with digest {expected} (got {found}): it is damaged, restore it or write "
            f"it again"
        )


class ShardReader:
    """The files of a store or a checkpoint, mapped when they are first needed."""

    def __init__(self, path: Path, shards: Mapping[str, Shard]) -> None:
        self.path, self.shards = path, shards
        self._files: dict[str, TensorFile] = {}
        self._checked: set[tuple[str, str]] = set()

    def file(self, key: str) -> TensorFile:
        """A shard by its key."""
        if key not in self._files:
            self._files[key] = open_shard(self.path, self.shards[key])
        return self._files[key]

    def close(self) -> None:
        """Drop all pages, and the mapped files."""
        for file in self._files.values():
            file.release()
        self._files.clear()

    def check(self, key: str, name: str) -> None:
        """Check a tensor by its digest, once."""
        if (key, name) not in self._checked:
            self.take(key, name, None)
            self._checked.add((key, name))

    def take(self, key: str, name: str, take: Callable[[int, Array], None] | None) -> None:
        """Read a tensor in pieces, see :meth:`TensorFile.digest`; raise at the end if it is damaged."""
        file = self.file(key)
        require_digest(file.path, name, file.digest(name, take), self.shards[key].tensors[name].digest)

    def tensor(self, key: str, name: str) -> Tensor:
        """A whole tensor of a shard, copied and checked in one pass."""
        spec = self.file(key).spec(name)
        out = np.empty((spec.num_rows, *spec.shape[1:]), storage_dtype(spec.dtype))

        def put(low: int, piece: Array) -> None:
            out[low : low + len(piece)] = piece

        self.take(key, name, put)
        return as_torch(out.reshape(spec.shape), spec.dtype)
