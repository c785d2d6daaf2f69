"""A state in a file of a machine's memory: safetensors, one tensor of which is a description, and then a digest.

From step to step only values change, so a file stays mapped, and a step only copies the tensors into it and hashes it.
Meanwhile the digest does not match, so a record that was interrupted is recognised.
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
"""The name of the description, in JSON."""
_HEAD_BYTES = 1024
"""It is filled up with blanks to a multiple of this, so that its size rarely changes."""

_DIGEST_BYTES = 16


class Record:
    """The bytes of a state, ``content``, with places for tensors, into which those of later states are copied.

    ``memory`` gives a number of bytes. ``tensors`` have the names, dtypes and shapes that it is made for; with
    ``is_copy`` the only one is a whole record.
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
        """Whether there is a place for each, by name, dtype and shape."""
        return self._kinds == _kinds(tensors)

    def write(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors, then update the digest."""
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
    """The description as a tensor: the JSON of ``head`` and of ``states``, which are JSON already."""
    content = f'{json.dumps(head)[:-1]}, "state": {{{", ".join(states)}}}}}'.encode()
    content += b" " * (-len(content) % _HEAD_BYTES)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_record(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The description in a file, and its tensors; ``None``: there is no whole record."""
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
    """A file of ``size`` bytes, mapped; raises OSError where there is no room for it."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(file, size)
        if sys.platform == "linux":
            os.posix_fallocate(file, 0, size)  # else a write to it without room for it ends the process
        return np.frombuffer(mmap.mmap(file, size), np.uint8)
    finally:
        os.close(file)
