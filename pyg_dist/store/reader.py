"""Slices of tensors in a safetensors file, mapped without a copy."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from pyg_dist.errors import StoreError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import MAX_HEADER_BYTES, TensorSpec, as_torch, parse_header, storage_dtype
from pyg_dist.store.manifest import Manifest, Shard

PIECE_BYTES = 1 << 20
"""What is read at a time where a tensor is walked through: pages that were read are let go before the next ones."""


class TensorFile:
    """A safetensors file, mapped read-only.

    Attributes:
        path: the file.
        tensors: type and shape by name.
        metadata: of the header.
        header: the bytes before the first tensor.

    Raises:
        StoreError: It is missing, or no safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = path.stat().st_size
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                    raise ValueError(f"{size} bytes are no safetensors file")
                text = file.read(length)
                self.header = length.to_bytes(8, "little") + text
                self.tensors, self._start, self.metadata = parse_header(text, size)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError as error:
            raise StoreError(
                f"Expected the file {path} (it is missing): restore it, or write the store again"
            ) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(
                f"Expected a safetensors file in {path} (got {type(error).__name__}: {error}): restore it, or write "
                f"the store again"
            ) from error

    def rows(self, name: str, low: int = 0, high: int | None = None) -> Array:
        """Rows ``low`` to ``high`` of a tensor: a read-only view of the file, in :func:`storage_dtype`."""
        spec = self.spec(name)
        high = spec.num_rows if high is None else high
        if not 0 <= low <= high <= spec.num_rows:
            raise StoreError(
                f"Expected rows of '{name}' within {spec.num_rows} in {self.path} (got {low} to {high}): write the "
                f"store again"
            )
        dtype, count = storage_dtype(spec.dtype), (high - low) * spec.row_bytes
        if count == 0:
            return np.empty((high - low, *spec.shape[1:]), dtype)
        first = self._start[name] + low * spec.row_bytes
        flat = np.frombuffer(self._map, np.uint8, count, first)
        if first % dtype.itemsize:  # of a foreign writer
            flat = flat.copy()
        return flat.view(dtype).reshape(high - low, *spec.shape[1:])

    def whole(self, name: str) -> Array:
        """All of a tensor of any shape, a scalar too: a read-only view of the file."""
        spec = self.spec(name)
        dtype, first = storage_dtype(spec.dtype), self._start[name]
        if spec.num_bytes == 0:
            return np.empty(spec.shape, dtype)
        flat = np.frombuffer(self._map, np.uint8, spec.num_bytes, first)
        return (flat.copy() if first % dtype.itemsize else flat).view(dtype).reshape(spec.shape)

    def pieces(self, name: str, low: int = 0, high: int | None = None, num_bytes: int = PIECE_BYTES) -> Iterator[Array]:
        """The same rows in pieces; the pages of one are released when the next is read."""
        spec = self.spec(name)
        high = spec.num_rows if high is None else high
        step = max(1, num_bytes // max(spec.row_bytes, 1))
        for begin in range(low, high, step):
            end = min(begin + step, high)
            yield self.rows(name, begin, end)
            self.release()

    def tensor(self, name: str, low: int = 0, high: int | None = None) -> Tensor:
        """The same rows as a tensor of their own, which can be written to."""
        spec = self.spec(name)
        high = spec.num_rows if high is None else high
        out = np.empty((max(high - low, 0), *spec.shape[1:]), storage_dtype(spec.dtype))
        done = 0
        for piece in self.pieces(name, low, high):
            out[done : done + len(piece)] = piece
            done += len(piece)
        return as_torch(out, spec.dtype)

    def spec(self, name: str) -> TensorSpec:
        """Type and shape of a tensor.

        Raises:
            StoreError: There is none of this name.
        """
        if name not in self.tensors:
            raise StoreError(
                f"Expected a tensor '{name}' in {self.path} (got {', '.join(self.tensors) or 'none'}): write the "
                f"store again"
            )
        return self.tensors[name]

    def release(self) -> None:
        """Let go of all pages; they are read again when they are used.

        Of the whole file: the system maps pages around those that are read, on either side.
        """
        self._map.madvise(mmap.MADV_DONTNEED)

    def digest(self, name: str) -> str:
        """The XXH3-128 digest of a tensor's bytes."""
        hasher = xxhash.xxh3_128()
        if not self.spec(name).shape:
            return str(xxhash.xxh3_128_hexdigest(self.whole(name).reshape(-1).view(np.uint8).data))
        for piece in self.pieces(name):
            hasher.update(piece.reshape(-1).view(np.uint8).data)
        return str(hasher.hexdigest())


def name_digest(header: bytes, digests: Mapping[str, str]) -> str:
    """What the name of a file ends in: the digest of its header and its tensors."""
    hasher = xxhash.xxh3_64(header)
    for name in sorted(digests):
        hasher.update(digests[name].encode())
    return str(hasher.hexdigest())


def open_shard(path: Path, shard: Shard) -> TensorFile:
    """Map a shard whose header is that of the manifest.

    Raises:
        StoreError: It is missing, cut, or another file.
    """
    file = TensorFile(path / shard.file)
    is_named_so = shard.file.endswith(f"-{name_digest(file.header, shard.digests)}.safetensors")
    if file.tensors != shard.tensors or not is_named_so:
        raise StoreError(
            f"Expected the tensors of the manifest in {file.path} (got others): restore it, or write the store again"
        )
    return file


def check_shard(path: Path, shard: Shard) -> None:
    """Check a whole shard by its digests.

    Raises:
        StoreError: It is missing or damaged.
    """
    file = open_shard(path, shard)
    for name, expected in shard.digests.items():
        require_digest(file.path, name, file.digest(name), expected)


def require_digest(path: Path, what: str, found: str, expected: str) -> None:
    """Raise the error of damaged content unless the digests are equal."""
    if found != expected:
        raise StoreError(
            f"Expected '{what}' in {path} with digest {expected} (got {found}): it is damaged, restore it or write the "
            f"store again"
        )


class Column:
    """Integers in a shard, which stay there: values that are looked up are read from the file and copied.

    Pages that were read are the file's: the system may take them back, and the processes of a machine share them.

    Args:
        file: the shard.
        name: of the tensor ``[n]``, which was checked.
    """

    def __init__(self, file: TensorFile, name: str) -> None:
        self._rows = file.rows(name)

    def __len__(self) -> int:
        return len(self._rows)

    def range(self, low: int, high: int) -> Tensor:
        """Entries ``low`` to ``high``, int64."""
        return torch.from_numpy(self._rows[low:high].astype(np.int64))

    def take(self, place: Tensor) -> Tensor:
        """The entry at each place, int64 like ``place``."""
        return torch.from_numpy(self._rows.take(place.numpy()).astype(np.int64, copy=False))


class ShardReader:
    """The files of a store, mapped when they are first needed.

    Args:
        path: the folder.
        manifest: its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._files: dict[str, TensorFile] = {}
        self._checked: set[tuple[str, str]] = set()

    def file(self, key: str) -> TensorFile:
        """A shard by its key."""
        if key not in self._files:
            self._files[key] = open_shard(self.path, self.manifest.shards[key])
        return self._files[key]

    def close(self) -> None:
        """Let go of all pages."""
        for file in self._files.values():
            file.release()
        self._files.clear()

    def check(self, key: str, name: str) -> None:
        """Check a tensor by its digest, once.

        Raises:
            StoreError: It is damaged.
        """
        if (key, name) not in self._checked:
            file = self.file(key)
            require_digest(file.path, name, file.digest(name), self.manifest.shards[key].digests[name])
            self._checked.add((key, name))

    def column(self, key: str, name: str) -> Column:
        """Integers of a shard, checked, where they lie. They outlive :meth:`close`.

        Raises:
            StoreError: They are damaged.
        """
        self.check(key, name)
        return Column(self.file(key), name)

    def tensor(self, key: str, name: str) -> Tensor:
        """A whole tensor of a shard, copied and checked in one pass."""
        file, shard = self.file(key), self.manifest.shards[key]
        spec, hasher, low = file.spec(name), xxhash.xxh3_128(), 0
        if not spec.shape:
            self.check(key, name)
            return as_torch(file.whole(name).copy(), spec.dtype)
        out = np.empty(spec.shape, storage_dtype(spec.dtype))
        for piece in file.pieces(name):
            hasher.update(piece.reshape(-1).view(np.uint8).data)
            out[low : low + len(piece)] = piece
            low += len(piece)
        require_digest(file.path, name, str(hasher.hexdigest()), shard.digests[name])
        return as_torch(out, spec.dtype)
