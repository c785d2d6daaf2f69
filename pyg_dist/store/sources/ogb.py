"""Folders of OGB's homogeneous node datasets, as ``ogb`` downloads them: ``raw`` in one of two forms, and ``split``.

What ``ogb`` itself has made of them, a pickled cache, is never opened.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pyg_dist.errors import DataError, MissingPackageError, UnsupportedError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import dtype_name
from pyg_dist.store.source import (
    EdgeAttribute,
    EdgeChunk,
    NodeAttribute,
    Source,
    SourceInfo,
    edge_place,
    fixed_rows,
)
from pyg_dist.store.sources.npz import Member, edge_columns, members
from pyg_dist.store.sources.text import first_lines, matrix, same_columns

_NAMES = {"node_feat": "x", "edge_feat": "edge_attr"}
_SPLITS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
_BLOCK = 1 << 22


def is_ogb_folder(path: Path) -> bool:
    """Whether a folder has the raw files of an OGB dataset."""
    return any((path / "raw" / name).exists() for name in ("edge.csv.gz", "data.npz"))


def master_options(name: str) -> dict[str, str]:
    """What ``ogb`` says of a dataset in its ``nodeproppred/master.csv``."""
    spec = importlib.util.find_spec("ogb")
    if spec is None or not spec.submodule_search_locations:
        raise MissingPackageError("Expected the package ogb, whose master.csv has the options: pip install ogb")
    with (Path(spec.submodule_search_locations[0]) / "nodeproppred" / "master.csv").open(newline="") as file:
        head, *rows = list(csv.reader(file))
    if name not in head[1:]:
        raise DataError(
            f"Expected a folder named as one of OGB's datasets, {', '.join(head[1:])} (got {name!r}): rename it"
        )
    return {row[0]: row[head.index(name)] for row in rows}


class OGB(Source):
    """``x``, ``edge_attr``, ``y`` and additional files as ``PygNodePropPredDataset`` has them; the split as masks."""

    num_nodes: int

    def open(self) -> None:
        """Sizes, and which files there are."""
        path, self.raw = self.path, self.path / "raw"
        self.options = master_options(path.name.replace("_", "-"))
        if self.options["is hetero"] == "True":
            raise UnsupportedError(f"Expected a homogeneous dataset (got {path.name}): export one relation as a graph")
        self.members: dict[str, Member] | None = members(self.raw / "data.npz") if self._has("data.npz") else None
        if self.members is not None:
            missing = {"edge_index", "num_nodes_list", "num_edges_list"} - self.members.keys()
            if missing:
                raise DataError(f"Expected '{min(missing)}' in {self.raw / 'data.npz'} (it is missing): fetch it again")
            counts = [self.members[name].array().reshape(-1).tolist() for name in ("num_nodes_list", "num_edges_list")]
        else:
            counts = [
                [int(n) for rows in same_columns(self.raw / name, "i8", 1).rows() for n in matrix(rows)[:, 0]]
                for name in ("num-node-list.csv.gz", "num-edge-list.csv.gz")
            ]
        if [len(count) for count in counts] != [1, 1]:
            raise DataError(f"Expected one graph in {self.raw} (got {len(counts[0])}): this is no node dataset")
        (self.num_nodes,), (self.num_entries,) = ([int(n) for n in count] for count in counts)
        self.inverse = self.options["add_inverse_edge"] == "True"

    def _has(self, name: str) -> bool:
        return (self.raw / name).exists()

    def _more(self, kind: str) -> list[str]:
        names = self.options[f"additional {kind} files"]
        return [] if names == "None" else names.split(",")

    def info(self) -> SourceInfo:
        """Sizes and attributes."""
        nodes = [self._node(key) for key in ["node_feat", *self._more("node")] if self._is_there(key)]
        edges = [
            EdgeAttribute(_NAMES.get(key, key), dtype, shape)
            for key in self._edge_keys()
            for dtype, shape in [self._type(key)]
        ]
        files = [p for folder in (self.raw, self.path / "split") for p in sorted(folder.rglob("*")) if p.is_file()]
        return SourceInfo(
            tuple(files),
            self.num_nodes,
            self.num_entries * (2 if self.inverse else 1),
            (*nodes, self._labels(), *self._masks()),
            tuple(edges),
        )

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The edges in their order; with ``add_inverse_edge``, each is followed by its reverse."""
        keys, low = self._edge_keys(), 0
        values = {key: _Rows(self._rows(key)(_BLOCK)) for key in keys}
        for source, target, place in self._ends(size):
            attributes = {_NAMES.get(key, key): values[key].next(len(source)) for key in keys}
            low += len(source)
            if not self.inverse:
                yield EdgeChunk(source, target, attributes, place)
                continue
            both = np.repeat(np.stack([source, target]), 2, axis=1)
            both[:, 1::2] = both[::-1, ::2].copy()
            twice = {name: np.repeat(rows, 2, axis=0) for name, rows in attributes.items()}
            yield EdgeChunk(both[0], both[1], twice, lambda k, place=place: place(k // 2))  # type: ignore[misc]
        if low != self.num_entries:
            raise DataError(f"Expected {self.num_entries} edges in {self.raw} (got {low}): fetch it again")

    def _ends(self, size: int) -> Iterator[tuple[Array, Array, Callable[[int], str]]]:
        if self.members is None:
            path = self.raw / "edge.csv.gz"
            for rows in same_columns(path, "i8", 2).rows():
                source, target = np.ascontiguousarray(matrix(rows).T)
                yield source, target, lambda k, rows=rows: f"{path}, line {rows.line(k)}"  # type: ignore[misc]
            return
        edges = self.members["edge_index"]
        if edges.shape[:1] != (2,) or edges.dtype.kind not in "iu":
            raise DataError(
                f"Expected integers [2, E] as 'edge_index' in {edges.path} (got {edges.dtype} "
                f"{list(edges.shape)}): check it"
            )
        low = 0
        for source, target in edge_columns(edges, size):
            yield source, target, edge_place(edges.path, low)
            low += len(source)

    def _edge_keys(self) -> list[str]:
        return [key for key in ["edge_feat", *self._more("edge")] if self._is_there(key)]

    def _is_there(self, key: str) -> bool:
        is_there = key in self.members if self.members is not None else self._file(key).exists()
        if not is_there and key not in _NAMES:
            raise DataError(f"Expected '{key}' in {self.raw}, as OGB says (it is missing): fetch the dataset again")
        return is_there

    def _file(self, key: str) -> Path:
        path = self.raw / f"{key.replace('_feat', '-feat')}.csv.gz"
        if key == "node_species" and not path.exists():  # ogb renames this one when it reads it
            return self.raw / "species.csv.gz"
        return path

    def _type(self, key: str) -> tuple[str, tuple[int, ...]]:
        if self.members is not None:
            member = self.members[key]
            return dtype_name(member.dtype), member.shape[1:]
        return _csv_type(self._file(key))

    def _rows(self, key: str) -> Callable[[int], Iterator[Array]]:
        if self.members is not None:
            return self.members[key].pieces
        dtype, _ = _csv_type(self._file(key))
        return _csv_rows(self._file(key), dtype)

    def _node(self, key: str) -> NodeAttribute:
        dtype, shape = self._type(key)
        return NodeAttribute(_NAMES.get(key, key), dtype, shape, self._rows(key))

    def _labels(self) -> NodeAttribute:
        """Whole numbers where all are known and name classes, else float32."""
        if self.members is not None:
            path = self.raw / "node-label.npz"
            found = members(path)
            if "node_label" not in found:
                raise DataError(f"Expected 'node_label' in {path} (it is missing): fetch it again")
            labels = found["node_label"].array()
        else:
            path = self.raw / "node-label.csv.gz"
            labels = np.concatenate([matrix(rows) for rows in same_columns(path, "f8", _width(path)).rows()])
        if len(labels) != self.num_nodes:
            raise DataError(f"Expected {self.num_nodes} rows in {path} (got {len(labels)}): fetch it again")
        is_whole = "classification" in self.options["task type"] and not np.isnan(labels).any()
        labels = labels.astype(np.int64 if is_whole else np.float32)
        return NodeAttribute("y", dtype_name(labels.dtype), labels.shape[1:], fixed_rows(labels))

    def _masks(self) -> Iterator[NodeAttribute]:
        folder = self.path / "split" / self.options["split"]
        for split, name in _SPLITS.items():
            path, mask = folder / f"{split}.csv.gz", np.zeros(self.num_nodes, np.bool_)
            for rows in same_columns(path, "i8", 1).rows():
                node = matrix(rows)[:, 0]
                wrong = ((node < 0) | (node >= self.num_nodes)).nonzero()[0]
                if wrong.size:
                    raise DataError(
                        f"Expected nodes in [0, {self.num_nodes}) in {path}, line {rows.line(wrong[0])} (got "
                        f"{node[wrong[0]]}): fetch it again"
                    )
                mask[node] = True
            yield NodeAttribute(name, "BOOL", (), fixed_rows(mask))


class _Rows:
    """Rows in pieces of other lengths than they are wanted in."""

    def __init__(self, pieces: Iterator[Array]) -> None:
        self._pieces, self._rest = pieces, None

    _rest: Array | None

    def next(self, count: int) -> Array:
        """The next ``count`` rows; fewer at the end."""
        parts = [] if self._rest is None else [self._rest]
        have = sum(map(len, parts))
        while have < count and (piece := next(self._pieces, None)) is not None:
            parts.append(piece)
            have += len(piece)
        whole = np.concatenate(parts) if parts else np.empty(0)
        self._rest = whole[count:]
        return whole[:count]


def _width(path: Path) -> int:
    """Columns of a table."""
    first = first_lines(path)[0]
    if not first.strip():
        raise DataError(f"Expected numbers in {path} (got an empty file): fetch it again")
    return first.count(",") + 1


def _csv_type(path: Path) -> tuple[str, tuple[int, ...]]:
    """As pandas sees a table: int64 if all of it is whole, else (in ``ogb``) float32."""
    width = _width(path)
    try:
        for _ in same_columns(path, "i8", width).rows():
            pass
    except DataError:
        return "F32", (width,)
    return "I64", (width,)


def _csv_rows(path: Path, dtype: str) -> Callable[[int], Iterator[Array]]:
    is_whole = dtype == "I64"

    def rows(num_bytes: int) -> Iterator[Array]:
        for found in same_columns(path, "i8" if is_whole else "f8", _width(path)).rows():
            yield matrix(found).astype(np.int64 if is_whole else np.float32, copy=False)

    return rows
