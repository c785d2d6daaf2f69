"""One safetensors file: its header, the place of each tensor, and writing it in pieces, with digests.

A file is eight bytes with the header's length, a JSON header, and the tensors' bytes without gaps
(https://huggingface.co/docs/safetensors). safetensors' own writer wants whole tensors; shapes are known here before the
content is, so the header can be written first and the rest streamed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import Array

_DTYPES: dict[str, tuple[torch.dtype, type[np.generic]]] = {  # the second has the bytes, where NumPy lacks the first
    "F64": (torch.float64, np.float64),
    "I64": (torch.int64, np.int64),
    "U64": (torch.uint64, np.uint64),
    "F32": (torch.float32, np.float32),
    "I32": (torch.int32, np.int32),
    "U32": (torch.uint32, np.uint32),
    "F16": (torch.float16, np.float16),
    "BF16": (torch.bfloat16, np.uint16),
    "I16": (torch.int16, np.int16),
    "U16": (torch.uint16, np.uint16),
    "I8": (torch.int8, np.int8),
    "U8": (torch.uint8, np.uint8),
    "BOOL": (torch.bool, np.bool_),
}
_ALIGNMENT = 8


@cache
def storage_dtype(dtype: str) -> np.dtype[np.generic]:
    """The NumPy type with the bytes of a safetensors type."""
    if dtype not in _DTYPES:
        raise DataError(f"Expected one of the types {', '.join(_DTYPES)} (got {dtype!r}): convert the tensor")
    return np.dtype(_DTYPES[dtype][1])


@cache
def dtype_name(dtype: np.dtype[np.generic] | torch.dtype) -> str:
    """The safetensors name of a NumPy or torch dtype."""
    for name, (of_torch, of_numpy) in _DTYPES.items():
        if dtype == of_torch if isinstance(dtype, torch.dtype) else dtype == np.dtype(of_numpy) and name != "BF16":
            return name
    raise DataError(f"Expected one of the types {', '.join(_DTYPES)} (got {dtype}): convert the tensor")


def torch_dtype(dtype: str) -> torch.dtype:
    """The type of torch for one of safetensors."""
    return _DTYPES[dtype][0]


@cache
def is_storable(dtype: torch.dtype) -> bool:
    """Whether safetensors has a type for it."""
    return any(dtype == of_torch for of_torch, _ in _DTYPES.values())


def as_torch(array: Array, dtype: str) -> Tensor:
    """A tensor over the memory of ``array``, in the type that it stands for."""
    tensor = torch.from_numpy(array)
    return tensor if tensor.dtype == torch_dtype(dtype) else tensor.view(torch_dtype(dtype))


def as_storage(tensor: Tensor) -> Array:
    """An array over the memory of a CPU tensor, in its :func:`storage_dtype`."""
    stored = storage_dtype(dtype_name(tensor.dtype))
    tensor = tensor.detach()
    array: Array = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array.view(stored)


@dataclass(frozen=True)
class TensorSpec:
    """Type and shape of one tensor."""

    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]  # rows first

    @property
    def num_rows(self) -> int:
        """The first dimension; one of a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return storage_dtype(self.dtype).itemsize * math.prod(self.shape[1:])

    @property
    def num_bytes(self) -> int:
        """Bytes of all of it."""
        return storage_dtype(self.dtype).itemsize * math.prod(self.shape)


def spec_of(tensor: Tensor) -> TensorSpec:
    """Type and shape of a tensor, on any device."""
    return TensorSpec(dtype_name(tensor.dtype), tuple(tensor.shape))


def of_rows(dtype: str, num_rows: int, row_shape: tuple[int, ...] = ()) -> TensorSpec:
    """The spec of ``num_rows`` rows."""
    return TensorSpec(dtype, (num_rows, *row_shape))


def slices(num_rows: int, row_bytes: int, num_bytes: int, first: int = 0) -> Iterator[slice]:
    """Consecutive rows from ``first`` on, one after another, about ``num_bytes`` at a time."""
    step = max(1, num_bytes // max(row_bytes, 1))
    return (slice(low, min(low + step, num_rows)) for low in range(first, num_rows, step))


@dataclass(frozen=True)
class FileLayout:
    """The place of each tensor in a file."""

    tensors: dict[str, TensorSpec]  # by name
    start: dict[str, int]  # the first byte of each, from the beginning of the file
    header: bytes  # the bytes before the first tensor

    @staticmethod
    def of(tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> FileLayout:
        """The layout of a new file: wide types first, so that each tensor is aligned to its own without a gap."""
        order = sorted(tensors, key=lambda name: (-storage_dtype(tensors[name].dtype).itemsize, name))
        entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset, offsets = 0, {}
        for name in order:
            spec, offsets[name] = tensors[name], offset
            offset += spec.num_bytes
            entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offsets[name], offset]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        return FileLayout(
            {name: tensors[name] for name in order}, {name: len(header) + offsets[name] for name in order}, header
        )

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return len(self.header) + sum(spec.num_bytes for spec in self.tensors.values())

    def end(self, name: str) -> int:
        """The first byte after a tensor."""
        return self.start[name] + self.tensors[name].num_bytes


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

    def append(self, pieces: Mapping[str, Array]) -> None:
        """Write the next rows of some tensors; a scalar is one row."""
        pieces = {name: np.atleast_1d(rows) for name, rows in pieces.items()}
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
