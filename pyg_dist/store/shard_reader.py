"""Reading the shards of an opened store, each tensor checked by its digest before it is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from pyg_dist.store.folder import open_shard, require_digest
from pyg_dist.store.format import as_torch, storage_dtype
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.reader import TensorFile


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
