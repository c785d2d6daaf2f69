"""A grid store: edges in R x C tiles under the plan's node orders, rows of nodes by position.

Files: ``orders``, global ids by position (``orderK``) and positions by global id (``positionK``), int32 where they fit:
ranks look them up in the file; ``rows-r``, attributes of the nodes at range r of the positions in order 0;
``edges-r``, range r of the edges in input order, with attributes; ``tile-o-r-c``, the edges whose target is in range r
of the other order and whose source is in range c of order o, by ascending id (2D shards: Plexus, 5.4; orders: 5.1).
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.partition.inputs import Array
from pyg_dist.store.folder import StoreFolder
from pyg_dist.store.format import ShardWriter, as_torch, of_rows, storage_dtype
from pyg_dist.store.manifest import Manifest, Shard
from pyg_dist.store.reader import ShardReader
from pyg_dist.store.records import Buckets, read_records, stable_order
from pyg_dist.store.source import Attribute, row_specs
from pyg_dist.store.spool import Spool, Tick

Span = tuple[int, int]
"""The first of some positions, and the last, exclusive."""

_ENDS = ("source", "target")
_TILE = np.dtype([("edge_id", np.int64), ("row", np.int32), ("column", np.int32)])


def bounds(size: int, count: int) -> Array:
    """The bounds of ``count`` near-equal ranges, int64 ``[count + 1]``."""
    return np.array([size * k // count for k in range(count + 1)], np.int64)


def write_grid(
    folder: StoreFolder,
    edges: Spool,
    attributes: tuple[Attribute, ...],
    orders: list[Array],
    tiles: tuple[int, int],
    memory: int,
    tick: Tick,
) -> dict[str, Shard]:
    """Write all shards of a grid store in bounded memory."""
    num_nodes, shards = edges.num_nodes, dict[str, Shard]()
    kind = "I32" if num_nodes <= np.iinfo(np.int32).max else "I64"
    specs = {f"{what}{k}": of_rows(kind, num_nodes) for what in ("order", "position") for k in range(len(orders))}
    dtype, positions = storage_dtype(kind), []
    for node in orders:
        position = np.empty(num_nodes, dtype)
        position[node] = np.arange(num_nodes, dtype=dtype)
        positions.append(position)
    shards |= folder.finished("orders")
    if not shards:
        writer = ShardWriter(folder.work / "orders", specs)
        for k, (node, position) in enumerate(zip(orders, positions, strict=True)):
            writer.append({f"order{k}": node.astype(dtype, copy=False), f"position{k}": position})
        shards["orders"] = folder.finish("orders", writer)
    chunk = max(1 << 12, min(1 << 20, memory // 1024))
    shards |= _write_rows(folder, attributes, positions[0], tiles[0], memory)
    shards |= _write_ranges(folder, edges, tiles[0], chunk)
    for number in range(len(orders)):
        other = positions[len(orders) - 1 - number]
        shards |= _write_tiles(folder, edges, number, other, positions[number], tiles, chunk, tick)
    return shards


def _write_rows(
    folder: StoreFolder, attributes: tuple[Attribute, ...], position: Array, count: int, memory: int
) -> dict[str, Shard]:
    keys = [f"rows-{number:05d}" for number in range(count)]
    finished = folder.finished(*keys)
    if len(finished) == count or not attributes:
        return finished
    ends = bounds(len(position), count)
    sizes = dict(zip(keys, np.diff(ends).tolist(), strict=True))
    writers = {key: ShardWriter(folder.work / key, row_specs(attributes, size)) for key, size in sizes.items()}
    for attribute in attributes:
        row = np.dtype([("position", np.int64), ("row", storage_dtype(attribute.dtype), attribute.shape)])
        buckets, low = Buckets(folder.work / "row-buckets", count, row), 0
        for rows in attribute.rows(max(memory // 32, 1 << 16)):
            records = np.empty(len(rows), row)
            records["position"], records["row"] = position[low : low + len(rows)], rows
            buckets.add(np.searchsorted(ends, records["position"], side="right") - 1, records)
            low += len(rows)
        for number, (key, size) in enumerate(sizes.items()):
            if size:
                records = np.fromfile(buckets.path(number), row)
                order = stable_order(records["position"] - ends[number], size)
                writers[key].append({attribute.name: records["row"][order]})
            buckets.remove(number)
        buckets.folder.rmdir()
    return folder.finish_all(writers)


def _write_ranges(folder: StoreFolder, edges: Spool, count: int, chunk: int) -> dict[str, Shard]:
    """The edges in the input's order, for all that needs no tile."""
    ends = bounds(edges.num_edges, count)
    keys = [f"edges-{number:05d}" for number in range(count)]
    finished = folder.finished(*keys)
    if len(finished) == count:
        return finished
    writers = {
        key: ShardWriter(
            folder.work / key, {end: of_rows("I64", size) for end in _ENDS} | row_specs(edges.attributes, size)
        )
        for key, size in zip(keys, np.diff(ends).tolist(), strict=True)
    }
    for low, source, target, values in edges.chunks(chunk):
        columns, high = {"source": source, "target": target} | values, low + len(source)
        for writer, (begin, end) in zip(writers.values(), pairwise(ends.tolist()), strict=True):
            first, last = max(low, begin), min(high, end)
            if first < last:
                writer.append({name: column[first - low : last - low] for name, column in columns.items()})
    return folder.finish_all(writers)


def _write_tiles(
    folder: StoreFolder,
    edges: Spool,
    number: int,
    row_of: Array,
    column_of: Array,
    tiles: tuple[int, int],
    chunk: int,
    tick: Tick,
) -> dict[str, Shard]:
    """The tiles of one order of sources; edges of a tile keep the input's order."""
    keys = [f"tile-{number}-{r:05d}-{c:05d}" for r in range(tiles[0]) for c in range(tiles[1])]
    shards = folder.finished(*keys)
    if len(shards) == len(keys):
        return shards
    row_ends, column_ends = bounds(edges.num_nodes, tiles[0]), bounds(edges.num_nodes, tiles[1])
    buckets = Buckets(folder.work / "tiles", len(keys), _TILE)
    for low, source, target, _ in edges.chunks(chunk):
        row, column = row_of[target], column_of[source]
        r = np.searchsorted(row_ends, row, side="right") - 1
        c = np.searchsorted(column_ends, column, side="right") - 1
        records = np.empty(len(source), _TILE)
        records["edge_id"] = np.arange(low, low + len(source))
        records["row"], records["column"] = row - row_ends[r], column - column_ends[c]
        buckets.add(r * tiles[1] + c, records)
        tick(len(source))
    for bucket, key in enumerate(keys):
        if key not in shards:
            count = int(buckets.counts[bucket])
            specs = {"edge_id": of_rows("I64", count), "row": of_rows("I32", count), "column": of_rows("I32", count)}
            writer = ShardWriter(folder.work / key, specs)
            for records in read_records(buckets.path(bucket), _TILE, chunk):
                writer.append({name: records[name] for name in specs})
            shards[key] = folder.finish(key, writer)
        buckets.remove(bucket)
    buckets.folder.rmdir()
    return shards


class GridStore(ShardReader):
    """A grid store, opened for reading. All that is read is checked by digests."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest.shards)
        self.manifest = manifest
        self.tiles = manifest.planned("tiles", tuple[int, int])
        self._row_ends = bounds(manifest.num_nodes, self.tiles[0])
        self._column_ends = bounds(manifest.num_nodes, self.tiles[1])

    @property
    def num_orders(self) -> int:
        """Node orders, one or two."""
        return len(self.shards["orders"].tensors) // 2

    def order(self, number: int) -> tuple[Array, Array]:
        """Global ids by position, and positions by global id, of a node order: views of the mapped file.

        They may be used after :meth:`close`. The processes of a machine share their pages, which the system may drop.
        """
        for name in (f"order{number}", f"position{number}"):
            self.check("orders", name)
        file = self.file("orders")
        return file.rows(f"order{number}"), file.rows(f"position{number}")

    def range_rows(self, kind: str, name: str, size: int, low: int, high: int) -> Tensor:
        """Rows ``low`` to ``high`` of a tensor that is stored in near-equal ranges."""
        ends, spec, done = bounds(size, self.tiles[0]), self.shards[f"{kind}-00000"].tensors[name], 0
        out = np.empty((max(high - low, 0), *spec.shape[1:]), storage_dtype(spec.dtype))
        for number in range(self.tiles[0]):
            key = f"{kind}-{number:05d}"
            first, last = max(low, int(ends[number])), min(high, int(ends[number + 1]))
            if first >= last:
                continue
            self.check(key, name)
            begin = int(ends[number])
            for piece in self.file(key).pieces(name, first - begin, last - begin):
                out[done : done + len(piece)] = piece
                done += len(piece)
        return as_torch(out, spec.dtype)

    def overlapping(self, order: int, rows: Span, columns: Span) -> list[tuple[str, Span, Span]]:
        """The tiles that a rectangle of positions overlaps: key, rows, columns."""
        found = []
        for r, row in enumerate(pairwise(self._row_ends.tolist())):
            for c, column in enumerate(pairwise(self._column_ends.tolist())):
                if all(a[0] < b[1] and a[1] > b[0] for a, b in ((row, rows), (column, columns))):
                    found.append((f"tile-{order}-{r:05d}-{c:05d}", row, column))
        return found

    def count(self, order: int, rows: Span, columns: Span) -> int:
        """The number of edges in a rectangle of positions. Files of tiles that lie inside of it are not read."""
        total = 0
        for key, row, column in self.overlapping(order, rows, columns):
            if all(a[0] >= b[0] and a[1] <= b[1] for a, b in ((row, rows), (column, columns))):
                total += self.shards[key].tensors["edge_id"].num_rows
            else:
                total += int(_inside(self._from_corner(key, row, column, rows, columns), rows, columns).sum())
        return total

    def rectangle(self, order: int, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
        """The edges in a rectangle of positions, counted from its corner, by ascending id: int32 ``[e]`` each."""
        ids, ends = [], []
        for key, row, column in self.overlapping(order, rows, columns):
            edge_id, place = self.tensor(key, "edge_id"), self._from_corner(key, row, column, rows, columns)
            inside = _inside(place, rows, columns)
            ids.append(edge_id if bool(inside.all()) else edge_id[inside])
            ends.append(place if bool(inside.all()) else place[:, inside])
        if not ids:
            return host.empty(0, dtype=torch.int32), host.empty(0, dtype=torch.int32)
        if len(ids) == 1:
            return ends[0][0], ends[0][1]
        order_of = torch.argsort(torch.cat(ids))
        whole = torch.cat(ends, 1)[:, order_of]
        return whole[0], whole[1]

    def _from_corner(self, key: str, row: Span, column: Span, rows: Span, columns: Span) -> Tensor:
        """Rows and columns of a tile's edges, counted from the corner of a rectangle: int32 ``[2, e]``."""
        place = torch.stack([self.tensor(key, "row"), self.tensor(key, "column")])
        place[0] += row[0] - rows[0]
        place[1] += column[0] - columns[0]
        return place


def _inside(place: Tensor, rows: Span, columns: Span) -> Tensor:
    """Whether positions, counted from a rectangle's corner, are inside it: bool ``[e]``."""
    return (place >= 0).all(0) & (place[0] < rows[1] - rows[0]) & (place[1] < columns[1] - columns[0])
