"""Streaming tensors into a safetensors file, in pieces, with digests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import FileLayout, TensorSpec, storage_dtype


class ShardWriter:
    """A safetensors file whose shapes are known and whose rows arrive in pieces, each tensor's in order.

    The file is opened for each piece, so that any number of shards can grow side by side.

    Attributes:
        layout: the place of each tensor in the file.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.path = path
        self.layout = FileLayout.of(tensors, metadata)
        self._written = dict.fromkeys(tensors, 0)
        self._hashers = {name: xxhash.xxh3_128() for name in tensors}
        with path.open("wb") as file:
            file.write(self.layout.header)
            file.truncate(self.layout.num_bytes)

    def append(self, **pieces: Array) -> None:
        """Write the next rows of some tensors."""
        for name, rows in pieces.items():
            spec, done = self.layout.tensors[name], self._written[name]
            if rows.dtype != storage_dtype(spec.dtype) or rows.shape[1:] != spec.shape[1:]:
                raise DataError(
                    f"Expected rows of {spec.dtype} {list(spec.shape[1:])} for '{name}' (got {rows.dtype} "
                    f"{list(rows.shape[1:])}): every chunk has the type and width of the first"
                )
            if done + len(rows) > spec.num_rows:
                raise DataError(
                    f"Expected {spec.num_rows} rows of '{name}' (got {done + len(rows)}): the input has changed"
                )
        self._write(pieces)

    def write_whole(self, name: str, content: Array) -> None:
        """Write all of a tensor of any shape, a scalar too."""
        spec = self.layout.tensors[name]
        if content.dtype != storage_dtype(spec.dtype) or content.shape != spec.shape:
            raise DataError(
                f"Expected {spec.dtype} {list(spec.shape)} as '{name}' (got {content.dtype} {list(content.shape)}): "
                f"cast or reshape it"
            )
        self._write({name: content.reshape(spec.num_rows, *spec.shape[1:])})

    def _write(self, pieces: Mapping[str, Array]) -> None:
        descriptor = os.open(self.path, os.O_WRONLY)
        try:
            for name, rows in pieces.items():
                content = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
                self._hashers[name].update(content)
                first = self.layout.start[name] + self._written[name] * self.layout.tensors[name].row_bytes
                while content.nbytes:  # one call may write less
                    done = os.pwrite(descriptor, content, first)
                    content, first = content[done:], first + done
                self._written[name] += len(rows)
        finally:
            os.close(descriptor)

    def close(self) -> dict[str, str]:
        """Sync the file to disk; returns the digest of each tensor."""
        for name, spec in self.layout.tensors.items():
            if self._written[name] != spec.num_rows:
                raise DataError(
                    f"Expected {spec.num_rows} rows of '{name}' (got {self._written[name]}): the input has changed"
                )
        sync(self.path)
        return {name: str(hasher.hexdigest()) for name, hasher in self._hashers.items()}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
