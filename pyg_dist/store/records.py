"""Records on disk: scattered to buckets as they come, and read back in the order of a key, in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from pyg_dist.backend import ops
from pyg_dist.partition.inputs import Array

Key = Callable[[Array], Array]
"""The key of each record, int64."""

_FAN_OUT = 64
"""Buckets that an oversized one is split into: a second level of them serves 4096 times the memory."""
_KEYS_BY_RECORD = 2
"""Records are sorted by counting if there are at most so many keys for each: a count takes 8 bytes."""


class Buckets:
    """Files of records, one for each bucket; a bucket's records keep their order.

    ``counts`` are records by bucket, int64.
    """

    def __init__(self, folder: Path, num_buckets: int, dtype: np.dtype[np.generic]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.dtype = folder, dtype
        self.counts = np.zeros(num_buckets, np.int64)
        for path in folder.iterdir():
            path.unlink()

    def path(self, bucket: int) -> Path:
        """The file of a bucket; there is none of an empty one."""
        return self.folder / f"{bucket:05d}"

    def add(self, bucket: Array, records: Array) -> None:
        """Append each record to its bucket."""
        order = stable_order(bucket, len(self.counts))
        counts = np.bincount(bucket, minlength=len(self.counts))
        sorted_records = records.take(order)  # which copies a record at once; an index copies each field
        ends = np.cumsum(counts)
        for number in counts.nonzero()[0].tolist():
            with self.path(number).open("ab") as file:
                file.write(sorted_records[ends[number] - counts[number] : ends[number]].data)
        self.counts += counts

    def remove(self, bucket: int) -> None:
        """Delete a bucket's file."""
        self.path(bucket).unlink(missing_ok=True)


def read_records(path: Path, dtype: np.dtype[np.generic], chunk: int) -> Iterator[Array]:
    """The records of a file, ``chunk`` at a time; there are none where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as file:
        while (records := np.fromfile(file, dtype, chunk)).size:
            yield records


def sorted_records(
    path: Path, dtype: np.dtype[np.generic], key: Key, low: int, high: int, limit: int
) -> Iterator[Array]:
    """The records of a file by key, in arrays of at most ``limit``; those of one key keep their order.

    A longer file is split by ranges of the key, again and again. The file is deleted; keys are in ``[low, high)``.
    """
    count = path.stat().st_size // dtype.itemsize if path.exists() else 0
    if count <= limit:
        records = np.fromfile(path, dtype) if count else np.empty(0, dtype)
        path.unlink(missing_ok=True)
        if count:
            yield records.take(stable_order(key(records) - low, high - low))
        return
    if high - low == 1:  # all have one key
        yield from read_records(path, dtype, limit)
        path.unlink()
        return
    num_buckets = min(_FAN_OUT, high - low)
    width = -(-(high - low) // num_buckets)
    buckets = Buckets(path.with_name(path.name + ".split"), num_buckets, dtype)
    for records in read_records(path, dtype, max(limit // 2, 1)):
        buckets.add((key(records) - low) // width, records)
    path.unlink()
    for number in range(num_buckets):
        first = low + number * width
        if first < high:
            yield from sorted_records(buckets.path(number), dtype, key, first, min(first + width, high), limit)
    buckets.folder.rmdir()


def stable_order(key: Array, bound: int) -> Array:
    """The stable order of keys in ``[0, bound)``: int64 ``[n]``.

    By counting; where counts would take too much memory, by digits of 16 bits, the lowest first, which NumPy sorts in
    linear time. That takes three times as long for 6 million records, as each further digit is gathered first.
    """
    if 1 << 16 < bound <= _KEYS_BY_RECORD * len(key):
        counted = torch.from_numpy(key)
        found = ops.csr_from_edges(counted, counted, None, bound, bound)[2]
        return np.arange(len(key)) if found is None else found.numpy().astype(np.int64, copy=False)
    order = np.argsort(key.astype(np.uint16), kind="stable")  # of the lowest 16 bits
    for shift in range(16, (bound - 1).bit_length(), 16):
        digit = (key >> shift).astype(np.uint16)
        order = order[np.argsort(digit[order], kind="stable")]
    return order


def records_limit(dtype: np.dtype[np.generic], memory: int) -> int:
    """How many records can be sorted in ``memory`` bytes, with a sorted copy, their keys and two orders."""
    return max(1024, memory // (2 * dtype.itemsize + 48))
