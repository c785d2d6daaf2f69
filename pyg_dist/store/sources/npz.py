"""Graphs in ``.npz`` files: the attributes of a ``Data`` as arrays, streamed from the zip."""

from __future__ import annotations

import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch_geometric.data import Data

from pyg_dist.errors import DataError, refusing
from pyg_dist.partition.inputs import Array
from pyg_dist.store.attributes import dense_and_plain, errors_of, num_nodes_of, sort_attributes
from pyg_dist.store.format import dtype_name, slices, spec_of, torch_dtype
from pyg_dist.store.source import EdgeChunk, FileSource, ReadRows, array_rows, attributes_of, edge_chunks, storable

_SPARSE = ("x_indptr", "x_indices", "x_data", "x_shape")
_KNOWN = ("num_nodes", "edge_index", "undirected", *_SPARSE)
_PIECE = 1 << 24


class Npz(FileSource):
    """One graph: ``edge_index`` and the other attributes of a ``Data``, by the same names; dtypes are kept.

    Features in CSR form (``x_indptr``, ``x_indices``, ``x_shape``, and ``x_data`` unless all are one) are made dense
    row by row. ``undirected`` says whether each edge stands for both directions; in a file that has it, integers become
    int64, since such files keep labels in few bytes. Masks ``[K, N]`` of several splits become ``[N, K]``.
    """

    num_nodes: int

    def open(self) -> None:
        path, is_strict = self.path, self.reading.is_strict
        self.members = members(path)
        if "edge_index" not in self.members:
            raise DataError(f"Expected edge_index [2, E] in {path} (got {', '.join(self.members)}): add it")
        self.edge_index = edge_member(self.members["edge_index"])
        num_edges = self.edge_index.shape[1]
        self.is_compact = "undirected" in self.members
        self.needs_reverse = self.is_compact and bool(self.members["undirected"].array().all())
        self.num_edges = None if self.needs_reverse else num_edges
        data = Data(**storable(path, self._attributes()))
        with errors_of(path):
            self.num_nodes = num_nodes_of(data, self._largest, is_strict)
            masks = {name: mask for name in self.members if (mask := self._turned_mask(name)) is not None}
            data.update({name: _meta(mask.shape, mask.dtype) for name, mask in masks.items()})
            found = sort_attributes(data.to_dict(), self.num_nodes, num_edges, is_strict)

        def rows(name: str) -> ReadRows:
            if name in masks:
                return array_rows(masks[name])
            return partial(self._rows, name) if name in self.members else self._dense_rows

        of_nodes, of_edges = ({name: spec_of(t) for name, t in kind.items()} for kind in (found.nodes, found.edges))
        self.nodes, self.edges = attributes_of(of_nodes, rows), attributes_of(of_edges, rows)
        tensors, self.other = dense_and_plain(found.others)
        self.other_tensors = {name: (spec_of(t), partial(self._whole, name)) for name, t in tensors.items()}

    def _attributes(self) -> dict[str, object]:
        found: dict[str, object] = {}
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
            if name not in _KNOWN:
                is_text = member.dtype.kind in "US"
                found[name] = member.array().tolist() if is_text else _meta(member.shape, self._stored(member))
        return found

    def _stored(self, member: Member) -> np.dtype[np.generic]:
        """The dtype that a member gets, in this machine's byte order."""
        is_widened = self.is_compact and member.dtype.kind in "iu"
        return np.dtype(np.int64) if is_widened else member.dtype.newbyteorder("=")

    def _largest(self) -> int:
        return max((int(piece.max()) for piece in self.edge_index.pieces(_PIECE) if piece.size), default=-1)

    def _turned_mask(self, name: str) -> Array | None:
        """A mask ``[K, N]`` as ``[N, K]``; None of anything else."""
        member = self.members[name]
        if not name.endswith("mask") or len(member.shape) != 2 or member.shape[0] == self.num_nodes:
            return None
        return np.ascontiguousarray(member.array().T) if member.shape[1] == self.num_nodes else None

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        return edge_chunks(edge_columns(self.edge_index, size), self.path)

    def _rows(self, name: str, num_bytes: int) -> Iterator[Array]:
        member = self.members[name]
        return (piece.astype(self._stored(member), copy=False) for piece in member.pieces(num_bytes))

    def _whole(self, name: str) -> Array:
        member = self.members[name]
        return np.asarray(member.array(), self._stored(member))

    def _sparse_shape(self) -> tuple[int, ...]:
        missing = {"x_indices", "x_shape"} - self.members.keys()
        if missing or self.members["x_shape"].shape != (2,):
            raise DataError(
                f"Expected x_indptr, x_indices and x_shape [2] in {self.path} (got no such "
                f"{min(missing, default='x_shape')}): save CSR features whole"
            )
        return tuple(self.members["x_shape"].array().tolist())

    def _dense_dtype(self) -> np.dtype[np.generic]:
        values = self.members.get("x_data")
        return np.dtype(np.float32) if values is None or values.dtype.kind != "f" else self._stored(values)

    def _dense_rows(self, num_bytes: int) -> Iterator[Array]:
        from scipy import sparse  # only who has such features loads it

        start, column = (self.members[name].array() for name in ("x_indptr", "x_indices"))
        values, (height, width) = self.members.get("x_data"), self._sparse_shape()
        data, dtype = np.ones(len(column)) if values is None else values.array(), self._dense_dtype()
        expected = f"CSR features of {height} rows, columns in [0, {width}), in {self.path}"
        with refusing(DataError, expected, "check x_indptr and x_indices", ValueError):
            known = data.astype(np.promote_types(dtype, np.float32), copy=False)  # SciPy has no float16
            whole = sparse.csr_array((known, column, start), shape=(height, width))
            whole.check_format()
        pieces = slices(height, dtype.itemsize * width, num_bytes)
        return (whole[rows].toarray().astype(dtype, copy=False) for rows in pieces)


def _meta(shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> torch.Tensor | np.dtype[np.generic]:
    """A tensor on the device ``meta``; or the dtype, where a store has no such dtype."""
    try:
        return torch.empty(shape, dtype=torch_dtype(dtype_name(dtype)), device="meta")
    except DataError:
        return dtype


_COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Member:
    """An array in an ``.npz`` file."""

    path: Path  # the ``.npz`` file
    name: str  # of the array
    dtype: np.dtype[np.generic]  # its type
    shape: tuple[int, ...]  # its shape
    is_fortran: bool  # whether its first index runs fastest

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.dtype.itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    def pieces(self, num_bytes: int, first: int = 0) -> Iterator[Array]:
        """Consecutive rows from row ``first`` on, about ``num_bytes`` at a time."""
        pieces = slices(self.shape[0], self.row_bytes, num_bytes, first)
        with _explained(self.path), zipfile.ZipFile(self.path) as archive, _stream(archive, self.name) as (stream, *_):
            if not self.is_fortran or len(self.shape) == 1:
                stream.seek(first * self.row_bytes, os.SEEK_CUR)
                for rows in pieces:
                    count = rows.stop - rows.start
                    content = stream.read(count * self.row_bytes)
                    if len(content) != count * self.row_bytes:
                        raise DataError(f"Expected all of '{self.name}' in {self.path} (it breaks off): fetch it again")
                    yield np.frombuffer(content, self.dtype).reshape(count, *self.shape[1:])
                return
            with tempfile.TemporaryFile() as file:  # columns follow one another, so that a row is spread over the file
                shutil.copyfileobj(stream, file, _COPY_BYTES)
                file.flush()
                for rows in pieces:  # mapped anew for each: pages are let go
                    yield np.ascontiguousarray(np.memmap(file, self.dtype, "r", shape=self.shape, order="F")[rows])

    def array(self) -> Array:
        """All of it, in memory."""
        with _explained(self.path), np.load(self.path, allow_pickle=False) as file:
            whole: Array = file[self.name]
        return whole


def edge_member(edges: Member) -> Member:
    """The array, if it holds edges."""
    if len(edges.shape) != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise DataError(
            f"Expected integers [2, E] as 'edge_index' in {edges.path} (got {edges.dtype} {list(edges.shape)}"
            f"): transpose or cast them"
        )
    return edges


def edge_columns(edges: Member, size: int) -> Iterator[Array]:
    """The ends of ``size`` edges at a time, ``[2, k]``, from an array ``[2, E]``, whose rows are read side by side."""
    if edges.is_fortran:  # in pairs
        pairs = replace(edges, shape=edges.shape[::-1], is_fortran=False)
        yield from (piece.T for piece in pairs.pieces(size * pairs.row_bytes))
        return
    count, num_bytes = edges.shape[1], size * edges.dtype.itemsize
    sources, targets = replace(edges, shape=(count,)), replace(edges, shape=(2 * count,))
    for ends in zip(sources.pieces(num_bytes), targets.pieces(num_bytes, count), strict=True):
        yield np.stack(ends)


def members(path: Path) -> dict[str, Member]:
    """The arrays of a file by name; only their headers are read."""
    found = {}
    with _explained(path), zipfile.ZipFile(path) as archive:
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
def _stream(
    archive: zipfile.ZipFile, name: str
) -> Iterator[tuple[IO[bytes], tuple[int, ...], bool, np.dtype[np.generic]]]:
    """A member after its header; shape, whether its first index runs fastest, and type."""
    with archive.open(f"{name}.npy") as stream:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        yield stream, *read(stream)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    kinds = (zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, OSError)
    with refusing(DataError, f"an .npz file in {path}", "fetch it again", *kinds):
        yield
