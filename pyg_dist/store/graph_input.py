"""Reading a PyG ``Data``: its edges in one form, its attributes by what they belong to, and what is wrong with it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset, HeteroData, TemporalData
from torch_geometric.typing import SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.partition.inputs import as_edges, check_ends
from pyg_dist.store.attributes import GRAPH_KEYS, NanCount, by_kind, num_nodes_of, sort_attributes
from pyg_dist.store.manifest import ADJ_VALUES, LoopRule


@dataclass
class GraphInput:
    """A checked input graph, the same on every rank."""

    edge_index: Tensor  # int64 ``[2, E]``
    num_nodes: int  # N
    graph_key: str  # ``"edge_index"`` or ``"adj_t"``, where the script will look for the graph
    loop_rule: LoopRule  # see LoopRule
    adj_values: Tensor | None  # the values of ``adj_t``, ``[E]``, unless they are absent, or all one and constant
    # where the graph was given: that of ``x``, or else of its edges. Edges and their values are on the host.
    device: torch.device
    node_attributes: dict[str, Tensor]  # tensors ``[N, ...]`` by name
    edge_attributes: dict[str, Tensor]  # tensors ``[E, ...]`` by name
    other_attributes: dict[str, object]  # everything else, kept as it is on every rank

    @property
    def edge_columns(self) -> dict[str, Tensor]:
        """What a file has a row per edge of: attributes, and the values of ``adj_t``."""
        return self.edge_attributes | ({} if self.adj_values is None else {ADJ_VALUES: self.adj_values})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that must be equal on all ranks, by name."""
        yield self.graph_key, self.edge_index
        if self.adj_values is not None:
            yield f"{self.graph_key} values", self.adj_values
        for attributes in (self.node_attributes, self.edge_attributes):
            yield from attributes.items()
        yield from by_kind(self.other_attributes)[0].items()


def read_graph(data: Data, allow_nan: bool, warn: bool, is_strict: bool = True) -> GraphInput:
    """Check ``data`` and sort its attributes. Not collective.

    Without ``allow_nan`` features must not be NaN; with ``warn`` this rank speaks for all.
    """
    if not isinstance(data, Data):
        raise UnsupportedError(
            f"Expected a homogeneous torch_geometric.data.Data, or a Batch of them (got {type(data).__name__}): "
            f"{_way_to_data(data)}"
        )
    if getattr(data, "is_distributed", False):
        raise UnsupportedError("Expected a graph of one process (got one that is distributed already): use it as it is")
    edge_index, graph_key, loop_rule, values = read_edges(data)
    num_nodes = num_nodes_of(data, lambda: int(edge_index.max()) if edge_index.numel() else -1, is_strict)
    check_ends(edge_index, num_nodes, graph_key)
    found = sort_attributes(data.to_dict(), num_nodes, edge_index.shape[1], is_strict)
    graph = GraphInput(
        edge_index, num_nodes, graph_key, loop_rule, values, _device(data), found.nodes, found.edges, found.others
    )
    if is_strict:
        _check_masks(graph)
    if not allow_nan and warn:
        warn_of_nan("node", graph.node_attributes)
        warn_of_nan("edge", graph.edge_attributes)
    return graph


def _way_to_data(given: object) -> str:
    """How a ``Data`` is made of what was given."""
    if isinstance(given, HeteroData):
        return "convert it first, HeteroData.to_homogeneous()"
    if isinstance(given, TemporalData):
        return "make its events edges, Data(edge_index=torch.stack([data.src, data.dst]), t=data.t, edge_attr=data.msg)"
    if isinstance(given, Dataset):
        return "give it one graph, dataset[0], or several, Batch.from_data_list(list(dataset))"
    if isinstance(given, Mapping):
        return "make it one, Data.from_dict(data)"
    if isinstance(given, (list, tuple)):
        return "join graphs, Batch.from_data_list(graphs), or make tensors one, Data(x=x, edge_index=edge_index)"
    return "make a graph, Data(x=x, edge_index=edge_index)"


def read_edges(data: Any) -> tuple[Tensor, str, LoopRule, Tensor | None]:
    """Edges of a ``Data`` or a store of edges as (sources, targets), their key, loop rule and values."""
    if all(data.get(key) is not None for key in GRAPH_KEYS):
        raise DataError(
            "Expected 'edge_index' or 'adj_t' in data (got both): delete the one that the model does not use"
        )
    if data.get("edge_index") is not None:
        return as_edges(data.edge_index), "edge_index", "remaining", None
    adj_t = data.get("adj_t")
    if isinstance(adj_t, SparseTensor):
        target, source, values = adj_t.coo()
        learns = values is not None and values.requires_grad
        return torch.stack([source, target]).cpu(), "adj_t", "replace", _values(values, learns)
    if adj_t is not None and is_torch_sparse_tensor(adj_t):
        coo = adj_t.detach().cpu().to_sparse_coo().coalesce()
        target, source = coo.indices()
        return torch.stack([source, target]), "adj_t", "add", _values(coo.values(), adj_t.requires_grad)
    raise DataError(f"Expected 'edge_index' or a sparse 'adj_t' in data (got only {list(data.keys())}): set edge_index")


def _values(values: Tensor | None, learns: bool) -> Tensor | None:
    if values is None or (bool((values == 1).all()) and not learns):
        return None
    return values.detach().cpu().requires_grad_(learns)


def _device(data: Data) -> torch.device:
    x, edges = data.get("x"), data.get("edge_index")
    edges = data.get("adj_t") if edges is None else edges
    if isinstance(x, Tensor):
        return x.device
    return edges.device() if isinstance(edges, SparseTensor) else torch.device(edges.device)


def _check_masks(graph: GraphInput) -> None:
    mask = graph.node_attributes.get("train_mask")
    if mask is not None and mask.dtype == torch.bool and not bool(mask.any()):
        raise DataError("Expected 'train_mask' to select at least one node (got none): the loss would be NaN")


def warn_of_nan(kind: Literal["node", "edge"], attributes: Mapping[str, Tensor]) -> None:
    """Warn of attributes, by name, that have NaN."""
    for name, value in attributes.items():
        found = NanCount.of(value)
        if found.rows:
            warnings.warn(found.warning(name, kind, len(value)), stacklevel=5)
