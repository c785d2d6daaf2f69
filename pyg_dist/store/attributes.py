"""Whether an attribute belongs to nodes, to edges or to the whole graph: PyG's rules, in memory and in every format.

Names, dtypes and shapes decide, so the attributes of a file that is read in pieces are tensors on the device ``meta``.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.typing import SparseTensor

from pyg_dist.errors import DataError, PygDistError, UnsupportedError

GRAPH_KEYS = ("edge_index", "adj_t")
_RESERVED = ("graph", "plan", "traffic")  # attributes that every DistributedData has itself


@dataclass(frozen=True)
class Attributes:
    """The attributes of a graph, or of one of its types, in the order of the ``Data``."""

    nodes: dict[str, Tensor] = field(default_factory=dict)  # tensors ``[N, ...]`` by name
    edges: dict[str, Tensor] = field(default_factory=dict)  # tensors ``[E, ...]`` by name
    others: dict[str, object] = field(default_factory=dict)  # everything else


@contextmanager
def errors_of(what: object) -> Iterator[None]:
    """Context whose errors begin with ``what``: a file, a type of nodes."""
    try:
        yield
    except PygDistError as error:
        raise type(error)(f"{what}: {error.message}") from error.__cause__


def num_nodes_of(data: Data, largest: Callable[[], int], is_strict: bool = True) -> int:
    """N, as ``data.num_nodes`` has it.

    ``largest`` gives the largest id in ``edge_index``, -1 without edges; it is called where nothing else says N.
    """
    x, declared = data.get("x"), data._store.get("num_nodes")
    if isinstance(x, Tensor) and x.dim() > 0:
        if declared is None or declared == x.shape[0]:
            return int(x.shape[0])
        if is_strict:
            raise DataError(f"Expected 'x' to have num_nodes={declared} rows (got {x.shape[0]}): one row per node")
    without_ids = copy.copy(data)
    for key in ("edge_index", "face"):  # of both PyG would take the largest id
        if not isinstance(without_ids.get(key), EdgeIndex):
            del without_ids[key]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyG warns where it has to guess
        found = without_ids.num_nodes
    return largest() + 1 if found is None else int(found)


def sort_attributes(
    given: Mapping[str, object], num_nodes: int | None, num_edges: int | None, is_strict: bool = True
) -> Attributes:
    """Sort attributes into those of nodes, those of edges and others.

    ``num_nodes=None``: they are a relation's; ``num_edges=None``: they are those of a type of nodes. Unless
    ``is_strict``, an attribute that does not fit is left out, with a warning.
    """
    found = Attributes()
    for name, value in given.items():
        if name in GRAPH_KEYS or name == "num_nodes":
            continue
        try:
            kind = _kind_of(name, value, num_nodes, num_edges)
        except (DataError, UnsupportedError) as error:
            if is_strict:
                raise
            warnings.warn(f"'{name}' is left out: {error}", stacklevel=2)
            continue
        if kind is None or not isinstance(value, Tensor):
            found.others[name] = value
        else:
            (found.nodes if kind == "node" else found.edges)[name] = value
    return found


def dense_and_plain(others: Mapping[str, object]) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Split attributes without rows into dense tensors and all others."""
    tensors = {name: v for name, v in others.items() if isinstance(v, Tensor) and v.layout == torch.strided}
    return tensors, {name: value for name, value in others.items() if name not in tensors}


def _kind_of(name: str, value: object, num_nodes: int | None, num_edges: int | None) -> Literal["node", "edge"] | None:
    if name in _RESERVED:
        raise DataError(f"Expected no attribute '{name}', which every DistributedData has: rename the data's")
    if isinstance(value, SparseTensor) or (isinstance(value, Tensor) and value.layout != torch.strided):
        if name != "x" and (value.size(0), value.size(1)) == (num_nodes, num_nodes):
            return None  # further edges
        raise UnsupportedError(f"Expected '{name}' to be a dense tensor (got a sparse one): use .to_dense()")
    if not isinstance(value, Tensor) or value.dim() == 0:
        return None
    return belongs_to(name, value, num_nodes, num_edges)


def belongs_to(
    name: str, value: Tensor, num_nodes: int | None, num_edges: int | None
) -> Literal["node", "edge"] | None:
    """Whether ``value`` has a row for each node, or for each edge; ``None``: neither, it is the same on every rank.

    By its number of rows, and by its name where both numbers fit: PyG's ``is_node_attr`` and ``is_edge_attr``. An
    attribute with "index" in its name holds ids. For sizes of ``None`` see :func:`sort_attributes`.
    """
    size = value.shape[0]
    of_nodes, of_edges = (
        {} if number is None else {number: f"{number} rows, one per {kind}"}
        for kind, number in (("node", num_nodes), ("edge", num_edges))
    )
    named = {"x": of_nodes, "edge_attr": of_edges, "edge_weight": of_edges}
    allowed = named.get(name, of_nodes | of_edges if name.endswith("mask") else None)
    if allowed and size not in allowed:
        raise DataError(
            f"Expected '{name}' to have {', or '.join(allowed.values())} (got shape {list(value.shape)}): "
            f"rebuild it for this graph"
        )
    if "index" in name or name == "ptr":  # of a batch: where its graphs begin
        return None
    if size == num_edges and ("edge" in name or num_edges != num_nodes):
        return "edge"
    return "node" if size == num_nodes else None


@dataclass(frozen=True)
class NanCount:
    """How much of an attribute is NaN."""

    entries: int = 0  # numbers that are NaN
    rows: int = 0  # nodes, or edges, with one
    first: int = -1  # the global id of the first of these; -1 if there is none

    @staticmethod
    def of(values: Tensor, first_row: int = 0) -> NanCount:
        """Count in rows, the first of which has the global id ``first_row``. Not collective."""
        # A sum makes no temporary of its size, and is NaN where anything is.
        if not (values.is_floating_point() and values.numel() and values.detach().sum().isnan()):
            return NanCount()
        by_row = values.detach().reshape(len(values), -1).isnan().sum(1)
        rows = by_row.nonzero()
        if not len(rows):  # two infinities
            return NanCount()
        return NanCount(int(by_row.sum()), len(rows), int(rows[0]) + first_row)

    def __add__(self, other: NanCount) -> NanCount:
        """Both together, where ``other`` comes after this one."""
        first = self.first if self.rows else other.first
        return NanCount(self.entries + other.entries, self.rows + other.rows, first)

    def warning(self, name: str, kind: str, size: int) -> str:
        """A line about the attribute ``name`` of ``size`` nodes or edges, as ``kind`` says."""
        return (
            f"'{name}' is NaN at {self.rows} of {size} {kind}s, the first one {kind} {self.first} (entries: "
            f"{self.entries}): NaN spreads over the graph; fill these in, or pass allow_nan=True"
        )
