"""A state in a file of a machine's memory: safetensors, of which one tensor is a description, and a digest after them.

From step to step only values change, so a file stays mapped, and all that a step does is to copy the tensors to their
places in it and to hash it. While that goes on, the digest does not hold.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import FileLayout, as_torch, spec_of, storage_dtype

HEAD = "$head"
"""The tensor that is the description, in JSON, filled up with blanks to a multiple of so many bytes: its size stays."""
_HEAD_BYTES = 1024

_DIGEST_BYTES = 16


class Record:
    """A file of a state, and the places of its tensors there, into which those of later states are copied.

    Args:
        memory: of a number of bytes.
        tensors: as many and as large as it is made for, by name.
        is_copy: the only one is a whole record.

    Attributes:
        content: its bytes.
    """

    def __init__(self, memory: Callable[[int], Array], tensors: Mapping[str, Tensor], is_copy: bool) -> None:
        self._kinds, self._has_digest = _kinds(tensors), not is_copy
        if is_copy:
            self.content = memory(sum(tensor.nbytes for tensor in tensors.values()))
            self._places = [torch.from_numpy(self.content)]
            return
        layout = FileLayout.of({name: spec_of(tensor) for name, tensor in tensors.items()})
        self.content = memory(layout.num_bytes + _DIGEST_BYTES)
        self.content[: len(layout.header)] = np.frombuffer(layout.header, np.uint8)
        self._places = []
        for name in tensors:
            spec = layout.tensors[name]
            piece = self.content[layout.start[name] : layout.end(name)].view(storage_dtype(spec.dtype))
            self._places.append(as_torch(piece.reshape(spec.shape), spec.dtype))

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether there is a place for each."""
        return self._kinds == _kinds(tensors)

    def write(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors, and say that it is whole."""
        fill(self._places, [*tensors])
        if self._has_digest:
            digest = xxhash.xxh3_128_digest(self.content[:-_DIGEST_BYTES].data)
            self.content[-_DIGEST_BYTES:] = np.frombuffer(digest, np.uint8)


def _kinds(tensors: Mapping[str, Tensor]) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]


@torch.no_grad()
def fill(places: list[Tensor], tensors: list[Tensor]) -> None:
    """Copy each tensor to its place, from whatever device; simulated ranks end here (``tests/faults``)."""
    torch._foreach_copy_(places, tensors)


def described(head: Mapping[str, object], states: Iterable[str]) -> Tensor:
    """A description, the JSON of ``head`` and of states, whose entries are JSON already."""
    content = f'{json.dumps(head)[:-1]}, "state": {{{", ".join(states)}}}}}'.encode()
    content += b" " * (-len(content) % _HEAD_BYTES)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_record(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The description in a file and its tensors; ``None``: it is not whole."""
    try:
        return parsed(np.fromfile(path, np.uint8))
    except OSError:
        return None


def parsed(content: Array) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """See :func:`read_record`."""
    whole, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(whole.data) != digest.tobytes():
        return None
    from safetensors.torch import load  # not at the import of pyg_dist

    tensors = load(whole.tobytes())
    return json.loads(tensors.pop(HEAD).numpy().tobytes()), tensors


def mapped(path: Path, size: int) -> Array:
    """A file of so many bytes, for which there is room, in memory."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, size)
        if sys.platform == "linux":
            os.posix_fallocate(file, 0, size)  # else a write to it without room for it ends the process
        return np.frombuffer(mmap.mmap(file, size), np.uint8)
    finally:
        os.close(file)
