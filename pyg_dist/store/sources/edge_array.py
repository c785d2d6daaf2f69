"""Edges as a NumPy array in a file, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pyg_dist.errors import DataError
from pyg_dist.store.sources.source import EdgeChunk, Reading, Source, SourceInfo, edge_place


class ArrayEdges(Source):
    """An ``.npy`` file of integers, ``[2, E]`` or ``[E, 2]``; of two edges it is read as ``[2, E]``."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        try:
            with path.open("rb") as file:
                version = np.lib.format.read_magic(file)
                read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, is_fortran, self.dtype = read[version](file)
                self.start = file.tell()
        except FileNotFoundError as error:
            raise DataError(f"Expected a file in {path} (there is none): check the name") from error
        except (ValueError, KeyError, EOFError) as error:
            raise DataError(f"Expected a NumPy array in {path} (got: {error}): write it with numpy.save") from error
        if len(shape) != 2 or 2 not in shape or self.dtype.kind not in "iu":
            raise DataError(
                f"Expected integers [2, E] or [E, 2] in {path} (got {self.dtype} {list(shape)}): one column per edge"
            )
        is_wide = shape[0] == 2
        self.num_edges = shape[1] if is_wide else shape[0]
        self.first_id = reading.first_id or 0
        self.understood = f"an array [{'2, E' if is_wide else 'E, 2'}]; ids from {self.first_id}"
        self.is_interleaved = is_wide == is_fortran
        missing = self.start + 2 * self.num_edges * self.dtype.itemsize - path.stat().st_size
        if missing > 0:
            raise DataError(f"Expected {missing} more bytes in {path} (it breaks off): write it again")

    def info(self) -> SourceInfo:
        """As many edges as the header says."""
        return SourceInfo((self.path,), None, self.num_edges)

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The edges in their order."""
        width = self.dtype.itemsize
        with self.path.open("rb") as file:
            for low in range(0, self.num_edges, size):
                count = min(size, self.num_edges - low)
                if self.is_interleaved:
                    file.seek(self.start + 2 * low * width)
                    source, target = np.fromfile(file, self.dtype, 2 * count).reshape(-1, 2).T
                else:
                    file.seek(self.start + low * width)
                    source = np.fromfile(file, self.dtype, count)
                    file.seek(self.start + (self.num_edges + low) * width)
                    target = np.fromfile(file, self.dtype, count)
                source, target = (end.astype(np.int64) - self.first_id for end in (source, target))
                yield EdgeChunk(source, target, {}, edge_place(self.path, low))
