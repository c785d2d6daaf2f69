"""Files of a whole graph's tensors: of ``pyg_dist.save_graph``, and of ``torch.save``."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from pyg_dist.errors import DataError, PygDistError
from pyg_dist.store.attributes import by_kind
from pyg_dist.store.format import as_storage, spec_of
from pyg_dist.store.graph_input import EDGE_INDEX, METADATA, read_graph
from pyg_dist.store.reader import TensorFile
from pyg_dist.store.source import EdgeChunk, Source, SourceInfo, edge_place, fixed_rows, storable, tensors_info


class SavedGraph(Source):
    """Tensors ``edge_index`` ``[2, E]`` and attributes; the header says which of them have a row per node or edge."""

    num_nodes: int
    num_edges: int

    def open(self) -> None:
        """The header."""
        self.file = TensorFile(self.path)
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
                f"Expected a graph of pyg_dist.save_graph in {self.path} (got {type(error).__name__}: {error}): save "
                f"it again"
            ) from error

    def info(self) -> SourceInfo:
        """As the header says."""
        tensors = self.file.tensors
        nodes, edges = ({name: tensors[name] for name in names} for names in self.names.values())
        others = {name: (tensors[name], partial(self.file.whole, name)) for name in self.content["other_tensors"]}
        return tensors_info(
            self.path, self.num_nodes, self.num_edges, nodes, edges, self._rows, other=self.content["other"],
            other_tensors=others, graph=self.content["graph"],
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


PROCESSED = Path("processed") / "data.pt"
"""Where a dataset of PyG keeps its graph, below its folder."""


class TorchFile(Source):
    """One graph, with ``edge_index`` or a sparse ``adj_t``, as :class:`~pyg_dist.DistributedData` reads it.

    The file is loaded with ``weights_only=True``: nothing in it runs.
    """

    def open(self) -> None:
        """All of it, into memory."""
        data = Data(**storable(self.path, _content(self.path)))
        try:
            self.graph = read_graph(data, allow_nan=True, warn=False, is_strict=self.reading.is_strict)
        except PygDistError as error:
            raise type(error)(f"{self.path}: {error}") from error

    def info(self) -> SourceInfo:
        """All is in memory."""
        graph = self.graph
        tensors, plain = by_kind(graph.other_attributes)
        nodes, edges = (
            {name: spec_of(t) for name, t in given.items()} for given in (graph.node_attributes, graph.edge_columns)
        )
        return tensors_info(
            self.path, graph.num_nodes, graph.edge_index.shape[1], nodes, edges,
            lambda name: fixed_rows(_array(graph.node_attributes[name])), other=plain,
            other_tensors={name: (spec_of(t), partial(_array, t)) for name, t in tensors.items()},
            graph={"key": graph.graph_key, "loop_rule": graph.loop_rule},
        )  # fmt: skip

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """Slices of the tensors."""
        source, target = self.graph.edge_index.numpy()
        for low in range(0, len(source), size):
            part = slice(low, low + size)
            attributes = {name: _array(rows[part]) for name, rows in self.graph.edge_columns.items()}
            yield EdgeChunk(source[part], target[part], attributes, edge_place(self.path, low))


def _array(tensor: Tensor) -> Any:
    return as_storage(tensor.contiguous())


def _content(path: Path) -> dict[str, Any]:
    """The attributes of the graph in the file."""
    try:
        # Classes of PyG that hold a graph, all without code of their own that a file could make run.
        with torch.serialization.safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        unknown = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error))
        why = f"the class {unknown[1]}" if unknown else str(error).splitlines()[0]
        raise DataError(
            f"Expected a graph of torch.save in {path} that loads with weights_only=True (got {why[:200]}): "
            f"save data.to_dict() with tensors, numbers and text alone"
        ) from error
    slices: Any = None
    if isinstance(content, (tuple, list)) and content:
        content, slices = content[0], content[1] if len(content) > 1 else None
    if hasattr(content, "to_dict"):
        content = content.to_dict()
    if not isinstance(content, Mapping):
        raise DataError(f"Expected a Data, or a dict of tensors, in {path} (got {type(content).__name__}): save one")
    count = len(slices["edge_index"]) - 1 if isinstance(slices, Mapping) and "edge_index" in slices else 1
    if count > 1:
        raise DataError(f"Expected one graph in {path} (got {count}): save the one that you train on")
    if "_global_store" in content:
        raise DataError(f"Expected a homogeneous graph in {path} (got one of several kinds): use to_homogeneous()")
    return {str(name): value for name, value in content.items()}
