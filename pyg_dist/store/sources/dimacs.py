"""DIMACS' graph files: ``p edge N M`` and lines ``e u v``, or ``p sp N M`` and lines ``a u v weight``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pyg_dist.errors import DataError
from pyg_dist.store.source import EdgeChunk, Reading, Source, SourceInfo
from pyg_dist.store.sources.columns import SOURCE, TARGET, WEIGHT
from pyg_dist.store.sources.edge_list import EDGE_WEIGHT, edges_of
from pyg_dist.store.sources.text import Rule, Table, first_lines

_OTHERS = Rule(("",), re.compile(r"^[cpndvx](?:[ \t].*)?$", re.MULTILINE))
"""Lines that are no edges: comments, the problem, nodes."""


def is_dimacs(lines: list[str]) -> bool:
    """Whether a file begins with a comment or the problem line of this format."""
    first = next((line for line in lines if line.strip()), "")
    return bool(re.match(r"(c(\s|$)|p\s+\w+\s+\d)", first))


class Dimacs(Source):
    """Nodes are numbered from 1. An edge (``e``) stands for both directions, an arc (``a``) for one."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        lines = first_lines(path)
        problem = next((line.split() for line in lines if line.startswith("p")), [])
        first = next((line.split() for line in lines if re.match(r"[ea]\s", line)), [])
        if len(problem) != 4 or not problem[2].isdecimal() or (first and len(first) not in (3, 4)):
            raise DataError(
                f"Expected DIMACS' 'p edge nodes edges', then 'e u v' or 'a u v weight', in {path} (got "
                f"{' '.join(problem or first)[:60]!r}): mend the file"
            )
        self.num_nodes, self.is_weighted = int(problem[2]), len(first) == 4
        self.is_arc = bool(first) and first[0] == "a"
        columns = (("kind", "U1"), (SOURCE, "i8"), (TARGET, "i8"), (WEIGHT, "f8"))
        self.table = Table(path, columns[: 4 if self.is_weighted else 3], rules=(_OTHERS,))
        both = "" if self.is_arc else "; each edge stands for both directions"
        self.understood = f"DIMACS' {'arcs' if self.is_arc else 'edges'}; ids from 1{both}"

    def info(self) -> SourceInfo:
        """Edges are not counted: many files have each twice."""
        edges = (EDGE_WEIGHT,) if self.is_weighted else ()
        stands_once = not (self.is_arc or self.is_weighted)
        return SourceInfo((self.path,), self.num_nodes, None, edges=edges, stands_once=stands_once)

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The lines in their order."""
        for rows in self.table.rows():
            wrong = (rows.values["kind"] != ("a" if self.is_arc else "e")).nonzero()[0]
            if wrong.size:
                raise DataError(
                    f"Expected lines of one kind, edges or arcs, in {self.path}, line {rows.line(int(wrong[0]))} (got "
                    f"{rows.values[wrong[0]].tolist()}): mend the file"
                )
            chunk = edges_of(self.path, rows, 1)
            yield chunk if self.is_arc or not self.is_weighted else chunk.mirrored()
