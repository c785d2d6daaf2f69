"""Folders of OGB's node datasets, as ``ogb`` downloads them: ``raw`` (CSV, or ``data.npz``) and ``split``.

The pickled cache that ``ogb`` makes of them is never opened.
"""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from torch_geometric.typing import EdgeType

from pyg_dist.errors import DataError, MissingPackageError, UnsupportedError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import dtype_name, storage_dtype
from pyg_dist.store.source import Attribute, EdgeChunk, FileSource, ReadRows, Source, array_rows, edge_chunks
from pyg_dist.store.sources.npz import Member, edge_columns, edge_member, members
from pyg_dist.store.sources.text import first_lines, matrix, same_columns
from pyg_dist.store.typed_source import TypedSource

NAMES = {"node_feat": "x", "edge_feat": "edge_attr"}
SPLITS = {"train": "train_mask", "valid": "val_mask", "test": "test_mask"}
TRIPLETS = "triplet-type-list.csv.gz"
"""The raw file that names the relations of a dataset of several types."""


def is_ogb_folder(path: Path) -> bool:
    """Whether a folder has the raw files of an OGB dataset."""
    return any((path / "raw" / name).exists() for name in ("edge.csv.gz", "data.npz", TRIPLETS))


def is_ogb_typed(path: Path) -> bool:
    """Whether a folder has the raw files of an OGB dataset of several types."""
    return (path / "raw" / TRIPLETS).exists()


def master_options(name: str) -> dict[str, str]:
    """The options of a dataset in the ``nodeproppred/master.csv`` of ``ogb``."""
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


def more_files(options: Mapping[str, str], kind: str) -> list[str]:
    """The names of further attributes of nodes, or of edges."""
    names = options[f"additional {kind} files"]
    return [] if names == "None" else names.split(",")


class OGB(FileSource):
    """``x``, ``edge_attr``, ``y`` and additional files as ``PygNodePropPredDataset`` has them; the split as masks."""

    num_nodes: int

    def open(self) -> None:
        path, self.raw = self.path, self.path / "raw"
        self.options = master_options(path.name.replace("_", "-"))
        if self.options["is hetero"] == "True":
            raise UnsupportedError(
                f"Expected a graph with one type of nodes (got {path.name}, which has several): name another one"
            )
        binary = self.raw / "data.npz"
        self.members: dict[str, Member] | None = members(binary) if binary.exists() else None
        if self.members is not None:
            counts = [self._member(name).array().reshape(-1).tolist() for name in ("num_nodes_list", "num_edges_list")]
        else:
            counts = [
                [int(n) for rows in same_columns(self.raw / name, "i8", 1).rows() for n in matrix(rows)[:, 0]]
                for name in ("num-node-list.csv.gz", "num-edge-list.csv.gz")
            ]
        if [len(count) for count in counts] != [1, 1]:
            raise DataError(f"Expected one graph in {self.raw} (got {len(counts[0])}): this is no node dataset")
        (self.num_nodes,), (self.num_entries,) = ([int(n) for n in count] for count in counts)
        self.inverse = self.options["add_inverse_edge"] == "True"
        self.num_edges = self.num_entries * (2 if self.inverse else 1)
        masks = _split_masks(path / "split" / self.options["split"], self.num_nodes)
        self.nodes = (*self._attributes("node"), self._labels(), *masks)
        self.edges = tuple(self._attributes("edge"))
        self.files = _files(self.raw, path / "split")

    def _member(self, name: str) -> Member:
        """An array that ``data.npz`` must have."""
        if self.members is None or name not in self.members:
            raise DataError(f"Expected '{name}' in {self.raw / 'data.npz'} (it is missing): fetch it again")
        return self.members[name]

    def _attributes(self, kind: str) -> Iterator[Attribute]:
        """The features of nodes, or of edges, and the additional files that OGB names."""
        for key in (f"{kind}_feat", *more_files(self.options, kind)):
            found = self._table(key)
            if found is not None:
                yield Attribute(NAMES.get(key, key), *found)
            elif key not in NAMES:
                raise DataError(f"Expected '{key}' in {self.raw}, as OGB says (it is missing): fetch the dataset again")

    def _table(self, key: str) -> tuple[str, tuple[int, ...], ReadRows] | None:
        """Dtype and shape of a row, and the reader of rows; ``None``: there is no such file."""
        if self.members is not None:
            member = self.members.get(key)
            return None if member is None else (dtype_name(member.dtype), member.shape[1:], member.pieces)
        path = _csv(self.raw, key)
        if key == "node_species" and not path.exists():  # ogb renames this one when it reads it
            path = self.raw / "species.csv.gz"
        return _csv_table(path) if path.exists() else None

    def chunks(self, size: int) -> Iterator[EdgeChunk]:
        """The edges in their order; with ``add_inverse_edge``, each is followed by its reverse."""
        low = 0
        for chunk in super().chunks(size):
            low += len(chunk.source)
            if not self.inverse:
                yield chunk
                continue
            both = np.repeat(np.stack([chunk.source, chunk.target]), 2, axis=1)
            both[:, 1::2] = both[::-1, ::2].copy()
            twice = {name: np.repeat(rows, 2, axis=0) for name, rows in chunk.attributes.items()}
            place = partial(lambda chunk, number: chunk.place(number // 2), chunk)
            yield replace(chunk, source=both[0], target=both[1], attributes=twice, place=place)
        if low != self.num_entries:
            raise DataError(f"Expected {self.num_entries} edges in {self.raw} (got {low}): fetch it again")

    def ends(self, size: int) -> Iterator[EdgeChunk]:
        if self.members is not None:
            edges = edge_member(self._member("edge_index"))
            yield from edge_chunks(edge_columns(edges, size), edges.path)
            return
        yield from _csv_ends(self.raw / "edge.csv.gz", size)

    def _labels(self) -> Attribute:
        """Whole numbers where all are known and name classes, else float32."""
        if self.members is not None:
            path = self.raw / "node-label.npz"
            found = members(path)
            if "node_label" not in found:
                raise DataError(f"Expected 'node_label' in {path} (it is missing): fetch it again")
            labels = found["node_label"].array()
        else:
            path = self.raw / "node-label.csv.gz"
            labels = _csv_labels(path)
        return _labels(path, labels, self.num_nodes, self.options)


def _labels(path: Path, labels: Array, num_nodes: int, options: Mapping[str, str]) -> Attribute:
    """Labels in the type that ``ogb`` gives them."""
    if len(labels) != num_nodes:
        raise DataError(f"Expected {num_nodes} rows in {path} (got {len(labels)}): fetch it again")
    is_whole = "classification" in options["task type"] and not np.isnan(labels).any()
    labels = labels.astype(np.int64 if is_whole else np.float32)
    return Attribute("y", dtype_name(labels.dtype), labels.shape[1:], array_rows(labels))


def _split_masks(folder: Path, num_nodes: int) -> Iterator[Attribute]:
    """The nodes that train, validate and test."""
    for split, name in SPLITS.items():
        mask = np.zeros(num_nodes, np.bool_)
        for rows in same_columns(folder / f"{split}.csv.gz", "i8", 1).rows():
            node = matrix(rows)[:, 0]
            wrong = ((node < 0) | (node >= num_nodes)).nonzero()[0]
            if wrong.size:
                raise DataError(
                    f"Expected nodes in [0, {num_nodes}) in {rows.place(wrong[0])} (got {node[wrong[0]]}): fetch it "
                    f"again"
                )
            mask[node] = True
        yield Attribute(name, "BOOL", (), array_rows(mask))


def _width(path: Path) -> int:
    """Columns of a table."""
    first = first_lines(path)[0]
    if not first.strip():
        raise DataError(f"Expected numbers in {path} (got an empty file): fetch it again")
    return first.count(",") + 1


def _csv_dtype(path: Path) -> str:
    """As pandas sees a table: int64 if all of it is whole, else (in ``ogb``) float32."""
    try:
        for _ in same_columns(path, "i8", _width(path)).rows():
            pass
    except DataError:
        return "F32"
    return "I64"


def _csv(folder: Path, key: str) -> Path:
    return folder / f"{key.replace('_feat', '-feat')}.csv.gz"


def _csv_table(path: Path) -> tuple[str, tuple[int, ...], ReadRows]:
    """Dtype and shape of a row, and the reader of rows."""
    dtype = _csv_dtype(path)
    return dtype, (_width(path),), partial(_csv_rows, path, dtype)


def _csv_labels(path: Path) -> Array:
    return np.concatenate(list(_csv_rows(path, "F64", 0)))


def _csv_ends(path: Path, size: int) -> Iterator[EdgeChunk]:
    for rows in same_columns(path, "i8", 2).rows():
        source, target = np.ascontiguousarray(matrix(rows).T)
        yield EdgeChunk(source, target, {}, rows.place)


def _csv_rows(path: Path, dtype: str, num_bytes: int) -> Iterator[Array]:
    kind, wanted = "i8" if dtype == "I64" else "f8", storage_dtype(dtype)
    return (matrix(found).astype(wanted, copy=False) for found in same_columns(path, kind, _width(path)).rows())


def ogb_types(path: Path) -> TypedSource:
    """A dataset of OGB, as ``ogb`` reads it: types and relations in alphabetical order, the split as masks."""
    raw, options = path / "raw", master_options(path.name.replace("_", "-"))
    split, has_label = path / "split" / options["split"], _row_of(raw / "nodetype-has-label.csv.gz")
    has_split = _row_of(split / "nodetype-has-split.csv.gz")
    nodes, relations = dict[str, Source](), dict[EdgeType, Source]()
    for kind, count in sorted(_row_of(raw / "num-node-dict.csv.gz").items()):
        folder, size = raw / "node-feat" / kind, _whole(raw, count)
        found = list(_csv_attributes(folder, ["node_feat", *more_files(options, "node")]))
        if has_label.get(kind) == "True":
            file = raw / "node-label" / kind / "node-label.csv.gz"
            found.append(_labels(file, _csv_labels(file), size, options))
        if has_split.get(kind) == "True":
            found += _split_masks(split / kind, size)
        files = _files(folder, raw / "node-label" / kind, split / kind)
        nodes[kind] = Source(folder, files=files, num_nodes=size, num_edges=0, nodes=tuple(found))
    for line in sorted(first_lines(raw / TRIPLETS)):
        words = line.split(",")
        if len(words) != 3:
            raise DataError(f"Expected source,relation,target in {raw / TRIPLETS} (got {line!r}): fetch it again")
        folder = raw / "relations" / "___".join(words)
        edges, ends = _csv_attributes(folder, ["edge_feat", *more_files(options, "edge")]), folder / "edge.csv.gz"
        relations[words[0], words[1], words[2]] = Source(
            folder, files=_files(folder), edges=tuple(edges), read_ends=partial(_csv_ends, ends)
        )
    whole = Source(path, files=(raw / TRIPLETS, raw / "num-node-dict.csv.gz"), num_nodes=0, num_edges=0)
    return TypedSource(path, whole, nodes, relations)


def _files(*folders: Path) -> tuple[Path, ...]:
    return tuple(path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file())


def _csv_attributes(folder: Path, keys: list[str]) -> Iterator[Attribute]:
    for key in keys:
        if (path := _csv(folder, key)).exists():
            yield Attribute(NAMES.get(key, key), *_csv_table(path))


def _row_of(path: Path) -> Mapping[str, str]:
    """The only line of a table by the names of its columns."""
    lines = first_lines(path)
    if len(lines) != 2:
        raise DataError(f"Expected names, and a line for one graph, in {path} (got {len(lines)} lines): fetch it again")
    return dict(zip(*(line.split(",") for line in lines), strict=False))


def _whole(raw: Path, count: str) -> int:
    if not count.isdecimal():
        raise DataError(f"Expected numbers of nodes in {raw / 'num-node-dict.csv.gz'} (got {count!r}): fetch it again")
    return int(count)
