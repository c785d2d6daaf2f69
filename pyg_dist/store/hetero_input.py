"""Reading a PyG ``HeteroData``: a checked graph for each relation, and nodes by type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import HeteroData
from torch_geometric.typing import EdgeType

from pyg_dist.errors import DataError, UnsupportedError
from pyg_dist.partition.inputs import check_ends
from pyg_dist.store.attributes import Attributes, by_kind, sort_attributes
from pyg_dist.store.graph_input import GraphInput, read_edges, warn_of_nan

WHOLE = "whole"
"""The piece of a graph with types that has the attributes of all of it."""


def nodes_key(number: int) -> str:
    """The piece with the nodes of a type, by its place among the types: names may hold any character."""
    return f"nodes-{number}"


def edges_key(number: int) -> str:
    """The piece with the edges of a relation."""
    return f"edges-{number}"


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
            for name, value in (found.nodes | by_kind(found.others)[0]).items():
                yield f"[{kind!r}].{name}", value
        for relation, graph in self.relations.items():
            for name, value in graph.tensors():
                yield f"{[*relation]}.{name}", value
        for name, value in by_kind(self.others)[0].items():
            yield name, value

    def pieces(self) -> dict[str, GraphInput]:
        """Graphs of one type that files and stores keep: attributes of the whole, nodes by type, edges by relation."""

        def without_edges(size: int, found: Attributes) -> GraphInput:
            edge_index = torch.empty(2, 0, dtype=torch.int64)
            return GraphInput(
                edge_index, size, "edge_index", "remaining", None, self.device, found.nodes, {}, found.others
            )

        found = {WHOLE: without_edges(0, Attributes(others=self.others))}
        for k, (kind, attributes) in enumerate(self.nodes.items()):
            found[nodes_key(k)] = without_edges(self.num_nodes[kind], attributes)
        return found | {edges_key(k): graph for k, graph in enumerate(self.relations.values())}

    @staticmethod
    def of_pieces(kinds: Sequence[str], relations: Sequence[EdgeType], pieces: Mapping[str, GraphInput]) -> HeteroInput:
        """The reverse of :meth:`pieces`."""
        of_nodes = {kind: pieces[nodes_key(k)] for k, kind in enumerate(kinds)}
        return HeteroInput(
            {kind: graph.num_nodes for kind, graph in of_nodes.items()},
            {kind: Attributes(graph.node_attributes, {}, graph.other_attributes) for kind, graph in of_nodes.items()},
            {relation: pieces[edges_key(k)] for k, relation in enumerate(relations)},
            pieces[WHOLE].other_attributes,
            torch.device("cpu"),
        )

    def homogeneous_edge_index(self) -> Tensor:
        """All edges, nodes numbered through all types in their order, as by ``to_homogeneous()``: int64 ``[2, E]``."""
        first, number = {}, 0
        for kind, size in self.num_nodes.items():
            first[kind], number = number, number + size
        pieces = [
            graph.edge_index + torch.tensor([[first[source]], [first[target]]])
            for (source, _, target), graph in self.relations.items()
        ]
        return torch.cat([torch.empty(2, 0, dtype=torch.int64), *pieces], dim=1)


def read_hetero(data: HeteroData, allow_nan: bool, warn: bool) -> HeteroInput:
    """Check ``data`` and sort its attributes. Not collective.

    ``allow_nan``: do not look for NaN features; ``warn``: whether this rank speaks for all.
    """
    if getattr(data, "is_distributed", False):
        raise UnsupportedError("Expected a graph of one process (got one that is distributed already): use it as it is")
    if not data.node_types:
        raise DataError("Expected a HeteroData with nodes (got none): set data['paper'].x, or a num_nodes")
    num_nodes = {kind: _num_nodes(kind, store) for kind, store in data.node_items()}
    nodes = {
        kind: _named(f"data[{kind!r}]", sort_attributes, store.to_dict(), num_nodes[kind], None)
        for kind, store in data.node_items()
    }
    device = _device(data)
    relations = {}
    for relation, store in data.edge_items():
        name = f"data{[*relation]}"
        ends = [relation[0], relation[-1]]
        if any(kind not in num_nodes for kind in ends):
            missing = next(kind for kind in ends if kind not in num_nodes)
            raise DataError(f"Expected nodes of type {missing!r} (got edges {relation} without them): set num_nodes")
        edge_index, key, rule, values = _named(name, read_edges, store)
        for end, kind in enumerate(ends):
            check_ends(edge_index[end], num_nodes[kind], f"{name}.{key} of {kind!r}")
        found = _named(name, sort_attributes, store.to_dict(), None, edge_index.shape[1])
        size = num_nodes[ends[1]]
        relations[relation] = GraphInput(edge_index, size, key, rule, values, device, {}, found.edges, found.others)
    if not allow_nan and warn:
        for kind, attributes in nodes.items():
            warn_of_nan("node", {f"{kind}.{name}": value for name, value in attributes.nodes.items()})
    return HeteroInput(num_nodes, nodes, relations, data._global_store.to_dict(), device)


def _named(what: str, read: Any, *args: object) -> Any:
    """``read(*args)``, whose errors say of which type it is."""
    try:
        return read(*args)
    except (DataError, UnsupportedError) as error:
        raise type(error)(f"{what}: {error.message}") from None


def _num_nodes(kind: str, store: Any) -> int:
    if not store.can_infer_num_nodes:
        raise DataError(f"Expected the number of nodes of type {kind!r} (got no x): set data[{kind!r}].num_nodes")
    declared, x = store.get("num_nodes"), store.get("x")
    if declared is not None and isinstance(x, Tensor) and x.shape[0] != declared:
        raise DataError(f"Expected {declared} rows of x for the nodes of type {kind!r} (got {x.shape[0]}): one a node")
    return int(store.num_nodes)


def _device(data: HeteroData) -> torch.device:
    tensors = [store.get("x") for store in data.node_stores] + [store.get("edge_index") for store in data.edge_stores]
    return next((x.device for x in tensors if isinstance(x, Tensor)), torch.device("cpu"))
