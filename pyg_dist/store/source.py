"""The interface of an input: chunks of edges in the input's order, and rows of attributes."""

from __future__ import annotations

import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch_geometric.typing import SparseTensor

from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import TensorSpec, is_storable


@dataclass(frozen=True)
class NodeAttribute:
    """An attribute with a row per node.

    Attributes:
        name: in the ``Data``.
        dtype: as safetensors calls it.
        shape: of a row.
        rows: pieces of consecutive rows, from the first to the last, of at most so many bytes; each call begins anew.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: Callable[[int], Iterator[Array]]


@dataclass(frozen=True)
class EdgeAttribute:
    """An attribute with a row per edge, which comes with the edges."""

    name: str  # in the ``Data``
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...] = ()  # of a row


EDGE_WEIGHT = EdgeAttribute("edge_weight", "F32")


@dataclass(frozen=True)
class EdgeChunk:
    """Consecutive edges."""

    source: Array  # integers ``[k]``
    target: Array  # integers ``[k]``
    attributes: dict[str, Array]  # rows by name, ``[k, ...]``
    place: Callable[[int], str]  # where in the input an edge stands, in words: ``"edges.txt, line 17"``

    def mirrored(self, sign: int = 1) -> EdgeChunk:
        """Each edge, and its mirror image behind it, whose attributes are ``sign`` times its own; loops stand once."""
        entry = np.repeat(np.arange(len(self.source)), 1 + (self.source != self.target))
        is_image = np.zeros(len(entry), bool)
        is_image[1:] = entry[1:] == entry[:-1]
        source = np.where(is_image, self.target[entry], self.source[entry])
        target = np.where(is_image, self.source[entry], self.target[entry])
        rows = {
            name: np.where(is_image, sign, 1).astype(values.dtype) * values[entry]
            for name, values in self.attributes.items()
        }
        return EdgeChunk(source, target, rows, lambda place: self.place(int(entry[place])))


@dataclass(frozen=True)
class SourceInfo:
    """What is known of an input before its edges are read.

    Attributes:
        files: what it is read from.
        num_nodes: N; None: the largest id plus one.
        num_edges: E, where the input says so.
        nodes: attributes with a row per node.
        edges: attributes with a row per edge.
        other: attributes that are neither and that JSON has.
        other_tensors: tensors that are neither: type and shape, and how to read them.
        stands_once: whether each edge stands for both directions.
        graph: how a script sees the edges, see :class:`~pyg_dist.store.manifest.Manifest`.
    """

    files: tuple[Path, ...]
    num_nodes: int | None
    num_edges: int | None
    nodes: tuple[NodeAttribute, ...] = ()
    edges: tuple[EdgeAttribute, ...] = ()
    other: dict[str, Any] = field(default_factory=dict)
    other_tensors: Mapping[str, tuple[TensorSpec, Callable[[], Array]]] = field(default_factory=dict)
    stands_once: bool = False
    graph: dict[str, Any] = field(default_factory=lambda: {"key": "edge_index", "loop_rule": "remaining"})


@dataclass(frozen=True)
class Reading:
    """How to read an input.

    Attributes:
        columns: what the columns of a table are: source, target, weight, or anything else for one that is left out;
            None: as the file says.
        first_id: of nodes; None: as the format has it, 0 in most.
        is_strict: raise where an attribute does not fit the graph; else it is left out, with a warning.
    """

    columns: tuple[str, ...] | None = None
    first_id: int | None = None
    is_strict: bool = True


class Source(ABC):
    """An input graph. Nothing of it is unpickled. Whatever is wrong in it is a DataError that names file and line.

    Attributes:
        path: the file or folder.
        name: for people.
        reading: how it is read.
        understood: what the file was taken for, in words, where it does not say so itself.
        num_nodes, num_edges, is_weighted, stands_once: of :meth:`info`, for files of edges and weights alone.
    """

    understood: str = ""
    num_nodes: int | None = None
    num_edges: int | None = None
    is_weighted = False
    stands_once = False

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Read how the input begins."""

    def info(self) -> SourceInfo:
        """What is known before the edges are read."""
        edges = (EDGE_WEIGHT,) if self.is_weighted else ()
        return SourceInfo((self.path,), self.num_nodes, self.num_edges, edges=edges, stands_once=self.stands_once)

    @abstractmethod
    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The edges in their order, about ``size`` at a time; each call begins anew."""


def tensors_info(
    path: Path, num_nodes: int, num_edges: int | None, nodes: Mapping[str, TensorSpec], edges: Mapping[str, TensorSpec],
    rows: Callable[[str], Callable[[int], Iterator[Array]]], **more: Any,
) -> SourceInfo:  # fmt: skip
    """The info of a file of tensors, from those of nodes and of edges, and what reads the rows of one of nodes."""
    of_nodes = tuple(NodeAttribute(name, spec.dtype, spec.shape[1:], rows(name)) for name, spec in nodes.items())
    of_edges = tuple(EdgeAttribute(name, spec.dtype, spec.shape[1:]) for name, spec in edges.items())
    return SourceInfo((path,), num_nodes, num_edges, of_nodes, of_edges, **more)


def fixed_rows(array: Array) -> Callable[[int], Iterator[Array]]:
    """The rows of an array in memory, for :attr:`NodeAttribute.rows`."""

    def rows(num_bytes: int) -> Iterator[Array]:
        row_bytes = max(array.itemsize * int(np.prod(array.shape[1:])), 1)
        step = max(1, num_bytes // row_bytes)
        for low in range(0, len(array), step):
            yield array[low : low + step]

    return rows


def storable(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes that a store can hold: tensors, and what JSON has. Others are left out, with a warning."""
    kept = {}
    for name, value in given.items():
        is_kept = is_storable(value.dtype) if isinstance(value, Tensor) else is_plain(value)
        if is_kept or isinstance(value, SparseTensor):
            kept[name] = value
            continue
        what = (
            value.dtype if isinstance(value, Tensor) else value if isinstance(value, np.dtype) else type(value).__name__
        )
        warnings.warn(f"'{name}' of {path} is left out: a store has no {what}", stacklevel=2)
    return kept


def edge_place(path: Path, low: int) -> Callable[[int], str]:
    """For :attr:`EdgeChunk.place` of files that have no lines."""
    return lambda place: f"{path}, edge {low + place}"


def is_plain(value: object) -> bool:
    """Whether JSON keeps a value as it is."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
