"""The edges of an input as plain columns on disk, checked, counted and in the order that a ``Data`` would have them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.errors import DataError, OptionError
from pyg_dist.partition.inputs import Array
from pyg_dist.partition.solver import shortage
from pyg_dist.store.attributes import NanCount
from pyg_dist.store.format import as_torch, storage_dtype, sync
from pyg_dist.store.records import Buckets, read_records, records_limit, sorted_records
from pyg_dist.store.source import Attribute, EdgeChunk, Source

Tick = Callable[[int], object]
"""Called with the number of further edges that are done."""

_NODE_BYTES = 64
"""Bytes per node of the arrays that a conversion holds: degrees, parts, positions, node orders."""
_NUM_BUCKETS = 256


@dataclass(frozen=True)
class SpoolFacts:
    """Counts that were taken while edges were read."""

    num_nodes: int  # N
    num_edges: int  # E
    least_id: int  # the smallest id with an edge
    num_isolated: int  # nodes without an edge, where the ids alone say how many nodes there are
    nan: dict[str, NanCount]  # of each attribute that has NaN


@dataclass(frozen=True)
class Spool(SpoolFacts):
    """Edges on disk."""

    folder: Path  # of the columns
    attributes: tuple[Attribute, ...]  # that come with each edge
    in_degree: Array  # edges by target, int64 ``[N]``

    def chunks(self, size: int) -> Iterator[tuple[int, Array, Array, dict[str, Array]]]:
        """The number of the first edge, sources, targets and attributes of ``size`` edges at a time."""
        columns = [read_records(self.folder / name, np.dtype(np.int64), size) for name in ("source", "target")]
        wide = [(k, a) for k, a in enumerate(self.attributes) if 0 not in a.shape]  # the files of others are empty
        more = [read_records(_file(self.folder, k), _row_dtype(a), size) for k, a in wide]
        low = 0
        for source, target, *rows in zip(*columns, *more, strict=True):
            values = {
                a.name: np.empty((len(source), *a.shape), storage_dtype(a.dtype))
                for a in self.attributes
                if 0 in a.shape
            }
            values |= {a.name: row["row"] for (_, a), row in zip(wide, rows, strict=True)}
            yield low, source, target, values
            low += len(source)

    def ends(self, size: int) -> Iterator[Array]:
        """Sources and targets of ``size`` edges at a time, int64 ``[2, k]``."""
        for _, source, target, _ in self.chunks(size):
            yield np.stack([source, target])

    def edge_index(self) -> Tensor:
        """All edges in memory, int64 ``[2, E]``."""
        whole = host.empty(2, self.num_edges, dtype=torch.int64)
        for row, name in enumerate(("source", "target")):
            if self.num_edges:
                with (self.folder / name).open("rb") as file:
                    file.readinto(whole[row].numpy().data)
        return whole

    def digest(self, first_target: int = 0) -> str:
        """The :func:`~pyg_dist.backend.session.agreement.digest` of :meth:`edge_index`, ``first_target`` subtracted."""
        hasher = xxhash.xxh3_128(f"{torch.int64}{(2, self.num_edges)}".encode())
        for name, first in (("source", 0), ("target", first_target)):
            for piece in read_records(self.folder / name, np.dtype(np.int64), 1 << 20):
                hasher.update((piece - first).view(np.uint8).data)
        return str(hasher.hexdigest())


def spool(source: Source, folder: Path, undirected: bool, memory: int, tick: Tick) -> Spool:
    """Read all edges of a source into ``folder``, which is made anew.

    ``undirected``, or a source that ``needs_reverse``, adds the reverse of each edge; edges are then sorted by source
    and target, each once, as by PyG's ``to_undirected``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    both = undirected or source.needs_reverse
    if both and source.edges:
        raise OptionError(
            f"Expected no attributes of edges in a graph whose edges stand for both directions (got "
            f"{source.edges[0].name}): give both directions, or drop it"
        )
    if source.num_nodes is not None:
        _require_memory(source.num_nodes, memory)
    degree = np.zeros(source.num_nodes or 0, np.int64)
    has_edge, nan = np.zeros(0, bool), {a.name: NanCount() for a in source.edges}
    num_edges, last, least = 0, -1, np.iinfo(np.int64).max
    size = max(1 << 14, min(1 << 20, memory // 512))
    with ExitStack() as stack:
        paths = [folder / "source", folder / "target", *(_file(folder, k) for k in range(len(source.edges)))]
        source_file, target_file, *files = (stack.enter_context(path.open("wb")) for path in paths)
        for chunk in source.chunks(size):
            if len(chunk.source) == 0:
                continue
            low, high = _check(chunk, source.num_nodes)
            least, last = min(least, low), max(last, high)
            if source.num_nodes is None and last >= len(degree):
                largest = int(np.maximum(chunk.source, chunk.target).argmax())
                _require_memory(last + 1, memory, f"; the largest id is in {chunk.place(largest)}")
                more = max(last + 1 - len(degree), len(degree))
                degree = np.concatenate([degree, np.zeros(more, np.int64)])
                has_edge = np.concatenate([has_edge, np.zeros(more, bool)])
            ends = chunk.source.astype(np.int64, copy=False), chunk.target.astype(np.int64, copy=False)
            source_file.write(np.ascontiguousarray(ends[0]).data)
            target_file.write(np.ascontiguousarray(ends[1]).data)
            for a, file in zip(source.edges, files, strict=True):
                rows = np.require(chunk.attributes[a.name], storage_dtype(a.dtype), ["C", "W"])
                file.write(rows.data)
                nan[a.name] += NanCount.of(as_torch(rows, a.dtype), num_edges)
            if source.num_nodes is None:
                has_edge[ends[0]] = has_edge[ends[1]] = True
            np.add.at(degree, ends[1], 1)  # bincount takes O(N) for each chunk
            num_edges += len(ends[0])
            tick(len(ends[0]))
    if num_edges == 0 and source.num_nodes is None:
        raise DataError(f"Expected edges in {source.name} (got none): give one for each edge")
    num_nodes = last + 1 if source.num_nodes is None else source.num_nodes
    num_isolated = int((~has_edge[:num_nodes]).sum())
    nan = {name: count for name, count in nan.items() if count.rows}
    found = Spool(num_nodes, num_edges, int(least), num_isolated, nan, folder, source.edges, degree[:num_nodes])
    return _symmetric(found, memory) if both else found


def _check(chunk: EdgeChunk, num_nodes: int | None) -> tuple[int, int]:
    """The smallest and the largest id of a chunk; raises where an id is out of range."""
    low = min(int(chunk.source.min()), int(chunk.target.min()))
    high = max(int(chunk.source.max()), int(chunk.target.max()))
    if low < 0 or (num_nodes is not None and high >= num_nodes):
        bound = np.iinfo(np.int64).max if num_nodes is None else num_nodes
        wrong = (chunk.source < 0) | (chunk.target < 0) | (chunk.source >= bound) | (chunk.target >= bound)
        place = int(wrong.nonzero()[0][0])
        limit = "of 0 or more" if num_nodes is None else f"in [0, {num_nodes})"
        raise DataError(
            f"Expected node ids {limit} in {chunk.place(place)} (got {chunk.source[place]} -> {chunk.target[place]}, "
            f"counted from 0): drop the edge, or number the nodes from 0 on"
        )
    return low, high


def _require_memory(num_nodes: int, memory: int, place: str = "") -> None:
    if num_nodes * _NODE_BYTES > memory:
        needed, there = shortage(num_nodes * _NODE_BYTES, memory)
        raise OptionError(
            f"Expected {needed} of memory or more for {num_nodes:,} nodes (got {there}{place}): number the nodes "
            f"without gaps, or write a store with more, by partition --memory"
        )


def _symmetric(edges: Spool, memory: int) -> Spool:
    """Both directions of every edge, sorted, each once; the files of ``edges`` are overwritten."""
    num_nodes, pair = edges.num_nodes, np.dtype([("source", np.int64), ("target", np.int64)])
    limit = records_limit(pair, memory // 2)

    def key(records: Array) -> Array:
        place: Array = records["source"] * num_nodes + records["target"]
        return place

    num_buckets = min(_NUM_BUCKETS, max(num_nodes, 1))
    width = -(-max(num_nodes, 1) // num_buckets)
    buckets = Buckets(edges.folder.with_name("both"), num_buckets, pair)
    for _, source, target, _ in edges.chunks(max(limit // 8, 1)):
        records = np.empty(2 * len(source), pair)
        records["source"], records["target"] = np.concatenate([source, target]), np.concatenate([target, source])
        buckets.add(records["source"] // width, records)
    degree, count = np.zeros(num_nodes, np.int64), 0
    with (edges.folder / "source").open("wb") as sources, (edges.folder / "target").open("wb") as targets:
        for number in range(num_buckets):
            first, last = number * width, min((number + 1) * width, num_nodes)
            if first >= last:
                break
            before: object = None
            for records in sorted_records(buckets.path(number), pair, key, first * num_nodes, last * num_nodes, limit):
                is_new = np.ones(len(records), bool)
                is_new[1:] = records[1:] != records[:-1]
                is_new[0] = before is None or records[0] != before
                before = records[-1].copy()
                kept = records.compress(is_new)
                sources.write(np.ascontiguousarray(kept["source"]).data)
                targets.write(np.ascontiguousarray(kept["target"]).data)
                np.add.at(degree, kept["target"], 1)
                count += len(kept)
    buckets.folder.rmdir()
    return replace(edges, num_edges=count, in_degree=degree)


def _file(folder: Path, number: int) -> Path:
    """The file of an attribute, by its number: names may hold any character."""
    return folder / f"attribute.{number}"


def _row_dtype(attribute: Attribute) -> np.dtype[np.generic]:
    return np.dtype([("row", storage_dtype(attribute.dtype), attribute.shape)])


def save_spool(edges: Spool) -> tuple[SpoolFacts, dict[str, int]]:
    """Sync the columns to disk; returns the counts and the sizes of files, for :func:`load_spool`."""
    (edges.folder / "in_degree").write_bytes(edges.in_degree.data)
    for path in edges.folder.iterdir():
        sync(path)
    sync(edges.folder)
    facts = SpoolFacts(edges.num_nodes, edges.num_edges, edges.least_id, edges.num_isolated, edges.nan)
    return facts, _sizes(edges.folder)


def load_spool(
    folder: Path, known: tuple[SpoolFacts, dict[str, int]] | None, attributes: tuple[Attribute, ...]
) -> Spool | None:
    """The columns that :func:`save_spool` has left; None where they are incomplete."""
    if known is None or not folder.is_dir() or _sizes(folder) != known[1]:
        return None
    degree = np.fromfile(folder / "in_degree", np.int64)
    return Spool(**vars(known[0]), folder=folder, attributes=attributes, in_degree=degree)


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}
