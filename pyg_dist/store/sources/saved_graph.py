"""Files of a whole graph's tensors: of ``pyg_dist.save_graph``, and of ``torch.save``."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from pyg_dist.store.attributes import dense_and_plain, errors_of
from pyg_dist.store.format import TensorSpec, as_storage, slices, spec_of
from pyg_dist.store.graph_input import WHOLE, GraphInput, piece_keys, read_graph, read_hetero
from pyg_dist.store.manifest import GraphForm
from pyg_dist.store.saved import EDGE_INDEX, GRAPH, TYPES, opened, require_rows, specs_of
from pyg_dist.store.source import AS_IT_IS, EdgeChunk, Reading, ReadRows, Source, attributes_of, edge_chunks, storable
from pyg_dist.store.typed_source import TypedSource


def saved_graph(path: Path, reading: Reading = AS_IT_IS, piece: str | None = None) -> Source:
    """Tensors ``edge_index`` ``[2, E]`` and attributes; the header says which of them have a row per node or edge.

    ``piece``: which one of a graph with types.
    """
    prefix = "" if piece is None else f"{piece}/"
    with opened(path) as file:
        metadata = file.metadata() or {}
        specs = {name.removeprefix(prefix): spec for name, spec in specs_of(file).items() if name.startswith(prefix)}
        if piece is None and TYPES in metadata:
            raise DataError(f"Expected a graph with one type in {path} (got several): use to_homogeneous()")
        content = json.loads(metadata[GRAPH if piece is None else TYPES])
        content = content if piece is None else content["pieces"][piece]
        require_rows(specs, content)
        kinds = [{name: specs[name] for name in content[kind]}
                 for kind in ("node_attributes", "edge_attributes", "other_tensors")]  # fmt: skip
        known = int(content["num_nodes"]), typed(GraphForm, content["graph"]), content["other"]

    def read(name: str, *places: slice) -> Array:
        with opened(path) as file:
            name = prefix + name
            return as_storage((file.get_slice(name)[places] if places else file.get_tensor(name)).contiguous())

    return _of_tensors(path, reading, specs[EDGE_INDEX], kinds, *known, read)


def in_memory(path: Path, graph: GraphInput, reading: Reading = AS_IT_IS) -> Source:
    """A checked graph that is in memory; ``path`` is the file it was read from."""
    others, plain = dense_and_plain(graph.other_attributes)
    kinds = [graph.node_attributes, graph.edge_columns, others]
    arrays = {name: as_storage(tensor.contiguous()) for kind in kinds for name, tensor in kind.items()}
    arrays[EDGE_INDEX] = graph.edge_index.numpy()
    specs = [{name: spec_of(tensor) for name, tensor in kind.items()} for kind in kinds]
    return _of_tensors(
        path, reading, spec_of(graph.edge_index), specs, graph.num_nodes, graph.form, plain,
        lambda name, *places: arrays[name][places or ...],
    )  # fmt: skip


def _of_tensors(
    path: Path, reading: Reading, edge_index: TensorSpec, kinds: Sequence[Mapping[str, TensorSpec]], num_nodes: int,
    form: GraphForm, other: Mapping[str, object], read: Callable[..., Array],
) -> Source:  # fmt: skip
    """A graph of tensors, by the specs of those of nodes, of edges and others; ``read(name, *slices)`` reads one."""
    specs = {name: spec for kind in kinds for name, spec in kind.items()}

    def rows(name: str) -> ReadRows:
        spec = specs[name]
        return lambda num_bytes: (read(name, piece) for piece in slices(spec.num_rows, spec.row_bytes, num_bytes))

    def ends(size: int) -> Iterator[EdgeChunk]:
        places = (slice(low, low + size) for low in range(0, edge_index.shape[1], size))
        return edge_chunks((read(EDGE_INDEX, slice(2), place) for place in places), path)

    of_nodes, of_edges, others = kinds
    return Source(
        path, reading, (path,), num_nodes, edge_index.shape[1], attributes_of(of_nodes, rows),
        attributes_of(of_edges, rows), ends, other,
        {name: (spec, partial(read, name)) for name, spec in others.items()}, form,
    )  # fmt: skip


_IS_TYPED = "_global_store"
"""A key of ``HeteroData.to_dict()`` that ``Data.to_dict()`` lacks."""
PROCESSED = Path("processed") / "data.pt"
"""Where a dataset of PyG keeps its graph, below its folder."""


def torch_file(path: Path, reading: Reading) -> Source:
    """One graph of ``torch.save``, with ``edge_index`` or a sparse ``adj_t``; all of it comes into memory.

    The file is loaded with ``weights_only=True``: nothing in it runs.
    """
    content = _content(path)
    if _IS_TYPED in content:
        raise DataError(f"Expected a graph with one type in {path} (got several): use to_homogeneous()")
    with errors_of(path):
        data = Data(**storable(path, {str(name): value for name, value in content.items()}))
        graph = read_graph(data, allow_nan=True, warn=False, is_strict=reading.is_strict)
    return in_memory(path, graph, reading)


def saved_types(path: Path) -> TypedSource | None:
    """The graph with types of ``pyg_dist.save_graph``; ``None``: it has one type."""
    with opened(path) as file:
        metadata = file.metadata() or {}
        if TYPES not in metadata:
            return None
        content = json.loads(metadata[TYPES])
        kinds, relations = typed(list[str], content["types"]), typed(list[EdgeType], content["relations"])
    return _of_pieces(path, kinds, relations, partial(saved_graph, path, AS_IT_IS))


def _of_pieces(
    path: Path, kinds: Iterable[str], relations: Iterable[EdgeType], source: Callable[[str], Source]
) -> TypedSource:
    """A graph with types, of the sources of its pieces (:meth:`~pyg_dist.store.graph_input.HeteroInput.pieces`)."""
    of_nodes, of_edges = piece_keys(kinds, relations)
    nodes = {kind: source(key) for kind, key in of_nodes.items()}
    return TypedSource(path, source(WHOLE), nodes, {relation: source(key) for relation, key in of_edges.items()})


def torch_file_types(path: Path) -> TypedSource | None:
    """The ``HeteroData`` in a file of ``torch.save``, in memory; ``None``: it has another graph."""
    content = _content(path)
    if _IS_TYPED not in content:
        return None
    with errors_of(path):
        stores = {key: storable(path, value) if isinstance(value, Mapping) else value for key, value in content.items()}
        hetero = read_hetero(HeteroData.from_dict(stores), allow_nan=True, warn=False)
    pieces = hetero.pieces()
    return _of_pieces(path, hetero.num_nodes, hetero.relations, lambda key: in_memory(path, pieces[key]))


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
