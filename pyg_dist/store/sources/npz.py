"""Graphs in ``.npz`` files: the attributes of a ``Data`` as arrays, read in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_dist.errors import DataError, PygDistError
from pyg_dist.store.attributes import num_nodes_of, sort_attributes
from pyg_dist.store.format import TensorSpec, dtype_name, torch_dtype
from pyg_dist.store.source import (
    EdgeAttribute,
    EdgeChunk,
    NodeAttribute,
    Reading,
    Source,
    SourceInfo,
    edge_place,
    fixed_rows,
    storable,
)
from pyg_dist.store.sources.npz_member import Member, members

Array = np.ndarray[Any, Any]

_SPARSE = ("x_indptr", "x_indices", "x_data", "x_shape")
_KNOWN = ("num_nodes", "edge_index", "undirected", *_SPARSE)
_PIECE = 1 << 24


class Npz(Source):
    """One graph: ``edge_index`` and what else a ``Data`` has, by the same names; types are kept.

    Features in CSR form (``x_indptr``, ``x_indices``, ``x_shape``, and ``x_data`` unless all are one) are made dense
    row by row. ``undirected`` says whether each edge stands for both directions; where a file says so, whole numbers
    become int64, since such files keep labels in few bytes. Masks ``[K, N]`` of several splits become ``[N, K]``.
    """

    def __init__(self, path: Path, reading: Reading) -> None:
        self.path, self.name, self.reading = path, path.name, reading
        self.members = members(path)
        if "edge_index" not in self.members:
            raise DataError(f"Expected edge_index [2, E] in {path} (got {', '.join(self.members)}): add it")
        self.edges = self.members["edge_index"]
        if len(self.edges.shape) != 2 or self.edges.shape[0] != 2 or self.edges.dtype.kind not in "iu":
            raise DataError(
                f"Expected integers [2, E] as 'edge_index' in {path} (got {self.edges.dtype} {list(self.edges.shape)}"
                f"): transpose or cast them"
            )
        self.num_edges = self.edges.shape[1]
        self.is_compact = "undirected" in self.members
        self.stands_once = self.is_compact and bool(self.members["undirected"].array().all())
        data = Data(**storable(path, self._attributes()))
        try:
            self.num_nodes = num_nodes_of(data, self._largest, reading.is_strict)
            masks = {name: mask for name in self.members if (mask := self._turned_mask(name)) is not None}
            data.update({name: _meta(mask.shape, mask.dtype) for name, mask in masks.items()})
            self.attributes = sort_attributes(data.to_dict(), self.num_nodes, self.num_edges, reading.is_strict)
        except PygDistError as error:
            raise type(error)(f"{path}: {error}") from error
        self.masks = masks

    def _attributes(self) -> dict[str, Any]:
        """What the file has, arrays without their content."""
        found: dict[str, Any] = {}
        if "num_nodes" in self.members:
            count = self.members["num_nodes"]
            if count.dtype.kind not in "iu" or int(np.prod(count.shape)) != 1 or int(count.array().item()) < 0:
                raise DataError(
                    f"Expected one number of nodes as 'num_nodes' in {self.path} (got others): save an integer"
                )
            found["num_nodes"] = int(count.array().item())
        if "x_indptr" in self.members:
            found["x"] = _meta(self._sparse_shape(), self._dense_dtype())
        for name, member in self.members.items():
            if name in _KNOWN:
                continue
            if member.dtype.kind in "US":  # text
                found[name] = member.array().tolist()
            else:
                found[name] = _meta(member.shape, self._stored(member))
        return found

    def _stored(self, member: Member) -> np.dtype[Any]:
        """The type that a member is kept in: this machine's order of bytes."""
        is_widened = self.is_compact and member.dtype.kind in "iu"
        return np.dtype(np.int64) if is_widened else member.dtype.newbyteorder("=")

    def _largest(self) -> int:
        return max((int(piece.max()) for piece in self.edges.pieces(_PIECE) if piece.size), default=-1)

    def _turned_mask(self, name: str) -> Array | None:
        member = self.members.get(name)
        if member is None or not name.endswith("mask") or len(member.shape) != 2:
            return None
        if member.shape[0] == self.num_nodes or member.shape[1] != self.num_nodes:
            return None
        return np.ascontiguousarray(member.array().T)

    def info(self) -> SourceInfo:
        """Sizes and attributes; content stays in the file."""
        found = self.attributes
        nodes = (
            NodeAttribute(name, dtype_name(t.dtype), tuple(t.shape[1:]), self._node_rows(name))
            for name, t in found.nodes.items()
        )
        edges = (EdgeAttribute(name, dtype_name(t.dtype), tuple(t.shape[1:])) for name, t in found.edges.items())
        others = {
            name: (TensorSpec(dtype_name(t.dtype), tuple(t.shape)), partial(self._whole, name))
            for name, t in found.others.items()
            if isinstance(t, torch.Tensor)
        }
        plain = {name: value for name, value in found.others.items() if name not in others}
        return SourceInfo(
            (self.path,), self.num_nodes, None if self.stands_once else self.num_edges, tuple(nodes), tuple(edges),
            plain, others, self.stands_once,
        )  # fmt: skip

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """Sources and targets lie one after the other: two streams."""
        more = {name: self._rows(name)(size * max(self.members[name].row_bytes, 1)) for name in self.attributes.edges}
        low = 0
        for source, target in edge_columns(self.edges, size):
            attributes = {name: next(rows) for name, rows in more.items()}
            yield EdgeChunk(source, target, attributes, edge_place(self.path, low))
            low += len(source)

    def _node_rows(self, name: str) -> Callable[[int], Iterator[Array]]:
        if name in self.masks:
            return fixed_rows(self.masks[name])
        return self._dense_rows if name not in self.members else self._rows(name)

    def _rows(self, name: str) -> Callable[[int], Iterator[Array]]:
        member = self.members[name]
        dtype = self._stored(member)
        return lambda num_bytes: (piece.astype(dtype, copy=False) for piece in member.pieces(num_bytes))

    def _whole(self, name: str) -> Array:
        member = self.members[name]
        return np.asarray(member.array(), self._stored(member))

    def _sparse_shape(self) -> tuple[int, int]:
        missing = {"x_indices", "x_shape"} - self.members.keys()
        if missing or self.members["x_shape"].shape != (2,):
            raise DataError(
                f"Expected x_indptr, x_indices and x_shape [2] in {self.path} (got no such "
                f"{min(missing, default='x_shape')}): save CSR features whole"
            )
        start, (height, width) = self.members["x_indptr"].array(), self.members["x_shape"].array().tolist()
        lengths = {self.members[name].shape for name in ("x_indices", "x_data") if name in self.members}
        is_whole = start.shape == (height + 1,) and start[0] == 0 and lengths == {(int(start[-1]),)}
        if not is_whole or (np.diff(start.astype(np.int64)) < 0).any():
            raise DataError(f"Expected CSR features of {height} rows in {self.path} (got others): check x_indptr")
        return height, width

    def _dense_dtype(self) -> np.dtype[Any]:
        values = self.members.get("x_data")
        return np.dtype(np.float32) if values is None or values.dtype.kind != "f" else self._stored(values)

    def _dense_rows(self, num_bytes: int) -> Iterator[Array]:
        start, (height, width) = self.members["x_indptr"].array(), self.members["x_shape"].array().tolist()
        count: Array = np.diff(start.astype(np.int64))
        column, value = self.members["x_indices"].array(), self.members.get("x_data")
        values = None if value is None else value.array()
        dtype = self._dense_dtype()
        step = max(1, num_bytes // max(dtype.itemsize * width, 1))
        for low in range(0, height, step):
            high = min(low + step, height)
            first, last = int(start[low]), int(start[high])
            row = np.repeat(np.arange(high - low), count[low:high])
            dense = np.zeros((high - low, width), dtype)
            here = column[first:last]
            if here.size and not 0 <= int(here.min()) <= int(here.max()) < width:
                raise DataError(
                    f"Expected columns in [0, {width}) in 'x_indices' of {self.path} (got others): check it"
                )
            np.add.at(dense, (row, here), 1 if values is None else values[first:last])
            yield dense


def edge_columns(edges: Member, size: int) -> Iterator[tuple[Array, Array]]:
    """Sources and targets of ``size`` edges at a time, from an array ``[2, E]``."""
    if edges.is_fortran:  # pairs
        pairs = Member(edges.path, edges.name, edges.dtype, edges.shape[::-1], False)
        yield from ((piece[:, 0], piece[:, 1]) for piece in pairs.pieces(size * pairs.row_bytes))
        return
    count, num_bytes = edges.shape[1], size * edges.dtype.itemsize
    both = Member(edges.path, edges.name, edges.dtype, (2 * count,), False)
    first = Member(edges.path, edges.name, edges.dtype, (count,), False)
    yield from zip(first.pieces(num_bytes), both.pieces(num_bytes, count), strict=True)


def _meta(shape: tuple[int, ...], dtype: np.dtype[Any]) -> torch.Tensor | np.dtype[Any]:
    """A tensor without content; of a type that a store lacks, the type."""
    try:
        return torch.empty(shape, dtype=torch_dtype(dtype), device="meta")
    except DataError:
        return dtype
