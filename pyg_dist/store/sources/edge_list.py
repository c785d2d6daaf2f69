"""Edges and nothing else: lines of text, in gzip too, or a NumPy array."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pyg_dist.errors import DataError
from pyg_dist.store.sources.source import EdgeAttribute, EdgeChunk, Reading, Source, SourceInfo, edge_place
from pyg_dist.store.sources.text import Lines, number_lines

Array = np.ndarray[Any, Any]

WEIGHT = EdgeAttribute("edge_weight", "F32")


class TextEdges(Source):
    """``source target`` or ``source target weight`` in each line, from spaces, tabs or commas; ids begin at 0."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        first = next(number_lines(path, np.float64, block_bytes=1 << 16), None)
        if first is None:
            raise DataError(f"Expected edges in {path} (got an empty file): give a line for each edge")
        self.columns = first.values.shape[1]
        if self.columns not in (2, 3):
            raise DataError(
                f"Expected 'source target' or 'source target weight' in {path}, line {first.number[0]} (got "
                f"{self.columns} columns): drop the others"
            )

    def info(self) -> SourceInfo:
        """Neither nodes nor edges are counted yet."""
        return SourceInfo((self.path,), None, None, edges=(WEIGHT,) if self.columns == 3 else ())

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The lines in their order."""
        is_weighted = self.columns == 3
        for lines in number_lines(self.path, np.float64 if is_weighted else np.int64, self.columns):
            yield chunk_of(self.path, lines, 0)


def chunk_of(path: Path, lines: Lines, first_id: int) -> EdgeChunk:
    """Edges from lines of two or three numbers; ids begin at ``first_id``.

    Raises:
        DataError: An id is not whole.
    """
    ends, number = lines.values[:, :2], lines.number
    if ends.dtype != np.int64:
        with np.errstate(invalid="ignore"):  # what is no number is not whole either
            whole = ends.astype(np.int64)
        wrong = (whole != ends).any(1).nonzero()[0]
        if wrong.size:
            raise DataError(
                f"Expected whole numbers as node ids in {path}, line {number[wrong[0]]} (got {ends[wrong[0]].tolist()}"
                f"): the third column is the weight"
            )
        ends = whole
    if first_id:
        ends = ends - first_id
    weight = {WEIGHT.name: lines.values[:, 2].astype(np.float32)} if lines.values.shape[1] == 3 else {}
    return EdgeChunk(ends[:, 0], ends[:, 1], weight, lambda place: f"{path}, line {number[place]}")


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
                yield EdgeChunk(source, target, {}, edge_place(self.path, low))
