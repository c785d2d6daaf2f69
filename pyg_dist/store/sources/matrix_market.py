"""Matrix Market files (https://math.nist.gov/MatrixMarket/formats.html): a sparse adjacency matrix as text.

Entry ``i j value`` is the edge from node i - 1 to node j - 1, as SciPy and networkx read it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.store.sources.edge_list import WEIGHT, chunk_of
from pyg_dist.store.sources.source import EdgeChunk, Reading, Source, SourceInfo
from pyg_dist.store.sources.text import number_lines, open_text

_COLUMNS = {"pattern": 2, "real": 3, "integer": 3, "double": 3}
_SYMMETRIES = ("general", "symmetric", "skew-symmetric")


class MatrixMarket(Source):
    """A square matrix in coordinate format: real, integer or pattern; general, symmetric or skew-symmetric.

    Of a symmetric one each entry off the diagonal is followed by its mirror image. Values are ``edge_weight``.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        self.head = 0
        banner, size = b"", b""
        try:
            with open_text(path) as file:
                for line in file:
                    self.head += 1
                    if self.head == 1:
                        banner = line
                    elif line.strip() and not line.lstrip().startswith(b"%"):
                        size = line
                        break
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"Expected a Matrix Market file in {path} (got: {error}): fetch it again") from error
        words = banner.decode(errors="replace").lower().split()
        if len(words) != 5 or words[:2] != ["%%matrixmarket", "matrix"]:
            raise DataError(
                f"Expected '%%MatrixMarket matrix coordinate ...' in {path}, line 1 (got {banner[:60]!r}): check it"
            )
        _, _, form, field, self.symmetry = words
        if form != "coordinate" or field not in _COLUMNS or self.symmetry not in _SYMMETRIES:
            raise UnsupportedError(
                f"Expected a coordinate matrix, real, integer or pattern, {', '.join(_SYMMETRIES)} in {path}, line 1 "
                f"(got {' '.join(words[2:])}): convert it"
            )
        try:
            rows, columns, self.num_entries = (int(word) for word in size.split())
            if min(rows, columns, self.num_entries) < 0:
                raise ValueError("a negative number")
        except ValueError as error:
            raise DataError(
                f"Expected 'rows columns entries' in {path}, line {self.head} (got {size[:60]!r}): mend the line"
            ) from error
        if rows != columns:
            raise DataError(f"Expected a square matrix in {path}, line {self.head} (got {rows} x {columns}): pad it")
        self.num_nodes, self.columns = rows, _COLUMNS[field]

    def info(self) -> SourceInfo:
        """As the size line says."""
        edges = (WEIGHT,) if self.columns == 3 else ()
        num_edges = self.num_entries if self.symmetry == "general" else None
        return SourceInfo((self.path,), self.num_nodes, num_edges, edges=edges)

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The entries in their order."""
        count = 0
        for lines in number_lines(
            self.path, np.float64 if self.columns == 3 else np.int64, self.columns, skip=self.head
        ):
            count += len(lines.values)
            chunk = chunk_of(self.path, lines, 1)
            yield chunk if self.symmetry == "general" else _mirrored(chunk, -1 if "skew" in self.symmetry else 1)
        if count != self.num_entries:
            raise DataError(
                f"Expected {self.num_entries} entries in {self.path}, as line {self.head} says (got {count}): fetch it "
                f"again"
            )


def _mirrored(chunk: EdgeChunk, sign: int) -> EdgeChunk:
    """Each entry, and its mirror image behind it."""
    is_off = chunk.source != chunk.target
    entry = np.repeat(np.arange(len(is_off)), 1 + is_off)
    is_image = np.zeros(len(entry), bool)
    is_image[1:] = entry[1:] == entry[:-1]
    source = np.where(is_image, chunk.target[entry], chunk.source[entry])
    target = np.where(is_image, chunk.source[entry], chunk.target[entry])
    weight = {
        name: np.where(is_image, sign, 1).astype(rows.dtype) * rows[entry] for name, rows in chunk.attributes.items()
    }
    return EdgeChunk(source, target, weight, lambda place: chunk.place(int(entry[place])))
