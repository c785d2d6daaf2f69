"""Files of a whole graph's tensors: of ``pyg_dist.save_graph``, and of ``torch.save``."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from pyg_dist.errors import DataError, PygDistError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.attributes import by_kind
from pyg_dist.store.format import TensorSpec, as_storage, spec_of
from pyg_dist.store.graph_input import EDGE_INDEX, METADATA, read_graph
from pyg_dist.store.source import EdgeChunk, TensorSource, attributes_of, fixed_rows, storable


class SavedGraph(TensorSource):
    """Tensors ``edge_index`` ``[2, E]`` and attributes; the header says which of them have a row per node or edge."""

    num_nodes: int
    num_edges: int

    def open(self) -> None:
        """The header."""
        with self._opened() as file:
            found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            self.specs = {name: TensorSpec(one.get_dtype(), tuple(one.get_shape())) for name, one in found.items()}
            content = json.loads(file.metadata()[METADATA])
            self.num_nodes, edges = int(content["num_nodes"]), self.specs[EDGE_INDEX]
            if edges.dtype != "I64" or len(edges.shape) != 2 or edges.shape[0] != 2:
                raise ValueError(f"edge_index of {edges.dtype} {list(edges.shape)}")
            self.num_edges = edges.shape[1]
            of_nodes, of_edges, others = (
                {name: self.specs[name] for name in content[kind]}
                for kind in ("node_attributes", "edge_attributes", "other_tensors")
            )
            for kind, size in ((of_nodes, self.num_nodes), (of_edges, self.num_edges)):
                if any(spec.shape[0] != size for spec in kind.values()):
                    raise ValueError("attributes of another number of rows")
            self.other, self.graph = content["other"], content["graph"]
        self.nodes, self.edges = (attributes_of(kind, partial(partial, self._rows)) for kind in (of_nodes, of_edges))
        self.other_tensors = {name: (spec, partial(self._whole, name)) for name, spec in others.items()}

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The file, mapped; its pages are let go of at the end."""
        try:
            with safetensors.safe_open(self.path, "pt") as file:
                yield file
        except (safetensors.SafetensorError, KeyError, ValueError, TypeError, IndexError) as error:
            raise DataError(
                f"Expected a graph of pyg_dist.save_graph in {self.path} (got {type(error).__name__}: {error}): save "
                f"it again"
            ) from error

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        """Slices of the file."""
        places = (slice(low, low + size) for low in range(0, self.num_edges, size))
        return self.ends_of((self._slice(EDGE_INDEX, slice(2), place) for place in places), self.path)

    def _slice(self, name: str, *place: slice) -> Array:
        with self._opened() as file:
            return as_storage(file.get_slice(name)[place].contiguous())

    def _whole(self, name: str) -> Array:
        with self._opened() as file:
            return as_storage(file.get_tensor(name))

    def _rows(self, name: str, num_bytes: int) -> Iterator[Array]:
        spec = self.specs[name]
        step = max(1, num_bytes // max(spec.row_bytes, 1))
        return (self._slice(name, slice(low, low + step)) for low in range(0, spec.num_rows, step))


PROCESSED = Path("processed") / "data.pt"
"""Where a dataset of PyG keeps its graph, below its folder."""


class TorchFile(TensorSource):
    """One graph, with ``edge_index`` or a sparse ``adj_t``, as :class:`~pyg_dist.DistributedData` reads it.

    The file is loaded with ``weights_only=True``: nothing in it runs.
    """

    def open(self) -> None:
        """All of it, into memory."""
        data = Data(**storable(self.path, _content(self.path)))
        try:
            graph = read_graph(data, allow_nan=True, warn=False, is_strict=self.reading.is_strict)
        except PygDistError as error:
            raise type(error)(f"{self.path}: {error}") from error
        others, self.other = by_kind(graph.other_attributes)
        tensors = graph.node_attributes | graph.edge_columns | others
        arrays = {name: as_storage(tensor.contiguous()) for name, tensor in tensors.items()}
        self.nodes, self.edges = (
            attributes_of({name: spec_of(t) for name, t in given.items()}, lambda name: fixed_rows(arrays[name]))
            for given in (graph.node_attributes, graph.edge_columns)
        )
        self.other_tensors = {name: (spec_of(t), partial(arrays.__getitem__, name)) for name, t in others.items()}
        self.num_nodes, self.num_edges = graph.num_nodes, graph.edge_index.shape[1]
        self.graph = {"key": graph.graph_key, "loop_rule": graph.loop_rule}
        self.edge_index = graph.edge_index.numpy()

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        """Slices of the tensor."""
        count = self.edge_index.shape[1]
        return self.ends_of((self.edge_index[:, low : low + size] for low in range(0, count, size)), self.path)


def _content(path: Path) -> dict[str, object]:
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
    slices: object = None
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
