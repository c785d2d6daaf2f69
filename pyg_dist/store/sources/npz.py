"""Graphs in ``.npz`` files: the attributes of a ``Data`` as arrays, streamed from the zip."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_dist.errors import DataError, PygDistError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.attributes import by_kind, num_nodes_of, sort_attributes
from pyg_dist.store.format import spec_of, torch_dtype
from pyg_dist.store.source import EdgeChunk, Source, SourceInfo, edge_place, fixed_rows, storable, tensors_info

_SPARSE = ("x_indptr", "x_indices", "x_data", "x_shape")
_KNOWN = ("num_nodes", "edge_index", "undirected", *_SPARSE)
_PIECE = 1 << 24


class Npz(Source):
    """One graph: ``edge_index`` and what else a ``Data`` has, by the same names; types are kept.

    Features in CSR form (``x_indptr``, ``x_indices``, ``x_shape``, and ``x_data`` unless all are one) are made dense
    row by row. ``undirected`` says whether each edge stands for both directions; where a file says so, whole numbers
    become int64, since such files keep labels in few bytes. Masks ``[K, N]`` of several splits become ``[N, K]``.
    """

    num_nodes: int

    def open(self) -> None:
        """The headers of all arrays."""
        path = self.path
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
        data, is_strict = Data(**storable(path, self._attributes())), self.reading.is_strict
        try:
            self.num_nodes = num_nodes_of(data, self._largest, is_strict)
            masks = {name: mask for name in self.members if (mask := self._turned_mask(name)) is not None}
            data.update({name: _meta(mask.shape, mask.dtype) for name, mask in masks.items()})
            self.attributes = sort_attributes(data.to_dict(), self.num_nodes, self.num_edges, is_strict)
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
        nodes, edges = ({name: spec_of(t) for name, t in given.items()} for given in (found.nodes, found.edges))
        tensors, plain = by_kind(found.others)
        return tensors_info(
            self.path, self.num_nodes, None if self.stands_once else self.num_edges, nodes, edges, self._node_rows,
            other=plain, other_tensors={name: (spec_of(t), partial(self._whole, name)) for name, t in tensors.items()},
            stands_once=self.stands_once,
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


_COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Member:
    """One array."""

    path: Path  # the ``.npz`` file
    name: str  # of the array
    dtype: np.dtype[Any]  # its type
    shape: tuple[int, ...]  # its shape
    is_fortran: bool  # whether its first index runs fastest

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    def pieces(self, num_bytes: int, first: int = 0) -> Iterator[Array]:
        """Consecutive rows from row ``first`` on, about ``num_bytes`` at a time."""
        if self.is_fortran and len(self.shape) > 1:
            yield from self._turned(num_bytes, first)
            return
        step = max(1, num_bytes // max(self.row_bytes, 1))
        with _reading(self.path), zipfile.ZipFile(self.path) as archive, _stream(archive, self.name) as (stream, *_):
            stream.seek(first * self.row_bytes, os.SEEK_CUR)
            for low in range(first, self.shape[0], step):
                yield self._read(stream, min(step, self.shape[0] - low))

    def _turned(self, num_bytes: int, first: int) -> Iterator[Array]:
        """Rows of an array whose columns lie one after another: it is unpacked to a temporary file first."""
        with tempfile.TemporaryFile() as file:
            with (
                _reading(self.path),
                zipfile.ZipFile(self.path) as archive,
                _stream(archive, self.name) as (stream, *_),
            ):
                shutil.copyfileobj(stream, file, _COPY_BYTES)
            file.flush()
            step = max(1, num_bytes // max(self.row_bytes, 1))
            for low in range(first, self.shape[0], step):  # mapped anew for each piece: pages are let go
                whole = np.memmap(file, self.dtype, "r", shape=self.shape, order="F")
                yield np.ascontiguousarray(whole[low : low + step])
                del whole

    def _read(self, stream: IO[bytes], count: int) -> Array:
        content = stream.read(count * self.row_bytes)
        if len(content) != count * self.row_bytes:
            raise DataError(f"Expected all of '{self.name}' in {self.path} (it breaks off): fetch it again")
        return np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])

    def array(self) -> Array:
        """All of it, in memory."""
        with _reading(self.path), np.load(self.path, allow_pickle=False) as file:
            whole: Array = file[self.name]
        return whole


def members(path: Path) -> dict[str, Member]:
    """The arrays of a file by name; only their headers are read."""
    found = {}
    with _reading(path), zipfile.ZipFile(path) as archive:
        for entry in archive.namelist():
            name = entry.removesuffix(".npy")
            with _stream(archive, name) as (_, shape, is_fortran, dtype):
                if dtype.hasobject:
                    raise DataError(
                        f"Expected numbers as '{name}' in {path} (got Python objects): they are not unpickled"
                    )
                found[name] = Member(path, name, dtype, shape, is_fortran)
    return found


@contextmanager
def _stream(archive: zipfile.ZipFile, name: str) -> Iterator[tuple[IO[bytes], tuple[int, ...], bool, np.dtype[Any]]]:
    with archive.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        yield stream, *read(stream)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"Expected a file in {path} (there is none): check the name") from error
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, OSError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"Expected an .npz file in {path} (got: {error}): fetch it again") from error
