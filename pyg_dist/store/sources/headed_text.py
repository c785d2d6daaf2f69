"""Text with a header that gives its format: Matrix Market, DIMACS and METIS.

https://math.nist.gov/MatrixMarket/formats.html; DIMACS' ``p edge N M`` and lines ``e u v``, or ``p sp N M`` and
lines ``a u v weight``; METIS' manual, 4.1.1: a line of neighbours for each node.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.store.source import EDGE_WEIGHT, EdgeChunk, FileSource
from pyg_dist.store.sources.edge_list import SOURCE, TARGET, WEIGHT, edges_of
from pyg_dist.store.sources.text import COMMENTS, Rule, Table, first_lines

BANNER = "%%matrixmarket"
_COLUMNS = {"pattern": 2, "real": 3, "integer": 3, "double": 3}
_SYMMETRIES = ("general", "symmetric", "skew-symmetric")


class MatrixMarket(FileSource):
    """A square matrix in coordinate format: real, integer or pattern; general, symmetric or skew-symmetric.

    In a symmetric one each entry off the diagonal is followed by its reverse. Values are ``edge_weight``.
    """

    def open(self) -> None:
        path = self.path
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
        self.num_nodes, self.edges = rows, (EDGE_WEIGHT,) if _COLUMNS[field] == 3 else ()
        self.num_edges = self.num_entries if self.symmetry == "general" else None
        self.understood = f"Matrix Market's rows to columns, {self.symmetry}; ids from 1"

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        columns = (("row", "i8"), ("column", "i8"), ("value", "f8"))[: 3 if self.edges else 2]
        table = Table(self.path, columns, head=self.head, rules=(COMMENTS,))
        count, sign = 0, -1 if "skew" in self.symmetry else 1
        for rows in table.rows():
            count += len(rows.values)
            rows.values.dtype.names = (SOURCE, TARGET, WEIGHT)[: len(columns)]
            chunk = edges_of(rows, 1)
            yield chunk if self.symmetry == "general" else chunk.mirrored(sign)
        if count != self.num_entries:
            raise DataError(
                f"Expected {self.num_entries} entries in {self.path}, as line {self.head} says (got {count}): fetch it "
                f"again"
            )


_OTHERS = Rule(("",), re.compile(r"^[cpndvx](?:[ \t].*)?$", re.MULTILINE))
"""Lines that are no edges: comments, the problem, nodes."""


def is_dimacs(lines: list[str]) -> bool:
    """Whether a file begins with a comment or the problem line of this format."""
    first = next((line for line in lines if line.strip()), "")
    return bool(re.match(r"(c(\s|$)|p\s+\w+\s+\d)", first))


class Dimacs(FileSource):
    """Nodes are numbered from 1. An edge (``e``) stands for both directions, an arc (``a``) for one."""

    def open(self) -> None:
        path = self.path
        lines = first_lines(path)
        problem = next((line.split() for line in lines if line.startswith("p")), [])
        first = next((line.split() for line in lines if re.match(r"[ea]\s", line)), [])
        if len(problem) != 4 or not problem[2].isdecimal() or (first and len(first) not in (3, 4)):
            raise DataError(
                f"Expected DIMACS' 'p edge nodes edges', then 'e u v' or 'a u v weight', in {path} (got "
                f"{' '.join(problem or first)[:60]!r}): mend the file"
            )
        self.num_nodes, self.edges = int(problem[2]), (EDGE_WEIGHT,) if len(first) == 4 else ()
        self.is_arc = bool(first) and first[0] == "a"
        self.needs_reverse = not (self.is_arc or self.edges)  # edges are not counted: many files have each twice
        columns = (("kind", "U1"), (SOURCE, "i8"), (TARGET, "i8"), (WEIGHT, "f8"))
        self.table = Table(path, columns[: 4 if self.edges else 3], rules=(_OTHERS,))
        both = "" if self.is_arc else "; each edge stands for both directions"
        self.understood = f"DIMACS' {'arcs' if self.is_arc else 'edges'}; ids from 1{both}"

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        for rows in self.table.rows():
            wrong = (rows.values["kind"] != ("a" if self.is_arc else "e")).nonzero()[0]
            if wrong.size:
                raise DataError(
                    f"Expected lines of one kind, edges or arcs, in {rows.place(wrong[0])} (got "
                    f"{rows.values[wrong[0]].tolist()}): mend the file"
                )
            chunk = edges_of(rows, 1)
            yield chunk if self.is_arc or not self.edges else chunk.mirrored()


_COMMENTS = Rule(("%",), re.compile(r"^%.*\n?", re.MULTILINE))


class Metis(FileSource):
    """``nodes edges [format [weights of a node]]``, then the neighbours of each node, numbered from 1.

    Each edge is listed at both of its ends. Weights of edges are ``edge_weight``; those of nodes are left out.
    """

    num_nodes: int

    def open(self) -> None:
        path = self.path
        lines = enumerate(first_lines(path), 1)
        self.head, size = next(((k, line) for k, line in lines if line.strip() and line[0] != "%"), (1, ""))
        try:
            num_nodes, edges, form, more = [int(word) for word in (*size.split(), "0", "0")[:4]]
            count = len(size.split())
            if not 2 <= count <= 4 or min(num_nodes, edges) < 0 or not re.fullmatch("[01]{1,3}", f"{form}"):
                raise ValueError
        except ValueError:
            raise DataError(
                f"Expected METIS' 'nodes edges [format [weights of a node]]' in {path}, line {self.head} (got "
                f"{size[:60]!r}): give edges as 'source target' lines in a .txt file"
            ) from None
        self.num_nodes, self.num_edges = num_nodes, 2 * edges
        self.edges = (EDGE_WEIGHT,) if form % 10 == 1 else ()
        self.passed = form // 100 + (form // 10 % 10) * (more if count == 4 else 1)
        weights = ", weights" if self.edges else ""
        self.understood = f"METIS' neighbours of each node{weights}; ids from 1"

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        node, count = 0, 0
        for _, lines in Table(self.path, (), head=self.head, rules=(_COMMENTS,)).blocks():
            lines = lines[: self.num_nodes - node] + [line for line in lines[self.num_nodes - node :] if line.strip()]
            if node + len(lines) > self.num_nodes:
                raise self._error(f"{self.num_nodes} lines, one per node", f"more, {lines[-1][:40]!r}")
            chunk = self._chunk(node, lines)
            node, count = node + len(lines), count + len(chunk.source)
            if len(chunk.source):
                yield chunk
        if (node, count) != (self.num_nodes, self.num_edges):
            raise self._error(
                f"{self.num_nodes} nodes with {self.num_edges} neighbours, two of each edge", f"{node} with {count}"
            )

    def _chunk(self, node: int, lines: list[str]) -> EdgeChunk:
        rows = [line.split()[self.passed :] for line in lines]
        step = 2 if self.edges else 1

        def place(k: int) -> str:
            return f"{self.path}, node {source[k] + 1}"

        source = np.repeat(np.arange(node, node + len(rows)), [len(row) // step for row in rows])
        try:
            if any(len(row) % step for row in rows):
                raise ValueError("a neighbour without a weight")
            words = [word for row in rows for word in row]
            target = np.array(words[::step], np.int64) - 1
            weight = {EDGE_WEIGHT.name: np.array(words[1::step], np.float32)} if self.edges else {}
        except (ValueError, OverflowError) as error:
            raise self._error(f"neighbours from 1 to {self.num_nodes}", str(error)) from error
        return EdgeChunk(source, target, weight, place)

    def _error(self, expected: str, got: str) -> DataError:
        return DataError(f"Expected {expected} in {self.path}, as line {self.head} says (got {got}): mend the file")
