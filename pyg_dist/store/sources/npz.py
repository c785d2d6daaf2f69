"""Graphs in ``.npz`` files: ``num_nodes``, ``edge_index``, ``undirected``, features dense or sparse, labels, masks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pyg_dist.errors import DataError
from pyg_dist.store.sources.npz_member import Member, members
from pyg_dist.store.sources.source import EdgeAttribute, EdgeChunk, NodeAttribute, Source, SourceInfo, fixed_rows

Array = np.ndarray[Any, Any]

_SPARSE = ("x_indptr", "x_indices", "x_data", "x_shape")
_KNOWN = ("num_nodes", "edge_index", "undirected", "meta", *_SPARSE)


class Npz(Source):
    """One graph.

    ``x`` becomes float32, whole numbers int64. Features in CSR form (``x_indptr``, ``x_indices``, ``x_shape``, and
    ``x_data`` unless all are one) are made dense row by row. Masks ``[K, N]`` of several splits become ``[N, K]``, as
    PyG has them. Other arrays with a row per node or per edge are attributes.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.members = members(path)
        if not {"num_nodes", "edge_index"} <= self.members.keys():
            raise DataError(
                f"Expected num_nodes and edge_index [2, E] in {path} (got {', '.join(self.members)}): add them"
            )
        self.edges = self.members["edge_index"]
        if len(self.edges.shape) != 2 or self.edges.shape[0] != 2 or self.edges.dtype.kind not in "iu":
            raise DataError(
                f"Expected integers [2, E] as 'edge_index' in {path} (got {self.edges.dtype} {list(self.edges.shape)}"
                f"): transpose or cast them"
            )
        count = self.members["num_nodes"]
        if count.dtype.kind not in "iu" or int(np.prod(count.shape)) != 1 or int(count.array().item()) < 0:
            raise DataError(f"Expected one number of nodes as 'num_nodes' in {path} (got others): save an integer")
        self.num_nodes, self.num_edges = int(count.array().item()), self.edges.shape[1]
        self.stands_once = "undirected" in self.members and bool(self.members["undirected"].array().all())

    def info(self) -> SourceInfo:
        """Sizes and attributes; content stays in the file."""
        nodes, edges = [], []
        if "x_indptr" in self.members:
            nodes.append(self._sparse())
        for name, member in self.members.items():
            if name in _KNOWN:
                continue
            if name.endswith("mask") and len(member.shape) == 2 and member.shape[1] == self.num_nodes:
                mask = member.array().T.astype(np.bool_)
                nodes.append(NodeAttribute(name, "BOOL", mask.shape[1:], fixed_rows(np.ascontiguousarray(mask))))
            elif member.shape[:1] == (self.num_nodes,):
                dtype, cast = _stored(member)
                nodes.append(NodeAttribute(name, dtype, member.shape[1:], _rows(member, cast)))
            elif member.shape[:1] == (self.num_edges,) and not self.stands_once:
                edges.append(EdgeAttribute(name, _stored(member)[0], member.shape[1:]))
            else:
                raise DataError(
                    f"Expected a row for each of {self.num_nodes} nodes in '{name}' of {self.path} (got shape "
                    f"{list(member.shape)}): drop it"
                )
        num_edges = None if self.stands_once else self.num_edges
        return SourceInfo(
            (self.path,), self.num_nodes, num_edges, tuple(nodes), tuple(edges), stands_once=self.stands_once
        )

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """Sources and targets lie one after the other: two streams."""
        edges = self.edges
        if edges.is_fortran:  # pairs
            pairs = Member(edges.path, edges.name, edges.dtype, edges.shape[::-1], False)
            ends: Iterator[Any] = (p.T for p in pairs.pieces(size * pairs.row_bytes))
        else:
            flat = Member(edges.path, edges.name, edges.dtype, (2 * self.num_edges,), False)
            first = Member(edges.path, edges.name, edges.dtype, (self.num_edges,), False)
            num_bytes = size * edges.dtype.itemsize
            ends = zip(first.pieces(num_bytes), flat.pieces(num_bytes, self.num_edges), strict=True)
        streams = {a.name: _rows(self.members[a.name], _stored(self.members[a.name])[1]) for a in self.info().edges}
        more = {name: rows(size * max(self.members[name].row_bytes, 1)) for name, rows in streams.items()}
        low = 0
        for source, target in ends:
            attributes = {name: next(rows) for name, rows in more.items()}
            yield EdgeChunk(source, target, attributes, _place(self.path, low))
            low += len(source)

    def _sparse(self) -> NodeAttribute:
        missing = {"x_indices", "x_shape"} - self.members.keys()
        if missing or self.members["x_shape"].shape != (2,):
            raise DataError(
                f"Expected x_indptr, x_indices and x_shape [2] in {self.path} (got no such "
                f"{min(missing, default='x_shape')}): save CSR features whole"
            )
        start, (height, width) = self.members["x_indptr"].array(), self.members["x_shape"].array().tolist()
        count: Array = np.diff(start.astype(np.int64))
        lengths = {self.members[name].shape for name in ("x_indices", "x_data") if name in self.members}
        is_whole = start.shape == (height + 1,) and start[0] == 0 and lengths == {(int(start[-1]),)}
        if height != self.num_nodes or not is_whole or (count < 0).any():
            raise DataError(
                f"Expected CSR features of {self.num_nodes} rows in {self.path} (got {height}): check x_indptr"
            )

        def rows(num_bytes: int) -> Iterator[Array]:
            column, value = self.members["x_indices"].array(), self.members.get("x_data")
            values = None if value is None else value.array()
            step = max(1, num_bytes // max(4 * width, 1))
            for low in range(0, height, step):
                high = min(low + step, height)
                first, last = int(start[low]), int(start[high])
                row = np.repeat(np.arange(high - low), count[low:high])
                dense = np.zeros((high - low, width), np.float32)
                here = column[first:last]
                if here.size and not 0 <= int(here.min()) <= int(here.max()) < width:
                    raise DataError(
                        f"Expected columns in [0, {width}) in 'x_indices' of {self.path} (got others): check it"
                    )
                np.add.at(dense, (row, column[first:last]), 1 if values is None else values[first:last])
                yield dense

        return NodeAttribute("x", "F32", (width,), rows)


def _stored(member: Member) -> tuple[str, Callable[[Array], Array]]:
    """What a member is kept as."""
    kind = member.dtype.kind
    if kind == "b":
        return "BOOL", lambda a: a
    if kind in "iu":
        return "I64", lambda a: a.astype(np.int64)
    if kind == "f":
        return "F32", lambda a: a.astype(np.float32)
    raise DataError(f"Expected numbers as '{member.name}' in {member.path} (got {member.dtype}): drop or convert it")


def _rows(member: Member, cast: Callable[[Array], Array]) -> Callable[[int], Iterator[Array]]:
    return lambda num_bytes: (cast(piece) for piece in member.pieces(num_bytes))


def _place(path: Path, low: int) -> Callable[[int], str]:
    return lambda place: f"{path}, edge {low + place}"
