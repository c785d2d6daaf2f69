"""Writing a halo store: nodes and edges by part, blocks of edges between two parts as slices.

Three files for each part q. ``nodes``: global ids, ascending, and attributes. ``edges``: the edges into q by (source
part, target, input order), their ends numbered within their parts. ``halo``: by source part, the distinct sources and
targets of the edges that cross, which an exchange would send rows of or sums for (SuperGCN, 5.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from pyg_dist.errors import DataError, OptionError
from pyg_dist.partition.inputs import Array
from pyg_dist.partition.solver import shortage
from pyg_dist.store.folder import StoreFolder
from pyg_dist.store.format import ShardWriter, of_rows, storage_dtype
from pyg_dist.store.manifest import Blocks, Shard
from pyg_dist.store.records import Buckets, read_records, records_limit, sorted_records, stable_order
from pyg_dist.store.source import Attribute, row_specs
from pyg_dist.store.spool import Spool, Tick

BLOCK_COLUMNS = ("edge_id", "source", "target", "is_post", "row_id", "sum_id")
"""The columns that the digest of a block covers, in this order: all that another part reads of it."""

_BYTES_PER_EDGE = 160
"""Memory of the choice between rows and sums, matching included (SciPy's graph, two searches, the ends)."""


@dataclass(frozen=True)
class Block:
    """The edges from part ``sender`` into part ``receiver``, by target."""

    sender: int
    receiver: int
    row: Array  # number of each edge's source among the distinct ones, ascending by id, int64 ``[m]``
    sum: Array  # the same of its target
    num_rows: int  # distinct sources
    num_sums: int  # distinct targets


Choose = Callable[[Block], Array]
"""Chooses the edges of a block that are post, whose source's row is sent and not their target's sum: bool ``[m]``."""


@dataclass(frozen=True)
class NodeParts:
    """The part of each node, and its number there."""

    part: Array  # by global id, integers ``[N]``
    local: Array  # number within the part, int32 ``[N]``
    node: Array  # global ids by part, ascending in each, int64 ``[N]``
    start: Array  # the first of each part in ``node``, int64 ``[P + 1]``

    @staticmethod
    def of(parts: Array, num_parts: int) -> NodeParts:
        """Number the nodes of each part. O(N) time and memory."""
        counts = np.bincount(parts, minlength=num_parts)
        if counts.max(initial=0) > np.iinfo(np.int32).max:
            raise OptionError(f"Expected fewer than 2^31 nodes in a part (got {counts.max()}): use more parts")
        start = np.concatenate([[0], np.cumsum(counts)])
        node = stable_order(parts, num_parts)
        local = np.empty(len(parts), np.int32)
        local[node] = np.arange(len(parts)) - np.repeat(start[:-1], counts)
        return NodeParts(parts, local, node, start)

    @property
    def num_parts(self) -> int:
        """P."""
        return len(self.start) - 1

    def size(self, part: int) -> int:
        """Nodes of a part."""
        return int(self.start[part + 1] - self.start[part])


def write_nodes(
    folder: StoreFolder, nodes: NodeParts, attributes: tuple[Attribute, ...], memory: int, again: bool = False
) -> dict[str, Shard]:
    """Scatter the rows of every attribute to their parts' files, which grow side by side.

    Files of an interrupted run are taken as they are, unless ``again``: then attributes are read for their NaN, too.
    """
    keys = [f"nodes-{part:05d}" for part in range(nodes.num_parts)]
    finished = folder.finished(*keys)
    if len(finished) == len(keys) and not again:
        return finished
    writers = []
    for part, key in enumerate(keys):
        columns = {"node_id": of_rows("I64", nodes.size(part))} | row_specs(attributes, nodes.size(part))
        writers.append(ShardWriter(folder.work / key, columns))
        writers[-1].append({"node_id": nodes.node[nodes.start[part] : nodes.start[part + 1]]})
    for attribute in attributes:
        low: int = 0
        for rows in attribute.rows(max(memory // 16, 1 << 16)):
            owner = nodes.part[low : low + len(rows)]
            low += len(rows)
            if len(owner) < len(rows):
                break
            order = stable_order(owner, nodes.num_parts)
            ends = np.cumsum(np.bincount(owner, minlength=nodes.num_parts))
            begins = np.concatenate([[0], ends[:-1]])
            for number in (ends > begins).nonzero()[0].tolist():
                writers[number].append({attribute.name: rows[order[begins[number] : ends[number]]]})
        if low != len(nodes.part):
            raise DataError(f"Expected {len(nodes.part)} rows of '{attribute.name}' (got {low}): one for each node")
    return folder.finish_all(dict(zip(keys, writers, strict=True)))


def write_edges(
    folder: StoreFolder, edges: Spool, nodes: NodeParts, choose: Choose, memory: int, tick: Tick
) -> dict[str, Shard]:
    """Write the edges and the halo of every part: buckets by part on disk, each sorted by (source part, target)."""
    num_parts = nodes.num_parts
    shards = folder.finished(*(f"{kind}-{part:05d}" for part in range(num_parts) for kind in ("edges", "halo")))
    todo = [part for part in range(num_parts) if not {f"edges-{part:05d}", f"halo-{part:05d}"} <= shards.keys()]
    if not todo:
        return shards
    dtype = np.dtype([
        ("edge_id", np.int64), ("sender", np.int32), ("source", np.int32), ("target", np.int32),
        *((a.name, storage_dtype(a.dtype), a.shape) for a in edges.attributes),
    ])  # fmt: skip
    limit = records_limit(dtype, memory // 2)
    buckets = Buckets(folder.work / "buckets", num_parts, dtype)
    counts = np.zeros((num_parts, num_parts), np.int64)  # sender by receiver
    wanted = np.isin(np.arange(num_parts), todo)
    for low, source, target, values in edges.chunks(max(min(limit // 4, 1 << 20), 1)):
        receiver = nodes.part[target].astype(np.int64)
        records = np.empty(len(source), dtype)
        records["edge_id"] = np.arange(low, low + len(source))
        records["sender"], records["source"] = nodes.part[source], nodes.local[source]
        records["target"] = nodes.local[target]
        for name, rows in values.items():
            records[name] = rows
        counts += np.bincount(records["sender"] * num_parts + receiver, minlength=num_parts**2).reshape(counts.shape)
        if len(todo) < num_parts:
            is_wanted = wanted[receiver]
            receiver, records = receiver.compress(is_wanted), records.compress(is_wanted)
        buckets.add(receiver, records)
        tick(len(source))
    for part in todo:
        writer = _PartWriter(folder, edges, nodes, part, counts[:, part], choose, memory // 2)
        size = max(nodes.size(part), 1)

        def key(records: Array, size: int = size) -> Array:
            by_block: Array = records["sender"].astype(np.int64) * size + records["target"]
            return by_block

        for records in sorted_records(buckets.path(part), dtype, key, 0, num_parts * size, limit):
            writer.add(records)
            tick(len(records))
        shards |= writer.close()
    return shards


class _PartWriter:
    """The edges and the halo of one part, from records in order."""

    def __init__(
        self, folder: StoreFolder, edges: Spool, nodes: NodeParts, part: int, counts: Array, choose: Choose, memory: int
    ) -> None:
        self.folder, self.nodes, self.part, self.counts, self.choose = folder, nodes, part, counts, choose
        crossing = int(counts.sum() - counts[part])
        most = int(np.delete(counts, part).max(initial=0))
        if most * _BYTES_PER_EDGE > memory:
            needed, there = shortage(2 * most * _BYTES_PER_EDGE, 2 * memory)
            raise OptionError(
                f"Expected --memory of {needed} or more for {most:,} edges from a part to another (got {there}): give "
                f"more, or more parts"
            )
        count = int(counts.sum())
        columns = {"source": of_rows("I32", count), "target": of_rows("I32", count), "edge_id": of_rows("I64", count)}
        columns |= {"is_post": of_rows("BOOL", crossing)} | row_specs(edges.attributes, count)
        self.key = f"edges-{part:05d}"
        self.writer = ShardWriter(folder.work / self.key, columns)
        self.names = [name for name in columns if name != "is_post"]
        self.lists = {name: folder.work / f"{name}-{part:05d}" for name in ("row_id", "sum_id")}
        for path in self.lists.values():
            path.write_bytes(b"")
        self.on_boundary = np.zeros(nodes.size(part), bool)
        num_parts = nodes.num_parts
        rows, sums, post_edges, post_rows, pre_sums = ([0] * num_parts for _ in range(5))
        none = [_hexdigest(_hashers())] * num_parts  # of blocks without edges
        self.blocks = Blocks(counts.tolist(), rows, sums, post_edges, post_rows, pre_sums, none)
        self.sender, self.held, self.digest = 0, list[Array](), _hashers()

    def add(self, records: Array) -> None:
        self.writer.append({name: records[name] for name in self.names})
        bounds = np.searchsorted(records["sender"], np.arange(self.sender, self.nodes.num_parts + 1))
        first = self.sender
        for sender in range(first, self.nodes.num_parts):
            low, high = bounds[sender - first], bounds[sender - first + 1]
            if low == high:
                continue
            if sender != self.sender:
                self._finish()
                self.sender = sender
            self._hold(records[low:high])

    def _hold(self, records: Array) -> None:
        for name in ("edge_id", "source", "target"):
            self.digest[name].update(np.ascontiguousarray(records[name]).view(np.uint8).data)
        if self.sender != self.part:
            self.held.append(np.stack([records["source"], records["target"]]))

    def _finish(self) -> None:
        sender, nodes, blocks = self.sender, self.nodes, self.blocks
        if self.held:
            source, target = np.concatenate(self.held, axis=1) if len(self.held) > 1 else self.held[0]
            self.held = []
            row_local, row = np.unique(source, return_inverse=True)
            sum_local, total = np.unique(target, return_inverse=True)
            is_post = self.choose(Block(sender, self.part, row, total, len(row_local), len(sum_local)))
            self.on_boundary[sum_local] = True
            ids = {
                "row_id": nodes.node[nodes.start[sender] + row_local],
                "sum_id": nodes.node[nodes.start[self.part] + sum_local],
            }
            self.writer.append({"is_post": is_post})
            self.digest["is_post"].update(is_post.view(np.uint8).data)
            for name, values in ids.items():
                self.digest[name].update(values.view(np.uint8).data)
                with self.lists[name].open("ab") as file:
                    file.write(values.data)
            row_is_sent, sum_is_sent = np.zeros(len(row_local), bool), np.zeros(len(sum_local), bool)
            row_is_sent[row[is_post]] = True
            sum_is_sent[total[~is_post]] = True
            blocks.rows[sender], blocks.sums[sender] = len(row_local), len(sum_local)
            blocks.post_edges[sender] = int(is_post.sum())
            blocks.post_rows[sender], blocks.pre_sums[sender] = int(row_is_sent.sum()), int(sum_is_sent.sum())
        blocks.digest[sender], self.digest = _hexdigest(self.digest), _hashers()

    def close(self) -> dict[str, Shard]:
        self._finish()
        halo_key = f"halo-{self.part:05d}"
        specs = {"row_id": of_rows("I64", sum(self.blocks.rows)), "sum_id": of_rows("I64", sum(self.blocks.sums))}
        halo = ShardWriter(self.folder.work / halo_key, specs)
        for name, path in self.lists.items():
            for values in read_records(path, np.dtype(np.int64), 1 << 18):
                halo.append({name: values})
            path.unlink()
        self.blocks.boundary.append(int(self.on_boundary.sum()))
        return {
            self.key: self.folder.finish(self.key, self.writer, self.blocks),
            halo_key: self.folder.finish(halo_key, halo),
        }


def _hashers() -> dict[str, xxhash.xxh3_128]:
    """For the columns of one block."""
    return {name: xxhash.xxh3_128() for name in BLOCK_COLUMNS}


def _hexdigest(hashers: dict[str, xxhash.xxh3_128]) -> str:
    return block_digest(hasher.digest() for hasher in hashers.values())


def block_digest(columns: Iterator[bytes]) -> str:
    """The digest of a block, from those of :data:`BLOCK_COLUMNS` in their order."""
    return str(xxhash.xxh3_128_hexdigest(b"".join(columns)))
