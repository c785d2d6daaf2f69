"""Files of ``torch.save`` with a PyG graph: a ``Data``, its dict, or the processed file of a dataset."""

from __future__ import annotations

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
from pyg_dist.store.format import TensorSpec, as_storage, dtype_name
from pyg_dist.store.graph_input import read_graph
from pyg_dist.store.source import (
    EdgeAttribute,
    EdgeChunk,
    NodeAttribute,
    Reading,
    Source,
    SourceInfo,
    edge_place,
    fixed_rows,
    storable,
)

PROCESSED = Path("processed") / "data.pt"
"""Where a dataset of PyG keeps its graph, below its folder."""


class TorchFile(Source):
    """One graph, with ``edge_index`` or a sparse ``adj_t``, as :class:`~pyg_dist.DistributedData` reads it.

    The file is loaded with ``weights_only=True``: nothing in it runs.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        content = _content(path)
        try:
            self.graph = read_graph(
                Data(**storable(path, content)), allow_nan=True, warn=False, is_strict=reading.is_strict
            )
        except PygDistError as error:
            raise type(error)(f"{path}: {error}") from error

    def info(self) -> SourceInfo:
        """All is in memory."""
        graph = self.graph
        tensors = {name: value for name, value in graph.other_attributes.items() if isinstance(value, Tensor)}
        plain = {name: value for name, value in graph.other_attributes.items() if name not in tensors}
        nodes = (
            NodeAttribute(name, dtype_name(t.dtype), tuple(t.shape[1:]), fixed_rows(_array(t)))
            for name, t in graph.node_attributes.items()
        )
        edges = (EdgeAttribute(name, dtype_name(t.dtype), tuple(t.shape[1:])) for name, t in graph.edge_columns.items())
        others = {n: (TensorSpec(dtype_name(t.dtype), tuple(t.shape)), partial(_array, t)) for n, t in tensors.items()}
        return SourceInfo(
            (self.path,), graph.num_nodes, graph.edge_index.shape[1], tuple(nodes), tuple(edges), plain, others,
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
