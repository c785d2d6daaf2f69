"""Edges as a NumPy array in a file, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pyg_dist.errors import DataError
from pyg_dist.store.source import EdgeChunk, Reading, Source, SourceInfo, edge_place


class ArrayEdges(Source):
    """An ``.npy`` file of integers, ``[2, E]`` or ``[E, 2]``; of two edges it is read as ``[2, E]``."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        try:
            whole = self._mapped()
        except (ValueError, EOFError) as error:
            raise DataError(f"Expected a NumPy array in {path} (got: {error}): write it with numpy.save") from error
        if whole.ndim != 2 or 2 not in whole.shape or whole.dtype.kind not in "iu":
            raise DataError(
                f"Expected integers [2, E] or [E, 2] in {path} (got {whole.dtype} {list(whole.shape)}): one column per "
                f"edge"
            )
        self.is_wide = whole.shape[0] == 2
        self.num_edges = whole.shape[1 if self.is_wide else 0]
        self.first_id = reading.first_id or 0
        self.understood = f"an array [{'2, E' if self.is_wide else 'E, 2'}]; ids from {self.first_id}"

    def _mapped(self) -> np.ndarray[Any, Any]:
        whole: np.ndarray[Any, Any] = np.load(self.path, mmap_mode="r", allow_pickle=False)
        return whole

    def info(self) -> SourceInfo:
        """As many edges as the header says."""
        return SourceInfo((self.path,), None, self.num_edges)

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The edges in their order."""
        for low in range(0, self.num_edges, size):
            whole = self._mapped()  # anew for each piece: pages are let go
            ends = (whole if self.is_wide else whole.T)[:, low : low + size].astype(np.int64) - self.first_id
            yield EdgeChunk(ends[0], ends[1], {}, edge_place(self.path, low))
