"""The interface of an input graph: facts that are known before its edges are read, and its edges in chunks."""

from __future__ import annotations

import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.typing import SparseTensor

from pyg_dist.errors import DataError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import TensorSpec, is_storable, of_rows, slices
from pyg_dist.store.manifest import GraphForm

ReadRows = Callable[[int], Iterator[Array]]
"""Pieces of consecutive rows, from the first to the last, of at most so many bytes; each call begins anew."""
_BLOCK = 1 << 22


def with_edges(num_bytes: int) -> Iterator[Array]:
    """Stands for the reader of an edge attribute whose rows come with the edges, in :class:`EdgeChunk`."""
    return iter(())


@dataclass(frozen=True)
class Attribute:
    """An attribute with a row per node, or per edge."""

    name: str  # in the ``Data``
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...] = ()  # of a row
    rows: ReadRows = with_edges


EDGE_WEIGHT = Attribute("edge_weight", "F32")


@dataclass(frozen=True)
class EdgeChunk:
    """Consecutive edges."""

    source: Array  # integers ``[k]``
    target: Array  # integers ``[k]``
    attributes: dict[str, Array]  # rows by name, ``[k, ...]``
    place: Callable[[int], str]  # says where in the input an edge stands: ``"edges.txt, line 17"``

    def mirrored(self, sign: int = 1) -> EdgeChunk:
        """Each edge followed by its reverse, whose attributes are ``sign`` times its own; loops come once."""
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


ReadEdges = Callable[[int], Iterator[EdgeChunk]]
"""Edges in their order, about so many at a time, with the attributes that come with them; each call begins anew."""


@dataclass(frozen=True)
class Reading:
    """How an input is read, where its format leaves it open."""

    # the columns of a table of edges: ``"source"``, ``"target"``, ``"weight"``, or any other word for one that is left
    # out; None: as the file says
    columns: tuple[str, ...] | None = None
    first_id: int | None = None  # the number of the first node in a table of edges; None: 0, but in KONECT's files 1
    is_strict: bool = True  # whether a wrong attribute is an error; else it is left out, with a warning


AS_IT_IS = Reading()


@dataclass(eq=False)
class Source:
    """An input graph. Nothing of it is unpickled. Wrong content raises a DataError that names file and line."""

    path: Path  # the file or folder
    reading: Reading = AS_IT_IS  # how it is read
    files: tuple[Path, ...] = ()  # the files that it is read from
    num_nodes: int | None = None  # N; None: the largest id plus one
    num_edges: int | None = None  # E, where the input says so
    nodes: tuple[Attribute, ...] = ()  # attributes with a row per node
    edges: tuple[Attribute, ...] = ()  # attributes with a row per edge
    read_ends: ReadEdges = lambda size: iter(())
    other: Mapping[str, object] = field(default_factory=dict)  # attributes that are neither and that JSON has
    # tensors that are neither: type and shape, and how to read them
    other_tensors: Mapping[str, tuple[TensorSpec, Callable[[], Array]]] = field(default_factory=dict)
    graph: GraphForm = field(default=GraphForm("edge_index", "remaining"))  # how a script sees the edges
    understood: str = ""  # how the file was understood, in words, where its format leaves that open
    needs_reverse: bool = False  # whether each edge stands for both directions
    first_target: int = 0  # the number of the first target; 0 but for edges between two types

    @property
    def name(self) -> str:
        """For people."""
        return self.path.name

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        """:attr:`read_ends`."""
        return self.read_ends(size)

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The edges with all attributes, also those whose rows do not come with the edges."""
        rows = {a.name: _Stream(a.rows(_BLOCK)) for a in self.edges if a.rows is not with_edges}
        done = 0
        for chunk in self.ends(size):
            count = len(chunk.source)
            found = {name: stream.next(count) for name, stream in rows.items()}
            done += count
            for name, piece in found.items():
                if len(piece) != count:
                    raise self._wrong_rows(name, f"{done - count + len(piece)}")
            yield replace(chunk, attributes=chunk.attributes | found)
        for name, stream in rows.items():
            if len(stream.next(1)):
                raise self._wrong_rows(name, f"more than {done}")

    def _wrong_rows(self, name: str, count: str) -> DataError:
        return DataError(f"Expected a row of '{name}' for each edge in {self.path} (got {count} rows): save both again")


class FileSource(Source, ABC):
    """A source that reads the description of its file when it is made."""

    def __init__(self, path: Path, reading: Reading) -> None:
        super().__init__(path, reading, (path,))
        self.open()

    @abstractmethod
    def open(self) -> None:
        """Read the beginning of the file, and set the attributes of :class:`Source`."""


class _Stream:
    """Rows that come in pieces of any length, and are taken in others."""

    def __init__(self, pieces: Iterator[Array]) -> None:
        self._pieces = pieces
        self._rest: list[Array] = []

    def next(self, count: int) -> Array:
        """The next ``count`` rows; fewer at the end."""
        parts, have = self._rest, sum(map(len, self._rest))
        while (have < count or not parts) and (piece := next(self._pieces, None)) is not None:
            parts.append(piece)
            have += len(piece)
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0)
        self._rest = [whole[count:]]
        return whole[:count]


def attributes_of(specs: Mapping[str, TensorSpec], rows: Callable[[str], ReadRows]) -> tuple[Attribute, ...]:
    """Attributes, by the specs of their tensors and the readers of their rows."""
    return tuple(Attribute(name, spec.dtype, spec.shape[1:], rows(name)) for name, spec in specs.items())


def row_specs(attributes: tuple[Attribute, ...], count: int) -> dict[str, TensorSpec]:
    """The specs of tensors with ``count`` rows of each attribute."""
    return {a.name: of_rows(a.dtype, count, a.shape) for a in attributes}


def array_rows(array: Array) -> ReadRows:
    """The rows of an array in memory."""
    row_bytes = array.itemsize * math.prod(array.shape[1:])
    return lambda num_bytes: (array[piece] for piece in slices(len(array), row_bytes, num_bytes))


def storable(path: Path, given: Mapping[str, object]) -> dict[str, object]:
    """The attributes that a store can hold: tensors, and values that JSON keeps. Others are dropped, with a warning."""
    kept = {}
    for name, value in given.items():
        is_kept = is_storable(value.dtype) if isinstance(value, Tensor) else is_plain(value)
        if is_kept or isinstance(value, SparseTensor):
            kept[name] = value
            continue
        dtype = value.dtype if isinstance(value, Tensor) else value
        what = dtype if isinstance(dtype, (torch.dtype, np.dtype)) else type(value).__name__
        warnings.warn(f"'{name}' of {path} is left out: a store has no {what}", stacklevel=2)
    return kept


def edge_chunks(pieces: Iterator[Array], path: Path) -> Iterator[EdgeChunk]:
    """Chunks of edges without attributes, of ends ``[2, k]`` from a file that has no lines."""
    low = 0
    for source, target in pieces:
        yield EdgeChunk(source, target, {}, edge_place(path, low))
        low += len(source)


def edge_place(path: Path, low: int) -> Callable[[int], str]:
    """:attr:`EdgeChunk.place` for files that have no lines; ``low`` is the number of the chunk's first edge."""
    return lambda place: f"{path}, edge {low + place}"


def is_plain(value: object) -> bool:
    """Whether JSON keeps a value as it is."""
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
