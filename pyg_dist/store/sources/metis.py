"""METIS' graph files (its manual, 4.1.1): a line of neighbours for each node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pyg_dist.errors import DataError
from pyg_dist.store.source import EdgeChunk, Reading, Source, SourceInfo
from pyg_dist.store.sources.edge_list import EDGE_WEIGHT
from pyg_dist.store.sources.text import Rule, Table, first_lines

_COMMENTS = Rule(("%",), re.compile(r"^%.*\n?", re.MULTILINE))


class Metis(Source):
    """``nodes edges [format [weights of a node]]``, then the neighbours of each node, numbered from 1.

    Each edge stands with both of its ends. Weights of edges are ``edge_weight``; those of nodes are left out.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        lines = enumerate(first_lines(path), 1)
        self.head, size = next(((k, line) for k, line in lines if line.strip() and line[0] != "%"), (1, ""))
        try:
            self.num_nodes, edges, form, more = [int(word) for word in (*size.split(), "0", "0")[:4]]
            count = len(size.split())
            if not 2 <= count <= 4 or min(self.num_nodes, edges) < 0 or not re.fullmatch("[01]{1,3}", f"{form}"):
                raise ValueError
        except ValueError:
            raise DataError(
                f"Expected METIS' 'nodes edges [format [weights of a node]]' in {path}, line {self.head} (got "
                f"{size[:60]!r}): give edges as 'source target' lines in a .txt file"
            ) from None
        self.num_edges, self.is_weighted = 2 * edges, form % 10 == 1
        self.passed = form // 100 + (form // 10 % 10) * (more if count == 4 else 1)
        weights = ", weights" if self.is_weighted else ""
        self.understood = f"METIS' neighbours of each node{weights}; ids from 1"

    def info(self) -> SourceInfo:
        """As the first line says."""
        edges = (EDGE_WEIGHT,) if self.is_weighted else ()
        return SourceInfo((self.path,), self.num_nodes, self.num_edges, edges=edges)

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The neighbours of the nodes in their order."""
        node, count = 0, 0
        for first, lines in Table(self.path, (), head=self.head, rules=(_COMMENTS,)).blocks():
            lines = lines[: self.num_nodes - node] + [line for line in lines[self.num_nodes - node :] if line.strip()]
            if node + len(lines) > self.num_nodes:
                raise self._error(f"{self.num_nodes} lines, one per node", f"more, {lines[-1][:40]!r}")
            chunk = self._chunk(node, first, lines)
            node, count = node + len(lines), count + len(chunk.source)
            if len(chunk.source):
                yield chunk
        if (node, count) != (self.num_nodes, self.num_edges):
            raise self._error(
                f"{self.num_nodes} nodes with {self.num_edges} neighbours, two of each edge", f"{node} with {count}"
            )

    def _chunk(self, node: int, first: int, lines: list[str]) -> EdgeChunk:
        rows = [line.split()[self.passed :] for line in lines]
        step = 2 if self.is_weighted else 1

        def place(k: int) -> str:
            return f"{self.path}, node {source[k] + 1}"

        source = np.repeat(np.arange(node, node + len(rows)), [len(row) // step for row in rows])
        try:
            if any(len(row) % step for row in rows):
                raise ValueError("a neighbour without a weight")
            words = [word for row in rows for word in row]
            target = np.array(words[::step], np.int64) - 1
            weight = {EDGE_WEIGHT.name: np.array(words[1::step], np.float32)} if self.is_weighted else {}
        except (ValueError, OverflowError) as error:
            raise self._error(f"neighbours from 1 to {self.num_nodes}", str(error)) from error
        return EdgeChunk(source, target, weight, place)

    def _error(self, expected: str, got: str) -> DataError:
        return DataError(f"Expected {expected} in {self.path}, as line {self.head} says (got {got}): mend the file")
