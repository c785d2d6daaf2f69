"""PyG's storage of a graph with one type of nodes, where each assignment keeps this rank's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NoReturn

import torch
from torch import Tensor
from torch_geometric.data.storage import BaseStorage, GlobalStorage

from pyg_dist.errors import DataError, LayoutMismatchError, MixedRowsError, UnsupportedError
from pyg_dist.graph.adjacency import DistributedAdjacency
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.store.attributes import GRAPH_KEYS, belongs_to
from pyg_dist.store.graph_input import read_adj_t
from pyg_dist.store.hyperedges import HyperedgeSizes
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.calling_code import of_whole_graphs
from pyg_dist.tensor.operands import moved_to
from pyg_dist.tensor.row_tensor import local_tensors
from pyg_dist.tensor.sharding import RowSharding
from pyg_dist.tensor.sparse_form import SparseForm


class RowStorage(BaseStorage):
    """A storage in which every assignment (attribute, item, transform) goes through :meth:`distributed`."""

    def __setitem__(self, key: str, value: object) -> None:
        stored = self.distributed(key, value)
        if isinstance(stored, RowTensor):
            kind = getattr(self, "_key", None)  # the type of nodes or the relation, where there are several
            stored._attribute = stored._attribute or (key if kind is None else f"{kind}.{key}")
            stored._sparse_form = SparseForm()
        super().__setitem__(key, stored)

    def distributed(self, key: str, value: object) -> object:
        """``value`` as it is stored: a plain ``[N, ...]`` or ``[E, ...]`` tensor is sliced to this rank's rows."""
        raise NotImplementedError  # of a subclass


def require_name(key: object) -> None:
    """Refuse a number for an attribute's name, as ``data[0]`` of a ``Batch`` would have it.

    Raises:
        MixedRowsError: It is neither a name nor several.
    """
    if not isinstance(key, (str, tuple)):
        raise MixedRowsError(
            f"data[{key!r}] would take apart a distributed graph: keep the plain graphs from before DistributedData"
        )


class _ByName(dict[str, object]):
    """A storage's attributes; only a missing name is checked, so that reading an attribute takes no longer."""

    def __missing__(self, key: object) -> NoReturn:
        require_name(key)
        raise KeyError(key)


class DistributedStorage(RowStorage, GlobalStorage):
    """The attributes of a graph with one type of nodes."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_mapping"] = _ByName(self.__dict__["_mapping"])

    def is_node_attr(self, key: str) -> bool:
        """Whether an attribute has a row per node."""
        return isinstance(self[key], NodeTensor) and self._parent().graph.owns(self[key])

    def is_edge_attr(self, key: str) -> bool:
        """Whether an attribute has a row per edge; also for the edges themselves."""
        value = self[key]
        rows: RowSharding = self._parent().graph.edge_sharding
        return isinstance(value, DistributedEdgeIndex) or (
            isinstance(value, EdgeTensor) and rows.is_equivalent(value._sharding)
        )

    def distributed(self, key: str, value: object) -> object:
        graph: DistributedGraph = self._parent().graph
        if isinstance(value, DistributedEdgeIndex):
            ends = value.graph.sources, value.graph.targets
            if key not in GRAPH_KEYS or (ends[0] is not ends[1] and graph.node_sharding in ends):
                return value  # further edges, or the incidence of hyperedges
        of_hyperedges = self._rows_of_hyperedges(key, value, graph)
        if of_hyperedges is not None:
            return of_hyperedges
        if key in GRAPH_KEYS:
            handle = same_nodes(key, value, graph)
            if handle is not None:  # selected or reversed edges, which data.num_edges then counts
                self._parent().__dict__["graph"] = handle.graph
            return handle
        if not isinstance(value, RowTensor):
            of_adj_t = read_adj_t(value)
            if of_adj_t is not None:
                return self._further_edges(graph, *of_adj_t)
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
        elif graph.owns(value) or graph.edge_sharding.is_equivalent(value._sharding):
            return _in_layout(key, value, graph)
        kind = _assigned_to(key, value, graph.node_sharding.size, graph.edge_sharding.size)
        if kind is None:  # also rows of a selection, or rows that a script has appended
            return value
        rows = graph.edge_sharding if kind == "edge" else graph.node_sharding
        return _in_layout(key, with_rows(key, value, rows), graph)

    @property
    def hyperedges(self) -> tuple[str, DistributedGraph] | None:
        """The name of the hyperedges, and the graph from nodes to hyperedges; ``None``: there are none."""
        nodes = self._parent().graph.node_sharding
        handles = (
            (key, value.graph) for key, value in self._mapping.items() if isinstance(value, DistributedEdgeIndex)
        )
        return next(((key, g) for key, g in handles if g.sources is nodes and g.targets is not nodes), None)

    def _rows_of_hyperedges(self, key: str, value: object, graph: DistributedGraph) -> RowTensor | None:
        """An attribute with a row for each hyperedge, or each of their nodes, as stored; ``None`` for any other."""
        found = self.hyperedges if isinstance(value, Tensor) and value.dim() > 0 else None
        if found is None or not isinstance(value, Tensor):
            return None
        rows: Mapping[str, RowSharding]
        rows = {"hyperedge": found[1].targets, "incidence": found[1].edge_sharding}
        if isinstance(value, RowTensor):
            return value if any(own.is_equivalent(value._sharding) for own in rows.values()) else None
        nodes, edges = graph.node_sharding.size, graph.edge_sharding.size
        sizes = HyperedgeSizes(nodes, edges, *(own.size for own in rows.values()))
        kind = sizes.kind_of(key, value, "edge" if found[0] == "edge_index" else "hyperedge")
        return None if kind is None else RowTensor.from_local(rows[kind].slice(value), rows[kind])

    def _further_edges(
        self, graph: DistributedGraph, edges: Tensor, loop_rule: LoopRule, values: Tensor | None
    ) -> DistributedEdgeIndex:
        """A sparse matrix beside the graph's, such as ``full_adj_t``; the graph's where it is equal (collective)."""
        own: DistributedEdgeIndex | None = next((self._mapping[k] for k in GRAPH_KEYS if k in self._mapping), None)
        has_as_many = own is not None and own.is_sparse and graph.edge_sharding.size == edges.shape[1]
        if own is not None and has_as_many and torch.equal(graph.full_edge_index().cpu(), edges):
            if own.weight is None or values is None:
                is_own = own.weight is values
            else:
                learns = own.weight.requires_grad or values.requires_grad
                is_own = not learns and torch.equal(own.weight.full_tensor().cpu(), values.cpu())
            if is_own:
                return own
        laid_out = DistributedEdgeIndex.over(edges, graph.node_sharding, graph.device, loop_rule, is_kept=False)
        return DistributedAdjacency(laid_out.graph).set_value(values)


def _in_layout(key: str, value: RowTensor, graph: DistributedGraph) -> RowTensor:
    """An attribute of nodes or edges with the sharding that the layout has for it (collective if rows become tiles)."""
    rows = graph.attribute_sharding(key, value) if isinstance(value, NodeTensor) else graph.node_sharding
    return value if rows is graph.node_sharding else value.redistribute(rows)


def with_rows(key: str, value: Tensor, rows: RowSharding) -> RowTensor:
    """A plain attribute, or rows in another order (``x[torch.randperm(N)]``, collective), as rows of this sharding."""
    if not isinstance(value, RowTensor):
        return RowTensor.from_local(rows.slice(value), rows)
    if value.is_leaf and value.requires_grad:
        raise LayoutMismatchError(
            f"Expected '{key}' in the order of this graph where it learns (got rows in another order): write "
            f"data.{key} = rows.detach(), then data.{key}.requires_grad_()"
        )
    with local_tensors():
        return moved_to(rows, value, f"Expected '{key}'")  # type: ignore[no-any-return]


def _assigned_to(key: str, value: Tensor, num_nodes: int, num_edges: int) -> Literal["node", "edge"] | None:
    """:func:`belongs_to`; where a transform that adds or removes nodes runs, the error names it."""
    try:
        return belongs_to(key, value, num_nodes, num_edges)
    except DataError as error:
        if refusal := of_whole_graphs():
            raise UnsupportedError(refusal) from error
        raise


def same_nodes(key: str, value: object, graph: DistributedGraph | None) -> DistributedEdgeIndex | None:
    """``value``, if it may replace a graph's edges: a handle over the same nodes, or any handle without a ``graph``.

    Raises:
        LayoutMismatchError: It is over other nodes.
        MixedRowsError: It is no handle.
    """
    if isinstance(value, DistributedEdgeIndex):
        if graph is not None and not (value.graph.sources is graph.sources and value.graph.targets is graph.targets):
            raise LayoutMismatchError(
                f"Expected '{key}' over the nodes of this data (got edges of another DistributedData): use that one"
            )
        return value
    if value is None:
        return None
    raise MixedRowsError(f"Assigning '{key}' would change a distributed graph: change it before DistributedData")
