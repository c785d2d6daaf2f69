"""Read and check a PyG ``Data`` or ``HeteroData``: its edges in one form, its attributes sorted by nodes and edges."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch_geometric.data import Data, Dataset, HeteroData, TemporalData
from torch_geometric.data.hypergraph_data import HyperGraphData
from torch_geometric.data.storage import EdgeStorage
from torch_geometric.typing import EdgeType, SparseTensor
from torch_geometric.utils import is_torch_sparse_tensor

from pyg_dist.backend import host
from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.partition.inputs import as_edges, check_ends
from pyg_dist.store.attributes import (
    GRAPH_KEYS,
    Attributes,
    NanCount,
    dense_and_plain,
    errors_of,
    num_nodes_of,
    sort_attributes,
)
from pyg_dist.store.hyperedges import Hyperedges
from pyg_dist.store.manifest import ADJ_VALUES, GraphForm, LoopRule


@dataclass
class GraphInput:
    """A checked input graph, the same on every rank."""

    edge_index: Tensor  # int64 ``[2, E]``
    num_nodes: int  # N
    form: GraphForm  # how a script sees the edges
    adj_values: Tensor | None  # the values of ``adj_t``, ``[E]``, unless they are absent, or all one and constant
    # where the graph was given: that of ``x``, or else of its edges. Edges and their values are on the host.
    device: torch.device
    node_attributes: dict[str, Tensor]  # tensors ``[N, ...]`` by name
    edge_attributes: dict[str, Tensor]  # tensors ``[E, ...]`` by name
    other_attributes: dict[str, object]  # everything else, kept as it is on every rank
    hyperedges: Hyperedges | None = None  # beside the edges, or in their place

    @property
    def edge_columns(self) -> dict[str, Tensor]:
        """The attributes with a row per edge in a file: those of edges, and the values of ``adj_t``."""
        return self.edge_attributes | ({} if self.adj_values is None else {ADJ_VALUES: self.adj_values})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that must be equal on all ranks, by name."""
        yield self.form.key, self.edge_index
        if self.adj_values is not None:
            yield f"{self.form.key} values", self.adj_values
        for attributes in (self.node_attributes, self.edge_attributes):
            yield from attributes.items()
        yield from dense_and_plain(self.other_attributes)[0].items()
        if self.hyperedges is not None:
            yield from self.hyperedges.tensors()


def read_graph(data: Data, allow_nan: bool, warn: bool, is_strict: bool = True) -> GraphInput:
    """Check ``data`` and sort its attributes. Not collective.

    ``warn``: whether this rank warns of NaN, unless ``allow_nan``. For ``is_strict`` see
    :func:`~pyg_dist.store.attributes.sort_attributes`.
    """
    if not isinstance(data, Data):
        raise UnsupportedError(
            f"Expected a homogeneous torch_geometric.data.Data, or a Batch of them (got {type(data).__name__}): "
            f"{_way_to_data(data)}"
        )
    if getattr(data, "is_distributed", False):
        raise UnsupportedError("Expected a graph of one process (got one that is distributed already): use it as it is")
    if isinstance(data, HyperGraphData):
        raise UnsupportedError(
            "Expected edges between nodes (got a HyperGraphData): give it to DistributedData from memory, with an "
            "edge_index"
        )
    edge_index, form, values = read_edges(data)
    num_nodes = num_nodes_of(data, lambda: int(edge_index.max()) if edge_index.numel() else -1, is_strict)
    check_ends(edge_index, num_nodes, form.key)
    found = sort_attributes(data.to_dict(), num_nodes, edge_index.shape[1], is_strict)
    graph = GraphInput(edge_index, num_nodes, form, values, _device(data), found.nodes, found.edges, found.others)
    mask = found.nodes.get("train_mask")
    if is_strict and mask is not None and mask.dtype == torch.bool and not bool(mask.any()):
        raise DataError("Expected 'train_mask' to select at least one node (got none): the loss would be NaN")
    if not allow_nan and warn:
        warn_of_nan("node", graph.node_attributes)
        warn_of_nan("edge", graph.edge_attributes)
    return graph


def _way_to_data(given: object) -> str:
    """The remedy of an error: how ``given`` becomes a ``Data``."""
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


def read_edges(data: Data | EdgeStorage) -> tuple[Tensor, GraphForm, Tensor | None]:
    """Edges of a ``Data`` or a store of edges as (sources, targets), their form and values."""
    if all(data.get(key) is not None for key in GRAPH_KEYS):
        raise DataError(
            "Expected 'edge_index' or 'adj_t' in data (got both): delete the one that the model does not use"
        )
    if data.get("edge_index") is not None:
        return as_edges(data.edge_index), GraphForm("edge_index", "remaining"), None
    of_adj_t = read_adj_t(data.get("adj_t"))
    if of_adj_t is not None:
        edges, loop_rule, values = of_adj_t
        if values is not None:
            values = values.detach().cpu().requires_grad_(values.requires_grad)
        return edges, GraphForm("adj_t", loop_rule), values
    others = [key for key in data.keys() if key.endswith("edge_index")]  # noqa: SIM118 - as of train_test_split_edges
    how = f"set one, data.edge_index = data.{others[0]}" if others else "set one"
    raise DataError(f"Expected 'edge_index' or a sparse 'adj_t' in data (got only {sorted(data.keys())}): {how}")


def read_adj_t(adj_t: object) -> tuple[Tensor, LoopRule, Tensor | None] | None:
    """Edges (sources, targets) of a sparse matrix, its rule for loops, its values unless all are one; or ``None``."""
    loop_rule: LoopRule = "replace"
    if isinstance(adj_t, SparseTensor):
        target, source, values = adj_t.coo()
    elif is_torch_sparse_tensor(adj_t):
        coo = cast(Tensor, adj_t).to_sparse_coo().coalesce()
        (target, source), values, loop_rule = coo.indices(), coo.values(), "add"
    else:
        return None
    is_one = values is None or (not values.requires_grad and bool((values == 1).all()))
    return torch.stack([source, target]).cpu(), loop_rule, None if is_one else values


def _device(data: Data) -> torch.device:
    x, edges = data.get("x"), data.get("edge_index")
    edges = data.get("adj_t") if edges is None else edges
    if isinstance(x, Tensor):
        return x.device
    return edges.device() if isinstance(edges, SparseTensor) else torch.device(edges.device)


def warn_of_nan(kind: Literal["node", "edge"], attributes: Mapping[str, Tensor]) -> None:
    """Warn of each attribute that has NaN."""
    for name, value in attributes.items():
        found = NanCount.of(value)
        if found.rows:
            warnings.warn(found.warning(name, kind, len(value)), stacklevel=5)


WHOLE = "whole"
"""The piece of a graph with types that has the attributes of the whole graph."""


def piece_keys(types: Iterable[str], relations: Iterable[EdgeType]) -> tuple[dict[str, str], dict[EdgeType, str]]:
    """The names of the other pieces, by type and by relation: numbers, since names of types may hold any character."""
    return (
        {kind: f"nodes-{k}" for k, kind in enumerate(types)},
        {relation: f"edges-{k}" for k, relation in enumerate(relations)},
    )


@dataclass
class HeteroInput:
    """A checked input graph with types, the same on every rank."""

    num_nodes: dict[str, int]  # of each type
    nodes: dict[str, Attributes]  # attributes of each type's nodes
    # the edges of each relation and their attributes; their ``num_nodes`` is that of the targets
    relations: dict[EdgeType, GraphInput]
    others: dict[str, object]  # attributes of the whole
    device: torch.device  # where the graph was given

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that must be equal on all ranks, by name."""
        for kind, found in self.nodes.items():
            for name, value in (found.nodes | dense_and_plain(found.others)[0]).items():
                yield f"[{kind!r}].{name}", value
        for relation, graph in self.relations.items():
            for name, value in graph.tensors():
                yield f"{[*relation]}.{name}", value
        for name, value in dense_and_plain(self.others)[0].items():
            yield name, value

    def pieces(self) -> dict[str, GraphInput]:
        """Graphs of one type that files and stores keep: attributes of the whole, nodes by type, edges by relation."""

        def without_edges(size: int, found: Attributes) -> GraphInput:
            edge_index = host.empty(2, 0, dtype=torch.int64)
            return GraphInput(
                edge_index, size, GraphForm("edge_index", "remaining"), None, self.device, found.nodes, {}, found.others
            )

        of_nodes, of_edges = piece_keys(self.nodes, self.relations)
        found = {WHOLE: without_edges(0, Attributes(others=self.others))}
        for kind, attributes in self.nodes.items():
            found[of_nodes[kind]] = without_edges(self.num_nodes[kind], attributes)
        return found | {of_edges[relation]: graph for relation, graph in self.relations.items()}


def as_one_type(relations: Mapping[EdgeType, Tensor], num_nodes: Mapping[str, int]) -> Tensor:
    """All edges, nodes numbered through all types in their order, as by ``to_homogeneous()``: int64 ``[2, E]``."""
    first, number = {}, 0
    for kind, size in num_nodes.items():
        first[kind], number = number, number + size
    pieces = [
        edge_index + host.tensor([[first[source]], [first[target]]])
        for (source, _, target), edge_index in relations.items()
    ]
    return torch.cat([host.empty(2, 0, dtype=torch.int64), *pieces], dim=1)


def read_hetero(data: HeteroData, allow_nan: bool, warn: bool) -> HeteroInput:
    """Check ``data`` and sort its attributes, as :func:`read_graph`. Not collective."""
    if getattr(data, "is_distributed", False):
        raise UnsupportedError("Expected a graph of one process (got one that is distributed already): use it as it is")
    if not data.node_types:
        raise DataError("Expected a HeteroData with nodes (got none): set data['paper'].x, or a num_nodes")
    num_nodes = {kind: _num_nodes(kind, store) for kind, store in data.node_items()}
    nodes = {}
    for kind, store in data.node_items():
        with errors_of(f"data[{kind!r}]"):
            nodes[kind] = sort_attributes(store.to_dict(), num_nodes[kind], None)
    given = [store.get("x") for store in data.node_stores] + [store.get("edge_index") for store in data.edge_stores]
    device = next((x.device for x in given if isinstance(x, Tensor)), torch.device("cpu"))
    relations = {}
    for relation, store in data.edge_items():
        name = f"data{[*relation]}"
        ends = [relation[0], relation[-1]]
        if any(kind not in num_nodes for kind in ends):
            missing = next(kind for kind in ends if kind not in num_nodes)
            raise DataError(f"Expected nodes of type {missing!r} (got edges {relation} without them): set num_nodes")
        with errors_of(name):
            edge_index, form, values = read_edges(store)
            found = sort_attributes(store.to_dict(), None, edge_index.shape[1])
        for end, kind in enumerate(ends):
            check_ends(edge_index[end], num_nodes[kind], f"{name}.{form.key} of {kind!r}")
        size = num_nodes[ends[1]]
        relations[relation] = GraphInput(edge_index, size, form, values, device, {}, found.edges, found.others)
    if not allow_nan and warn:
        for kind, attributes in nodes.items():
            warn_of_nan("node", {f"{kind}.{name}": value for name, value in attributes.nodes.items()})
    return HeteroInput(num_nodes, nodes, relations, data._global_store.to_dict(), device)


def _num_nodes(kind: str, store: Any) -> int:
    if not store.can_infer_num_nodes:
        raise DataError(f"Expected the number of nodes of type {kind!r} (got no x): set data[{kind!r}].num_nodes")
    declared, x = store.get("num_nodes"), store.get("x")
    if declared is not None and isinstance(x, Tensor) and x.shape[0] != declared:
        raise DataError(f"Expected {declared} rows of x for the nodes of type {kind!r} (got {x.shape[0]}): one a node")
    return int(store.num_nodes)
