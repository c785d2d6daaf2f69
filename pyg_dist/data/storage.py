"""PyG's storages of attributes, where each assignment keeps this rank's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch import Tensor
from torch_geometric.data import Batch
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from pyg_dist.backend.session.agreement import one_line
from pyg_dist.errors import DataError, LayoutMismatchError, MixedRowsError, UnsupportedError
from pyg_dist.graph.adjacency import DistributedAdjacency
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph, NodeSharding
from pyg_dist.halo.plan.relations import HeteroPlan
from pyg_dist.pricing.base import DistributionPlan
from pyg_dist.store.attributes import GRAPH_KEYS, belongs_to
from pyg_dist.store.graph_input import GraphInput, read_adj_t
from pyg_dist.store.hyperedges import HyperedgeSizes
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.calling_code import of_whole_graphs
from pyg_dist.tensor.operands import moved_to
from pyg_dist.tensor.row_index import PickedRows
from pyg_dist.tensor.row_tensor import local_tensors
from pyg_dist.tensor.sharding import RowSharding
from pyg_dist.tensor.sparse_form import SparseForm


@dataclass(frozen=True)
class LocalGraph:
    """This rank's part of a graph with one type of nodes, or of a relation."""

    graph: DistributedGraph  # the runtime form
    plan: DistributionPlan | HeteroPlan  # what was decided
    graph_key: str | None  # ``"edge_index"`` or ``"adj_t"``; ``None``: there are hyperedges alone
    weight: EdgeTensor | None  # values of ``adj_t``
    attributes: dict[str, object]  # all others by name, rows as row tensors

    @staticmethod
    def of(given: GraphInput, graph: DistributedGraph, plan: DistributionPlan) -> LocalGraph:
        """This rank's rows of every attribute of the input, where that lay (not collective)."""
        edges, device = graph.edge_sharding, given.device
        rows = {
            name: local_rows(value, graph.attribute_sharding(name, value), device)
            for name, value in given.node_attributes.items()
        }
        rows |= {name: local_rows(value, edges, device) for name, value in given.edge_attributes.items()}
        weight = None if given.adj_values is None else local_rows(given.adj_values, edges, device)
        return LocalGraph(graph, plan, given.form.key, weight, rows | given.other_attributes)

    @property
    def handle(self) -> DistributedEdgeIndex:
        """What a script sees of the edges."""
        is_matrix = self.graph_key == "adj_t"
        return DistributedAdjacency(self.graph, self.weight) if is_matrix else DistributedEdgeIndex(self.graph)


def local_rows(value: Tensor, rows: RowSharding, device: torch.device) -> Any:
    """This rank's rows of an attribute of the input."""
    local = rows.slice(value.detach()).to(device)
    return RowTensor.from_local(local, rows).requires_grad_(value.requires_grad)


class RowStorage(BaseStorage):
    """A storage with every assignment (attribute, item, transform) through :meth:`distributed`."""

    def __setitem__(self, key: str, value: object) -> None:
        stored = self.distributed(key, value)
        if isinstance(stored, RowTensor):
            kind = getattr(self, "_key", None)  # of the nodes or edges, where there are several types
            stored._attribute = stored._attribute or (key if kind is None else f"{kind}.{key}")
            stored._sparse_form = SparseForm()
        super().__setitem__(key, stored)

    def distributed(self, key: str, value: object) -> object:
        """``value`` as it is stored: a plain ``[N, ...]`` or ``[E, ...]`` tensor is sliced to this rank's rows."""
        raise NotImplementedError  # by each kind of storage


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
    """A storage's attributes, which look at a name where there is no such one: others take no time for it."""

    def __missing__(self, key: object) -> NoReturn:
        require_name(key)
        raise KeyError(key)


class DistributedStorage(RowStorage, GlobalStorage):
    """That of a graph with one kind of nodes and edges."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__["_mapping"] = _ByName(self.__dict__["_mapping"])

    def is_node_attr(self, key: str) -> bool:
        """Whether this has a row per node."""
        return isinstance(self[key], NodeTensor) and self._parent().graph.owns(self[key])

    def is_edge_attr(self, key: str) -> bool:
        """Whether this has a value per edge; the edges themselves, too."""
        value = self[key]
        rows: RowSharding = self._parent().graph.edge_sharding
        return isinstance(value, DistributedEdgeIndex) or (
            isinstance(value, EdgeTensor) and rows.is_equivalent(value._sharding)
        )

    def distributed(self, key: str, value: object) -> object:
        graph: DistributedGraph = self._parent().graph
        if isinstance(value, DistributedEdgeIndex):
            ends = value.graph.sources, value.graph.targets
            if ends[0] is not ends[1] and graph.node_sharding in ends:
                return value  # of hyperedges
        of_hyperedges = self._placed_by_hyperedge(key, value, graph)
        if of_hyperedges is not None:
            return of_hyperedges
        if key in GRAPH_KEYS:
            handle = _same_nodes(key, value, graph)
            if handle is not None:  # fewer edges, or reversed ones: data.num_edges follows
                self._parent().__dict__["graph"] = handle.graph
            return handle
        if not isinstance(value, RowTensor):
            of_adj_t = read_adj_t(value)
            if of_adj_t is not None:
                return self._further_edges(graph, *of_adj_t)
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
        elif graph.owns(value) or graph.edge_sharding.is_equivalent(value._sharding):
            return _as_kept(key, value, graph)
        kind = _assigned_to(key, value, graph.node_sharding.size, graph.edge_sharding.size)
        if kind is None:  # also rows of a selection, or rows that a script has appended
            return value
        rows = graph.edge_sharding if kind == "edge" else graph.node_sharding
        return _as_kept(key, _with_rows(key, value, rows), graph)

    @property
    def hyperedges(self) -> tuple[str, DistributedGraph] | None:
        """Of data with hyperedges: by which name they are known, and the graph from nodes to these."""
        nodes = self._parent().graph.node_sharding
        handles = (
            (key, value.graph) for key, value in self._mapping.items() if isinstance(value, DistributedEdgeIndex)
        )
        return next(((key, g) for key, g in handles if g.sources is nodes and g.targets is not nodes), None)

    def _placed_by_hyperedge(self, key: str, value: object, graph: DistributedGraph) -> RowTensor | None:
        """What has a row for each hyperedge, or each of their nodes, as it is stored; ``None`` for anything else."""
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
        """A sparse matrix beside the graph's own, as ``full_adj_t``: these, where they are the same (collective)."""
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


class TypedNodes(RowStorage, NodeStorage):
    """That of one type of nodes."""

    @property
    def sharding(self) -> NodeSharding:
        """Which of these nodes are here."""
        return self._parent().node_shardings[self._key]  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Where this rank's rows lie."""
        return self._parent()._device  # type: ignore[no-any-return]

    @property
    def num_nodes(self) -> int:
        """Nodes of this type, over all ranks."""
        return self.sharding.size

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number != self.sharding.size:
            raise MixedRowsError(f"Setting num_nodes={number} would change a distributed graph: set it before")

    def is_node_attr(self, key: str) -> bool:
        """Whether this has a row per node."""
        value = self[key]
        return isinstance(value, NodeTensor) and value._sharding is self.sharding

    def distributed(self, key: str, value: object) -> object:
        return _placed(key, value, self.sharding, "node")


class TypedEdges(RowStorage, EdgeStorage):
    """That of one relation."""

    @property
    def handle(self) -> DistributedEdgeIndex:
        """Its ``edge_index`` or ``adj_t``."""
        return next(self._mapping[key] for key in GRAPH_KEYS if key in self._mapping)  # type: ignore[no-any-return]

    @property
    def num_edges(self) -> int:
        """Edges of this relation, over all ranks; none where a batch has only labels of it."""
        return self.handle.graph.edge_sharding.size if any(key in self._mapping for key in GRAPH_KEYS) else 0

    def is_edge_attr(self, key: str) -> bool:
        """Whether this has a value per edge; the edges themselves, too."""
        value = self[key]
        rows: RowSharding | None = self.handle.graph.edge_sharding if isinstance(value, EdgeTensor) else None
        return isinstance(value, DistributedEdgeIndex) or (rows is not None and rows.is_equivalent(value._sharding))

    def _whole(self) -> EdgeStorage:
        whole = EdgeStorage(_parent=self._parent(), _key=self._key, edge_index=self.handle.full_tensor())
        if "edge_attr" in self:
            whole.edge_attr = self.edge_attr.full_tensor()
        return whole

    def is_coalesced(self) -> bool:
        """Whether the edges are sorted and none stands twice (collective: gathers all edges)."""
        return bool(self._whole().is_coalesced())

    def is_undirected(self) -> bool:
        """Whether each edge has its reverse, with equal ``edge_attr`` (collective: gathers all edges)."""
        return bool(self._whole().is_undirected())

    def has_isolated_nodes(self) -> bool:
        """Whether some node has no edge of this relation (collective: gathers all edges)."""
        return bool(self._whole().has_isolated_nodes())

    def distributed(self, key: str, value: object) -> object:
        if key in GRAPH_KEYS:
            is_first = not any(key in self._mapping for key in GRAPH_KEYS)
            return _same_nodes(key, value, None if is_first else self.handle.graph)
        return _placed(key, value, self.handle.graph.edge_sharding, "edge")


def _as_kept(key: str, value: RowTensor, graph: DistributedGraph) -> RowTensor:
    """An attribute of nodes or edges as its layout keeps it (collective where whole rows become tiles)."""
    rows = graph.attribute_sharding(key, value) if isinstance(value, NodeTensor) else graph.node_sharding
    return value if rows is graph.node_sharding else value.redistribute(rows)


def _with_rows(key: str, value: Tensor, rows: RowSharding) -> RowTensor:
    """An attribute with these rows: plain, or in another order, as ``x[torch.randperm(N)]`` (collective then)."""
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
    """:func:`belongs_to`; a transform that adds nodes, or takes some away, is named where that stops."""
    try:
        return belongs_to(key, value, num_nodes, num_edges)
    except DataError as error:
        if refusal := of_whole_graphs():
            raise UnsupportedError(refusal) from error
        raise


def _placed(key: str, value: object, rows: RowSharding, kind: Literal["node", "edge"]) -> object:
    """A type's or a relation's attribute: row tensors have its rows, and tensors with a row for each get them."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if isinstance(value, RowTensor):
        is_its = value._sharding is rows if kind == "node" else rows.is_equivalent(value._sharding)
        if is_its:
            return value
    sizes = (rows.size, None) if kind == "node" else (None, rows.size)
    return _with_rows(key, value, rows) if belongs_to(key, value, *sizes) == kind else value


def refused(name: str) -> Callable[..., NoReturn]:
    """A method that refuses what would change a graph."""

    def method(self: object, *args: object, **kwargs: object) -> NoReturn:
        raise MixedRowsError(f"{name} would change or take apart a distributed graph: apply it before DistributedData")

    return method


D = TypeVar("D", bound="OnDevice")


class OnDevice:
    """What data of one type and of several have in common: all that a rank has of it lies on one device.

    Names come in the same order on every rank, where PyG gives that of a set, in which each process has its own order.
    """

    stores: list[BaseStorage]
    node_stores: list[BaseStorage]
    edge_stores: list[BaseStorage]

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        if issubclass(cls, Batch):
            raise UnsupportedError(
                "A loader or a Batch joins plain graphs (got distributed ones): use one as it is, without a loader; "
                "join several first, DistributedData(Batch.from_data_list(graphs))"
            )
        return super().__new__(cls)

    to_data_list, get_example, concat = refused("to_data_list"), refused("get_example"), refused("concat")

    @property
    def num_graphs(self) -> int:
        """Of a ``Batch``: how many graphs it is made of."""
        pointers = [store["ptr"] for store in self.stores if "ptr" in store]
        if not pointers:
            raise AttributeError("A DistributedData has 'num_graphs' where it is made from a Batch (got one graph)")
        return len(pointers[0]) - 1

    batch_size = num_graphs

    def __len__(self) -> int:
        return self.num_graphs if any("ptr" in store for store in self.stores) else len(self.keys())

    def keys(self) -> list[str]:
        """The names of all attributes."""
        return _distinct(store.keys() for store in self.stores)

    def node_attrs(self) -> list[str]:
        """The names of attributes with a row per node."""
        return _distinct(store.node_attrs() for store in self.node_stores)

    def edge_attrs(self) -> list[str]:
        """The names of attributes with a value per edge; of the edges, too."""
        return _distinct(store.edge_attrs() for store in self.edge_stores)

    @property
    def _device(self) -> torch.device:
        raise NotImplementedError  # by each kind of data

    def _lie_on(self, device: torch.device) -> None:
        """Take note of a move, before the attributes follow."""
        raise NotImplementedError  # by each kind of data

    def to(self: D, device: torch.device | str | int, *args: str, non_blocking: bool = False) -> D:
        """Move this rank's part to ``device``, in place as ``Data.to`` does (not collective).

        Raises:
            UnsupportedError: A device that is not usable here; or names of attributes where something moves: all of
                them move with the edges.

        Example:
            >>> data.to("cpu").x.device
            device(type='cpu')
        """
        try:
            there = torch.empty(0, device=device).device  # with its number
        except Exception as error:  # of any class, by device and build of torch
            got = f"got '{device}': {one_line(error)}"
            raise UnsupportedError(
                f"Expected a device that torch can use here ({got}): leave the data on {self._device}"
            ) from None
        if there == self._device:
            return self
        if args:
            raise UnsupportedError(
                f"Expected no names of attributes, since all of them move (got {args}): leave them out"
            )
        self._lie_on(there)
        for store in self.stores:
            for name, value in list(store.items()):
                moved = _moved_to(value, there, non_blocking)
                if moved is not value:
                    store[name] = moved
        return self

    def cpu(self: D, *args: str) -> D:
        """Move this rank's part to main memory."""
        return self.to("cpu", *args)

    def cuda(self: D, device: int | str | None = None, *args: str, non_blocking: bool = False) -> D:
        """Move this rank's part to a GPU."""
        return self.to("cuda" if device is None else device, *args, non_blocking=non_blocking)

    def validate(self, raise_on_error: bool = True) -> bool:
        """True: the graph was checked when it was distributed, and every assignment since."""
        return True


def _distinct(names: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(names)))


def _moved_to(value: object, device: torch.device, non_blocking: bool) -> object:
    """What a storage has, on another device (not collective)."""
    if isinstance(value, PickedRows):
        return value.on(device)
    if isinstance(value, RowTensor):
        return RowTensor.from_local(value.to_local().to(device, non_blocking=non_blocking), value._sharding)
    if isinstance(value, DistributedEdgeIndex):
        return value.on(value.graph.to(device))
    return value.to(device) if isinstance(value, Tensor) else value


def _same_nodes(key: str, value: object, graph: DistributedGraph | None) -> DistributedEdgeIndex | None:
    """A handle that may take the place of a graph's: one over the same nodes; any, of a relation that has no graph yet.

    Raises:
        LayoutMismatchError: It is over others.
        MixedRowsError: Something else.
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
