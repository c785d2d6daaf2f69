"""Files of ``pyg_dist.save_graph``: one safetensors file with a graph's tensors, its metadata in the header."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pyg_dist.errors import DataError
from pyg_dist.store.graph_input import EDGE_INDEX, METADATA
from pyg_dist.store.reader import TensorFile
from pyg_dist.store.source import (
    EdgeAttribute,
    EdgeChunk,
    NodeAttribute,
    Reading,
    Source,
    SourceInfo,
    edge_place,
)


class SavedGraph(Source):
    """Tensors ``edge_index`` ``[2, E]`` and attributes; the header says which of them have a row per node or edge."""

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        self.file = TensorFile(path)
        try:
            self.content: dict[str, Any] = json.loads(self.file.metadata[METADATA])
            self.num_nodes = int(self.content["num_nodes"])
            names = {kind: list(self.content[kind]) for kind in ("node_attributes", "edge_attributes")}
            edges = self.file.tensors[EDGE_INDEX]
            if edges.dtype != "I64" or len(edges.shape) != 2 or edges.shape[0] != 2:
                raise ValueError(f"edge_index of {edges.dtype} {list(edges.shape)}")
            self.num_edges = edges.shape[1]
            rows = {"node_attributes": self.num_nodes, "edge_attributes": self.num_edges}
            if any(self.file.tensors[n].shape[0] != rows[kind] for kind in names for n in names[kind]):
                raise ValueError("attributes of another number of rows")
            self.names = names
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise DataError(
                f"Expected a graph of pyg_dist.save_graph in {path} (got {type(error).__name__}: {error}): save again"
            ) from error

    def info(self) -> SourceInfo:
        """As the header says."""
        tensors = self.file.tensors
        nodes = tuple(
            NodeAttribute(name, tensors[name].dtype, tensors[name].shape[1:], self._rows(name))
            for name in self.names["node_attributes"]
        )
        edges = tuple(
            EdgeAttribute(name, tensors[name].dtype, tensors[name].shape[1:]) for name in self.names["edge_attributes"]
        )
        others = {name: (tensors[name], partial(self.file.whole, name)) for name in self.content["other_tensors"]}
        return SourceInfo(
            (self.path,), self.num_nodes, self.num_edges, nodes, edges, self.content["other"], others,
            graph=self.content["graph"],
        )  # fmt: skip

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """Slices of the mapped file."""
        file = self.file
        sources, targets = file.rows(EDGE_INDEX)
        for low in range(0, self.num_edges, size):
            high = min(low + size, self.num_edges)
            attributes = {name: file.rows(name, low, high) for name in self.names["edge_attributes"]}
            yield EdgeChunk(sources[low:high], targets[low:high], attributes, edge_place(self.path, low))
            file.release()

    def _rows(self, name: str) -> Any:
        return lambda num_bytes: self.file.pieces(name, num_bytes=num_bytes)
