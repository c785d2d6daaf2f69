"""Files of ``torch.save`` with a PyG graph: a ``Data``, its dict, or the processed file of a dataset."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage

from pyg_dist.errors import DataError
from pyg_dist.store.format import dtype_name
from pyg_dist.store.sources.source import (
    EdgeAttribute,
    EdgeChunk,
    NodeAttribute,
    Source,
    SourceInfo,
    fixed_rows,
)

PROCESSED = Path("processed") / "data.pt"
"""Where a dataset of PyG keeps its graph, below its folder."""


class TorchFile(Source):
    """One graph with ``edge_index``. It is read with ``weights_only=True``: nothing in the file runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.tensors = _tensors(path)
        edges = self.tensors.get("edge_index")
        if edges is None or edges.dim() != 2 or edges.shape[0] != 2 or edges.is_floating_point():
            got = "nothing" if edges is None else f"{edges.dtype} {list(edges.shape)}"
            raise DataError(f"Expected integers [2, E] as 'edge_index' in {path} (got {got}): save such a graph")
        self.edges = edges.long()
        self.num_edges = self.edges.shape[1]
        rows = self.tensors.get("x", self.tensors.get("y"))
        declared = self.tensors.get("num_nodes")
        largest = int(self.edges.max()) + 1 if self.num_edges else 0
        self.num_nodes = int(declared) if declared is not None else largest if rows is None else rows.shape[0]

    def info(self) -> SourceInfo:
        """Attributes by the number of their rows."""
        nodes, edges = [], []
        for name, tensor in self.tensors.items():
            if name in ("edge_index", "num_nodes") or tensor.dim() == 0:
                continue
            if tensor.shape[0] == self.num_nodes:
                rows = fixed_rows(_array(tensor))
                nodes.append(NodeAttribute(name, dtype_name(tensor.dtype), tuple(tensor.shape[1:]), rows))
            elif tensor.shape[0] == self.num_edges:
                edges.append(EdgeAttribute(name, dtype_name(tensor.dtype), tuple(tensor.shape[1:])))
        return SourceInfo((self.path,), self.num_nodes, self.num_edges, tuple(nodes), tuple(edges))

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """Slices of the tensors."""
        names = [attribute.name for attribute in self.info().edges]
        source, target = self.edges.numpy()
        for low in range(0, self.num_edges, size):
            part = slice(low, low + size)
            attributes = {name: _array(self.tensors[name][part]) for name in names}
            yield EdgeChunk(source[part], target[part], attributes, _place(self.path, low))


def _place(path: Path, low: int) -> Callable[[int], str]:
    return lambda place: f"{path}, edge {low + place}"


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.contiguous().numpy() if tensor.dtype != torch.bfloat16 else tensor.view(torch.uint16).numpy()


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of the graph in the file, by name."""
    try:
        # Classes of PyG that hold a graph, all without code of their own that a file could make run.
        with torch.serialization.safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        unknown = re.search(r"[Uu]nsupported (?:global: )?GLOBAL (\S+)", str(error))
        why = f"the class {unknown[1]}" if unknown else str(error).splitlines()[0]
        raise DataError(
            f"Expected a graph of torch.save in {path} that loads with weights_only=True (got {why[:200]}): "
            f"save data.to_dict()"
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
    if any(isinstance(value, Mapping) for value in content.values()):
        raise DataError(f"Expected a homogeneous graph in {path} (got one of several kinds): use to_homogeneous()")
    found = {
        str(name): value
        for name, value in content.items()
        if isinstance(value, Tensor) and value.layout == torch.strided
    }
    number = content.get("num_nodes")
    return found | ({"num_nodes": torch.tensor(number)} if isinstance(number, int) else {})
