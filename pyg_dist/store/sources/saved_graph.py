"""Files of a whole graph's tensors: of ``pyg_dist.save_graph``, and of ``torch.save``."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage
from torch_geometric.typing import EdgeType

from pyg_dist.backend.plain_json import typed
from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.attributes import by_kind, errors_of
from pyg_dist.store.format import as_storage, slices, spec_of
from pyg_dist.store.graph_input import WHOLE, GraphInput, edges_key, nodes_key, read_graph, read_hetero
from pyg_dist.store.manifest import GraphForm
from pyg_dist.store.saved import EDGE_INDEX, GRAPH, TYPES, opened, require_rows, specs_of
from pyg_dist.store.source import EdgeChunk, Reading, TensorSource, attributes_of, fixed_rows, storable
from pyg_dist.store.typed_source import TypedSource


class SavedGraph(TensorSource):
    """Tensors ``edge_index`` ``[2, E]`` and attributes; the header says which of them have a row per node or edge.

    ``piece``: which one of a graph with types.
    """

    num_nodes: int
    num_edges: int

    def __init__(self, path: Path, reading: Reading, piece: str | None = None) -> None:
        self.piece, self.prefix = piece, "" if piece is None else f"{piece}/"
        super().__init__(path, reading)

    def open(self) -> None:
        with opened(self.path) as file:
            metadata, prefix = file.metadata() or {}, self.prefix
            self.specs = {
                name.removeprefix(prefix): spec for name, spec in specs_of(file).items() if name.startswith(prefix)
            }
            if self.piece is None and TYPES in metadata:
                raise DataError(f"Expected a graph with one type in {self.path} (got several): use to_homogeneous()")
            content = json.loads(metadata[GRAPH if self.piece is None else TYPES])
            if self.piece is not None:
                content = content["pieces"][self.piece]
            self.num_nodes, self.num_edges = int(content["num_nodes"]), require_rows(self.specs, content)
            of_nodes, of_edges, others = (
                {name: self.specs[name] for name in content[kind]}
                for kind in ("node_attributes", "edge_attributes", "other_tensors")
            )
            self.other, self.graph = content["other"], typed(GraphForm, content["graph"])
        self.nodes, self.edges = (attributes_of(kind, partial(partial, self._rows)) for kind in (of_nodes, of_edges))
        self.other_tensors = {name: (spec, partial(self._whole, name)) for name, spec in others.items()}

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        places = (slice(low, low + size) for low in range(0, self.num_edges, size))
        return self.ends_of((self._slice(EDGE_INDEX, slice(2), place) for place in places), self.path)

    def _slice(self, name: str, *place: slice) -> Array:
        with opened(self.path) as file:
            return as_storage(file.get_slice(self.prefix + name)[place].contiguous())

    def _whole(self, name: str) -> Array:
        with opened(self.path) as file:
            return as_storage(file.get_tensor(self.prefix + name))

    def _rows(self, name: str, num_bytes: int) -> Iterator[Array]:
        spec = self.specs[name]
        return (self._slice(name, rows) for rows in slices(spec.num_rows, spec.row_bytes, num_bytes))


_IS_TYPED = "_global_store"
"""What the content of a ``HeteroData`` has, and that of a ``Data`` does not."""
PROCESSED = Path("processed") / "data.pt"
"""Where a dataset of PyG keeps its graph, below its folder."""


class GraphInMemory(TensorSource):
    """A checked graph that is in memory; ``path`` is what it was read from."""

    def __init__(self, path: Path, graph: GraphInput, reading: Reading = Reading()) -> None:  # noqa: B008
        self._graph = graph
        super().__init__(path, reading)

    def open(self) -> None:
        graph = self._graph
        others, self.other = by_kind(graph.other_attributes)
        tensors = graph.node_attributes | graph.edge_columns | others
        arrays = {name: as_storage(tensor.contiguous()) for name, tensor in tensors.items()}
        self.nodes, self.edges = (
            attributes_of({name: spec_of(t) for name, t in given.items()}, lambda name: fixed_rows(arrays[name]))
            for given in (graph.node_attributes, graph.edge_columns)
        )
        self.other_tensors = {name: (spec_of(t), partial(arrays.__getitem__, name)) for name, t in others.items()}
        self.num_nodes, self.num_edges = graph.num_nodes, graph.edge_index.shape[1]
        self.graph = graph.form
        self.edge_index = graph.edge_index.numpy()

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        count = self.edge_index.shape[1]
        return self.ends_of((self.edge_index[:, low : low + size] for low in range(0, count, size)), self.path)


def torch_file(path: Path, reading: Reading) -> GraphInMemory:
    """One graph of ``torch.save``, with ``edge_index`` or a sparse ``adj_t``; all of it comes into memory.

    The file is loaded with ``weights_only=True``: nothing in it runs.
    """
    content = _content(path)
    if _IS_TYPED in content:
        raise DataError(f"Expected a graph with one type in {path} (got several): use to_homogeneous()")
    with errors_of(path):
        data = Data(**storable(path, {str(name): value for name, value in content.items()}))
        graph = read_graph(data, allow_nan=True, warn=False, is_strict=reading.is_strict)
    return GraphInMemory(path, graph, reading)


def saved_types(path: Path) -> TypedSource | None:
    """The graph with types of ``pyg_dist.save_graph``; ``None``: it has one type."""
    with opened(path) as file:
        metadata = file.metadata() or {}
        if TYPES not in metadata:
            return None
        content = json.loads(metadata[TYPES])
        kinds, relations = typed(list[str], content["types"]), typed(list[EdgeType], content["relations"])
    return _of_pieces(path, kinds, relations, partial(SavedGraph, path, Reading()))


def _of_pieces(
    path: Path, kinds: Iterable[str], relations: Iterable[EdgeType], source: Callable[[str], TensorSource]
) -> TypedSource:
    """A graph with types of what :meth:`~pyg_dist.store.graph_input.HeteroInput.pieces` names."""
    return TypedSource(
        path, source(WHOLE), {kind: source(nodes_key(k)) for k, kind in enumerate(kinds)},
        {relation: source(edges_key(k)) for k, relation in enumerate(relations)},
    )  # fmt: skip


def torch_file_types(path: Path) -> TypedSource | None:
    """The ``HeteroData`` in a file of ``torch.save``, in memory; ``None``: it has another graph."""
    content = _content(path)
    if _IS_TYPED not in content:
        return None
    with errors_of(path):
        stores = {key: storable(path, value) if isinstance(value, Mapping) else value for key, value in content.items()}
        hetero = read_hetero(HeteroData.from_dict(stores), allow_nan=True, warn=False)
    pieces = hetero.pieces()
    return _of_pieces(path, hetero.num_nodes, hetero.relations, lambda key: GraphInMemory(path, pieces[key]))


def _content(path: Path) -> Mapping[object, object]:
    try:
        # Classes of PyG that hold a graph, all without code of their own that a file could make run.
        storages = [GlobalStorage, BaseStorage, NodeStorage, EdgeStorage]
        with torch.serialization.safe_globals([Data, HeteroData, DataEdgeAttr, DataTensorAttr, *storages]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        unknown = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error))
        why = f"the class {unknown[1]}" if unknown else str(error).splitlines()[0]
        raise DataError(
            f"Expected a graph of torch.save in {path} that loads with weights_only=True (got {why[:200]}): "
            f"save data.to_dict() with tensors, numbers and text alone"
        ) from error
    slices: object = None
    count = 1
    if isinstance(content, (tuple, list)) and content:  # a graph and its slices, as PyG's datasets; or a list of graphs
        second = content[1] if len(content) > 1 else None
        is_graph = hasattr(second, "to_dict") or (isinstance(second, Mapping) and not _are_slices(second))
        count = len(content) if is_graph else 1
        content, slices = content[0], second
    if hasattr(content, "to_dict"):
        content = content.to_dict()
    if not isinstance(content, Mapping):
        raise DataError(f"Expected a Data, or a dict of tensors, in {path} (got {type(content).__name__}): save one")
    if isinstance(slices, Mapping) and "edge_index" in slices and count == 1:
        count = len(slices["edge_index"]) - 1
    if count > 1:
        raise DataError(f"Expected one graph in {path} (got {count}): save the one that you train on")
    return content


def _are_slices(content: Mapping[object, object]) -> bool:
    return all(isinstance(value, Mapping) or getattr(value, "ndim", 1) == 1 for value in content.values())
