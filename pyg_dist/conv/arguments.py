"""The arguments of a conv's forward: their names, which of them are edges, and their values for distributed edges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from inspect import Parameter, signature
from typing import Any

from torch import Tensor
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.nn import MessagePassing

from pyg_dist.conv.inputs import edge_values, edge_values_if_any, in_batch, node_rows
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import End, nodes_at
from pyg_dist.store.hyperedges import KEY
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.functions.moved_rows import MovedRows
from pyg_dist.tensor.registry import like, mapped


def is_edge_index(name: str) -> bool:
    """Whether the argument of this name is edges: ``edge_index``, ``pos_edge_index``, ``hyperedge_index`` ..."""
    name = name.removesuffix("_dict")  # by relation
    return name in ("edge_index", KEY) or name.endswith("_edge_index")


def hyperedges_in(given: dict[str, Any]) -> Any:
    """The hyperedges of a call with a plain ``hyperedge_index``: the sharding of their rows, or their number."""
    incidence = given[KEY]
    least = int(incidence[1].max()) + 1 if incidence.numel() else 0
    others = [value for name, value in given.items() if name.startswith("hyperedge_") and isinstance(value, Tensor)]
    sizes = [value.shape[0] for value in others if value is not incidence and value.dim() > 0]
    numbers = [given[name] for name in ("num_edges", "num_hyperedges") if isinstance(given.get(name), int)]
    return next((x._sharding.whole for x in others if isinstance(x, NodeTensor)), max([least, *sizes, *numbers]))


class Arguments:
    """The arguments of a class's forward: all ``names``, and those of ``edges``."""

    def __init__(self, stock: type[MessagePassing]) -> None:
        self._signature = signature(stock.forward)
        _, *parameters = self._signature.parameters.values()
        self.names = tuple(p.name for p in parameters)
        self.edges = tuple(filter(is_edge_index, self.names))
        self._needed = {p.name for p in parameters if p.default is Parameter.empty}
        self._by_name = all(p.kind is Parameter.POSITIONAL_OR_KEYWORD for p in parameters)

    def by_name(self, conv: MessagePassing, args: Sequence[object], kwargs: dict[str, object]) -> dict[str, Any]:
        """The arguments of a call by their names."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        fits = self._by_name and len(given) == len(args) + len(kwargs) and self._needed <= given.keys()
        if fits and given.keys() <= set(self.names):
            return given
        return dict(list(self._signature.bind(conv, *args, **kwargs).arguments.items())[1:])  # or the TypeError

    def edges_in(self, given: dict[str, Any]) -> tuple[str, ...]:
        """The arguments of a call that are edges: those named so and given, then others that are distributed edges."""
        named = (name for name in self.edges if given.get(name) is not None)
        distributed = (DistributedEdgeIndex, Edges)
        others = (name for name, value in given.items() if name not in self.edges and isinstance(value, distributed))
        return (*named, *others)

    def call(self, forward: Any, conv: MessagePassing, given: dict[str, object]) -> Any:
        """``forward`` of ``conv`` with these arguments."""
        if self._by_name:
            return forward(conv, **given)
        bound = self._signature.bind_partial(conv)
        bound.arguments.update(given)
        return forward(*bound.args, **bound.kwargs)


arguments_of = cache(Arguments)


@contextmanager
def edges_within(
    given: dict[str, Any], edges_of: Callable[[DistributedEdgeIndex], Edges]
) -> Iterator[dict[str, Any] | None]:
    """Context that gives a conv's arguments with edges in place of handles, also inside of graphs and containers.

    ``None`` if there are no edges in them. A graph is changed in place until the context ends, so that the conv's
    assignments stay; tuples, lists and dictionaries are copied. Edge tensors get the sharding of the edges (collective
    where they have another).
    """
    found, swapped = list[Edges](), list[tuple[dict[str, Any], str, Any, Any]]()

    def edges(value: Any) -> Any:
        value = edges_of(value) if isinstance(value, DistributedEdgeIndex) else value
        if isinstance(value, Edges):
            found.append(value)
        return value

    def rows(value: Any) -> Any:
        if not isinstance(value, EdgeTensor) or any(value._sharding is edges.rows for edges in found):
            return value
        moved = (edge_values_if_any(value, edges.rows) for edges in found)
        return next((edge_values for edge_values in moved if edge_values is not None), value)

    def in_stores(change: Callable[[Any], Any], value: Any) -> Any:
        if not isinstance(value, (BaseData, BaseStorage)):
            return change(value)
        for store in value.stores if isinstance(value, BaseData) else [value]:
            for key, item in list(store.items()):
                changed = mapped(item, partial(in_stores, change))
                if changed is not item:
                    swapped.append((store._mapping, key, item, changed))
                    store._mapping[key] = changed
        return value

    try:
        laid_out = mapped(given, partial(in_stores, edges))
        yield mapped(laid_out, partial(in_stores, rows)) if found else None
    finally:
        for mapping, key, item, changed in reversed(swapped):
            if mapping.get(key) is changed:
                mapping[key] = item


def features_of(given: dict[str, Any]) -> Any:
    """The features whose nodes plain edges join: the first argument with rows of nodes, or else the first one."""
    firsts = ((value, value[0] if type(value) in (tuple, list) and value else value) for value in given.values())
    rows = ((value, first.of if type(first) is MovedRows else first) for value, first in firsts)
    return next((value for value, x in rows if isinstance(x, NodeTensor)), next(iter(given.values()), None))


def row_values(conv: MessagePassing, name: str, value: Any, edges: Edges, end: End | None = None) -> Any:
    """An argument beside distributed edges: plain tensors with a row per node or edge become row tensors.

    A pair has rows of the sources and of the targets; ``end`` is set for an item of a pair.
    """
    if isinstance(value, (tuple, list)) and name != "size":
        ends: Any = (0, 1) if len(value) == 2 else [None] * len(value)
        items = [row_values(conv, name, item, edges, end) for item, end in zip(value, ends, strict=True)]
        return like(value, items)
    if not isinstance(value, Tensor) or isinstance(value, Edges) or value.dim() == 0:
        return value
    if name in ("x", "h"):
        return node_rows(conv, edges.graph, value, end)
    at = (edges.graph.sources, edges.graph.targets) if end is None else (nodes_at(edges.graph, end),)
    at = at[::-1] if name.startswith("hyperedge") else at  # where both are as many
    for rows in (edges.rows,) if name.startswith("edge_") else at:
        value = in_batch(conv, value, rows)
    if type(value) is MovedRows:
        return value
    graph = edges.graph
    is_of_hyperedges = isinstance(value, NodeTensor) and graph.sources is not graph.targets and graph.owns(value, 1)
    if name.startswith("edge_") and not is_of_hyperedges:
        return edge_values(conv, name, value, edges.rows)
    if not isinstance(value, RowTensor):
        for nodes in at:
            if value.shape[0] == nodes.size:
                return RowTensor.from_local(nodes.slice(value), nodes)
    if isinstance(value, EdgeTensor) or not isinstance(value, RowTensor):  # maybe of edges, by a name of the script's
        found = edge_values_if_any(value, edges.rows)
        return value if found is None else found
    return value
