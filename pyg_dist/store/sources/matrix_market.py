"""Matrix Market files (https://math.nist.gov/MatrixMarket/formats.html): a sparse adjacency matrix as text.

Entry ``i j value`` is the edge from node i - 1 to node j - 1, as SciPy and networkx read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.store.source import EdgeChunk, Reading, Source, SourceInfo
from pyg_dist.store.sources.columns import SOURCE, TARGET, WEIGHT
from pyg_dist.store.sources.edge_list import EDGE_WEIGHT, edges_of
from pyg_dist.store.sources.text import COMMENTS, Table, first_lines

BANNER = "%%matrixmarket"
_COLUMNS = {"pattern": 2, "real": 3, "integer": 3, "double": 3}
_SYMMETRIES = ("general", "symmetric", "skew-symmetric")


class MatrixMarket(Source):
    """A square matrix in coordinate format: real, integer or pattern; general, symmetric or skew-symmetric.

    Of a symmetric one each entry off the diagonal is followed by its mirror image. Values are ``edge_weight``.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        lines = first_lines(path)
        banner = lines[0]
        body = ((k, line) for k, line in enumerate(lines[1:], 2) if line.strip() and not line.lstrip().startswith("%"))
        self.head, size = next(body, (len(lines), ""))
        words = banner.lower().split()
        if len(words) != 5 or words[:2] != [BANNER, "matrix"]:
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
        self.understood = f"Matrix Market's rows to columns, {self.symmetry}; ids from 1"

    def info(self) -> SourceInfo:
        """As the size line says."""
        edges = (EDGE_WEIGHT,) if self.columns == 3 else ()
        num_edges = self.num_entries if self.symmetry == "general" else None
        return SourceInfo((self.path,), self.num_nodes, num_edges, edges=edges)

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The entries in their order."""
        columns = (("row", "i8"), ("column", "i8"), ("value", "f8"))[: self.columns]
        table = Table(self.path, columns, head=self.head, rules=(COMMENTS,))
        count, sign = 0, -1 if "skew" in self.symmetry else 1
        for rows in table.rows():
            count += len(rows.values)
            rows.values.dtype.names = (SOURCE, TARGET, WEIGHT)[: self.columns]
            chunk = edges_of(self.path, rows, 1)
            yield chunk if self.symmetry == "general" else chunk.mirrored(sign)
        if count != self.num_entries:
            raise DataError(
                f"Expected {self.num_entries} entries in {self.path}, as line {self.head} says (got {count}): fetch it "
                f"again"
            )
