"""Hyperedges, each of any number of nodes, taken out of a ``Data`` with their attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.data.hypergraph_data import HyperGraphData

from pyg_dist.backend import host
from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import as_edges, check_ends
from pyg_dist.store.attributes import GRAPH_KEYS, errors_of, num_nodes_of

KEY = "hyperedge_index"
"""Where a ``Data`` has the incidence of its hyperedges; a ``HyperGraphData`` has it in ``edge_index``."""


@dataclass(frozen=True)
class HyperedgeSizes:
    """The sizes that decide whether an attribute belongs to hyperedges. ``num_edges`` counts the ordinary edges."""

    num_nodes: int
    num_edges: int
    num_hyperedges: int
    num_incidences: int

    def kind_of(self, name: str, value: object, prefix: str = "hyperedge") -> Literal["hyperedge", "incidence"] | None:
        """Whether ``value`` has a row for each hyperedge, or for each of their nodes; ``None``: neither.

        By its number of rows, and by its name, which has ``prefix``, where nodes or edges are as many.
        """
        if not isinstance(value, Tensor) or value.dim() == 0 or "index" in name or name == "ptr":
            return None
        size = value.shape[0]
        if size in (self.num_nodes, self.num_edges) and prefix not in name:
            return None
        if size == self.num_hyperedges:
            return "hyperedge"
        return "incidence" if size == self.num_incidences else None


@dataclass(frozen=True)
class Hyperedges:
    """The hyperedges of a checked input graph, the same on every rank."""

    key: str  # where the script has the incidence
    incidence: Tensor  # int64 ``[2, K]``: a node of a hyperedge, and the hyperedge
    size: int  # how many, M
    attributes: dict[str, Tensor]  # tensors ``[M, ...]`` by name
    values: dict[str, Tensor]  # tensors ``[K, ...]`` by name

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Everything that must be equal on all ranks, by name."""
        yield self.key, self.incidence
        yield from self.attributes.items()
        yield from self.values.items()


def take_hyperedges(data: object) -> tuple[object, Hyperedges | None]:
    """``data`` without its hyperedges, and the hyperedges; ``data`` itself and ``None`` where it has none.

    Raises:
        DataError: The incidence is none, or names more hyperedges than there are.
    """
    key, prefix = ("edge_index", "edge") if isinstance(data, HyperGraphData) else (KEY, "hyperedge")
    if not isinstance(data, Data) or data.get(key) is None:
        return data, None
    given = data.to_dict()
    with errors_of(f"data.{key}"):
        incidence = as_edges(given.pop(key))
    rest = Data.from_dict(given)
    largest = int(incidence[0].max()) if incidence.numel() else -1
    rest.num_nodes = num_nodes_of(rest, lambda: largest)
    if all(rest.get(key) is None for key in GRAPH_KEYS):
        rest.edge_index = torch.empty(2, 0, dtype=torch.int64, device=data[key].device)
    size = _how_many(incidence, given, prefix)
    check_ends(incidence[0], rest.num_nodes, f"{key}[0]")
    check_ends(incidence[1], size, f"{key}[1]")
    sizes = HyperedgeSizes(rest.num_nodes, rest.num_edges, size, incidence.shape[1])
    attributes, values = dict[str, Tensor](), dict[str, Tensor]()
    for name, value in given.items():
        kind = sizes.kind_of(name, value, prefix)
        if kind is not None:
            (attributes if kind == "hyperedge" else values)[name] = value
            del rest[name]
    return rest, Hyperedges(key, incidence, size, attributes, values)


def _how_many(incidence: Tensor, given: dict[str, object], prefix: str) -> int:
    """The number of hyperedges: as declared, else rows of their features or weights, else the largest number plus one.

    Raises:
        DataError: These contradict each other.
    """
    least = int(incidence[1].max()) + 1 if incidence.numel() else 0
    named = {name: given.get(f"{prefix}_{name}") for name in ("attr", "weight")}
    sizes = {f"{prefix}_{name}": len(value) for name, value in named.items() if isinstance(value, Tensor)}
    declared = given.get("num_hyperedges")
    if isinstance(declared, int):
        sizes = {"num_hyperedges": declared, **sizes}
    for name, size in sizes.items():
        if size < least or size != next(iter(sizes.values())):
            raise DataError(
                f"Expected hyperedges as '{next(iter(sizes))}' has them, at least {least} (got {size} of '{name}'): "
                f"one row per hyperedge"
            )
    return next(iter(sizes.values()), least)


def edges_with_hyperedges(edge_index: Tensor, num_nodes: int, hyperedges: Hyperedges) -> Tensor:
    """Edges, and those between nodes and hyperedges, both ways, numbered after all nodes: ``[2, E + 2K]``."""
    incidence = hyperedges.incidence + host.tensor([[0], [num_nodes]])
    return torch.cat([edge_index, incidence, incidence.flip(0)], dim=1)
