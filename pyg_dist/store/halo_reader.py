"""Reading one rank's share of a halo store: the files of its parts, and slices of other parts' files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.ops.memory import release_after
from pyg_dist.errors import StoreError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.format import as_torch, storage_dtype
from pyg_dist.store.halo_writer import BLOCK_COLUMNS, block_digest
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.reader import ShardReader, require_digest


@dataclass(frozen=True)
class Ends:
    """Distinct ends of edges between a rank and others."""

    node: Tensor  # global ids, by other rank and ascending for each, int64 ``[k]``
    counts: tuple[int, ...]  # by other rank, ``[P]``
    # whether the stored exchange sends the row, or the sum, of each, bool ``[k]``; None: parts are merged, whose
    # exchange is another one
    is_sent: Tensor | None


@dataclass(frozen=True)
class CrossEdges:
    """Edges between a rank and all others in one direction, by ascending ``sum``, in input order for each."""

    edge_id: Tensor | None  # global ids, int64 ``[m]``; None of edges that leave, whose values the other rank has
    row: Tensor  # the number of each edge's source in ``rows``, int32 ``[m]``
    sum: Tensor  # the number of its target in ``sums``, int32 ``[m]``
    rows: Ends  # the distinct sources
    sums: Ends  # the distinct targets


class HaloStore(ShardReader):
    """A halo store, opened for reading. All that is read is checked by digests."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest.shards)
        self.manifest = manifest
        self.num_parts = manifest.num_parts
        node_ids = (manifest.shards[f"nodes-{part:05d}"].tensors["node_id"] for part in range(self.num_parts))
        self.nodes_of = [spec.num_rows for spec in node_ids]
        """Nodes of each part."""
        self.edges_between = self.between("edges")
        """Edges from part p to part q, int64 ``[P, P]``."""
        self._rows, self._sums = self.between("rows"), self.between("sums")

    def between(self, name: str) -> Tensor:
        """A number of each block: sender by receiver, int64 ``[P, P]``."""
        columns = [getattr(self.shards[f"edges-{q:05d}"].blocks, name) for q in range(self.num_parts)]
        return host.tensor(columns, dtype=torch.int64).T.contiguous()

    def boundary(self) -> list[int]:
        """Nodes with a source in another part, by part."""
        return [self.shards[f"edges-{q:05d}"].blocks.boundary[0] for q in range(self.num_parts)]

    def rows(self, kind: str, name: str, parts: Sequence[int], place: Sequence[Tensor]) -> Tensor:
        """Attribute rows of several parts in one tensor.

        ``kind`` is ``"nodes"`` or ``"edges"``; ``place`` has the position of each row of each part in the result.
        """
        specs = [self.file(f"{kind}-{part:05d}").spec(name) for part in parts]
        shape = (sum(spec.num_rows for spec in specs), *specs[0].shape[1:])
        out = np.empty(shape, storage_dtype(specs[0].dtype))
        for part, where in zip(parts, (rows.numpy() for rows in place), strict=True):

            def put(low: int, piece: Array, where: Array = where) -> None:
                out[where[low : low + len(piece)]] = piece

            self.take(f"{kind}-{part:05d}", name, put)
        return as_torch(out, specs[0].dtype)

    def block(self, sender: int, receiver: int) -> dict[str, Array]:
        """The edges from one part into another: views of the mapped files, which :meth:`release` lets go of."""
        spans = self._spans(sender, receiver)
        views = {
            name: self.file(f"{kind}-{receiver:05d}").rows(name, low, high) for name, (kind, low, high) in spans.items()
        }
        digests = (xxhash.xxh3_128(views[name].view(np.uint8).data).digest() for name in BLOCK_COLUMNS)
        expected = self.shards[f"edges-{receiver:05d}"].blocks.digest[sender]
        path = self.file(f"edges-{receiver:05d}").path
        require_digest(path, f"edges from part {sender}", block_digest(digests), expected)
        return views

    def release(self, receiver: int) -> None:
        """Let go of the pages of the edges into a part."""
        for kind in ("edges", "halo"):
            self.file(f"{kind}-{receiver:05d}").release()

    def _spans(self, sender: int, receiver: int) -> dict[str, tuple[str, int, int]]:
        """The file and the rows of each column of a block."""

        def span(counts: Tensor) -> tuple[int, int]:
            low = int(counts[:sender, receiver].sum())
            return low, low + int(counts[sender, receiver])

        low, high = span(self.edges_between)
        # Edges within the part do not cross, and so have no ``is_post``.
        passed = int(self.edges_between[receiver, receiver]) if sender > receiver else 0
        spans = {name: ("edges", low, high) for name in ("edge_id", "source", "target")}
        spans["is_post"] = ("edges", low - passed, (low if sender == receiver else high) - passed)
        return spans | {"row_id": ("halo", *span(self._rows)), "sum_id": ("halo", *span(self._sums))}

    def node_id(self, parts: Sequence[int]) -> Tensor:
        """The nodes of several parts: global ids, ascending, int64 ``[n]``."""
        ids = [self.tensor(f"nodes-{part:05d}", "node_id") for part in parts]
        return ids[0] if len(ids) == 1 else torch.cat(ids).sort().values

    def inside(self, parts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The edges between nodes of several parts, those of one target in input order."""
        place: dict[int, Array] = {}  # of each part's nodes among those of all, if there are several parts
        if len(parts) > 1:
            nodes = self.node_id(parts)
            place = {p: torch.searchsorted(nodes, self.node_id([p]), out_int32=True).numpy() for p in parts}
        count, low = sum(int(self.edges_between[p, q]) for p in parts for q in parts), 0
        edge_id = host.empty(count, dtype=torch.int64)
        source, target = (host.empty(count, dtype=torch.int32) for _ in range(2))
        for q in parts:

            def columns(p: int, block: dict[str, Array], q: int = q) -> dict[str, Array]:
                pairs = (("source", p), ("target", q))
                return {name: place[part][block[name]] if place else block[name].copy() for name, part in pairs}

            found = self._merged(parts, q, columns)
            high = low + len(found["edge_id"])
            for column, name in ((edge_id, "edge_id"), (source, "source"), (target, "target")):
                column.numpy()[low:high] = found.pop(name)
            low = high
        return edge_id, source, target

    def parts_of(self, rank: int, rank_of_part: Tensor) -> list[int]:
        """The parts of a rank, ascending."""
        parts: list[int] = host.flatnonzero(rank_of_part == rank).tolist()
        if not parts:
            raise StoreError(f"Expected a part for rank {rank} in {self.path} (got {self.num_parts} parts): use fewer")
        return parts

    def on_boundary(self, rank: int, rank_of_part: Tensor, node_id: Tensor) -> Tensor:
        """Which nodes of a rank have a source on another, bool ``[n]``. :meth:`cross` checks the ids read here."""
        found, parts = host.zeros(node_id.numel(), dtype=torch.bool), self.parts_of(rank, rank_of_part)
        for receiver in parts:
            for sender in range(self.num_parts):
                if sender not in parts:
                    place = torch.searchsorted(node_id, torch.from_numpy(self._list(sender, receiver, "sum_id")))
                    found[place.clamp_(max=node_id.numel() - 1)] = True  # of a damaged file, whatever it says
            self.release(receiver)
        return found

    def cross(self, rank: int, rank_of_part: Tensor, leaves: bool, peers: Tensor | None = None) -> CrossEdges:
        """The edges from the parts of ``rank`` into those of other ranks (``leaves``), or from those into them.

        ``peers``: which ranks to read them of, bool ``[P]``; by default all.
        """
        num_ranks = int(rank_of_part.max()) + 1
        parts = [self.parts_of(other, rank_of_part) for other in range(num_ranks)]
        pairs = [(rank, other) if leaves else (other, rank) for other in range(num_ranks)]

        is_read = [True] * num_ranks if peers is None else peers.tolist()
        counts = [
            int(self.edges_between[parts[p]][:, parts[q]].sum()) if p != q and is_read[other] else 0
            for other, (p, q) in enumerate(pairs)
        ]
        edge_id = None if leaves else np.empty(sum(counts), np.int64)
        ends = np.empty((2, sum(counts)), np.int32)
        kinds: tuple[list[_Found], list[_Found]] = ([], [])
        low = 0
        for (sender, receiver), count in zip(pairs, counts, strict=True):
            here = slice(low, low + count)
            found = self._between(parts[sender], parts[receiver], edge_id, ends, here) if count else (_NONE, _NONE)
            for kind, numbers, one in zip(kinds, ends, found, strict=True):
                numbers[here] += sum(len(node) for node, _ in kind)
                kind.append(one)
            low += count
            del found
            release_after(count)

        def joined(kind: list[_Found]) -> Ends:
            node, is_sent = (torch.from_numpy(np.concatenate(of_all)) for of_all in zip(*kind, strict=True))
            return Ends(node, tuple(len(one[0]) for one in kind), is_sent if num_ranks == self.num_parts else None)

        edge = None if edge_id is None else torch.from_numpy(edge_id)
        row, total = torch.from_numpy(ends[0]), torch.from_numpy(ends[1])
        return CrossEdges(edge, row, total, *map(joined, kinds))

    def part_of(self, node: Tensor, rank: int, rank_of_part: Tensor, kind: str, leaves: bool, peers: Tensor) -> Tensor:
        """The part of each of the nodes that :meth:`cross` has for ``kind``, ``"rows"`` or ``"sums"``: int64."""
        own, end = self.parts_of(rank, rank_of_part), 0 if kind == "rows" else 1
        others = [part for part in host.flatnonzero(peers[rank_of_part]).tolist() if part not in own]
        pairs = [(p, q) for p in (own if leaves else others) for q in (others if leaves else own)]
        lists = [self._list(p, q, "row_id" if kind == "rows" else "sum_id") for p, q in pairs]
        ids = np.concatenate([_NONE[0], *lists])
        part = np.repeat(np.array([pair[end] for pair in pairs], np.int64), [len(one) for one in lists])
        order = np.argsort(ids, kind="stable")
        return torch.from_numpy(part[order][np.searchsorted(ids[order], node.numpy())])

    def _between(
        self, senders: Sequence[int], receivers: Sequence[int], edge_id: Array | None, ends: Array, here: slice
    ) -> tuple[_Found, _Found]:
        """Write the edges from one rank's parts into another's to ``edge_id`` and ``ends``; return distinct ends."""
        pairs = [(p, q) for p in senders for q in receivers if int(self.edges_between[p, q])]
        rows, row_of = self._distinct(pairs, "row_id")
        sums, sum_of = self._distinct(pairs, "sum_id")
        sent = [np.zeros(len(ids), np.bool_) for ids in (rows, sums)]

        def columns(p: int, block: dict[str, Array], q: int) -> dict[str, Array]:
            row, total = row_of[p, q][_index(block["source"])], sum_of[p, q][_index(block["target"])]
            for is_sent, number, is_carried in zip(
                sent, (row, total), (block["is_post"], ~block["is_post"]), strict=True
            ):
                is_sent[number[is_carried]] = True
            return {"row": row, "sum": total}

        # All edges of a target end in one part: once the number of each target's edges is known, the edges are written
        # part by part.
        start = np.zeros(len(sums) + 1, np.int64)
        for p, q in pairs:
            number = _index(self.block(p, q)["target"])
            start[1:][sum_of[p, q]] += np.bincount(number, minlength=len(sum_of[p, q]))
        np.cumsum(start, out=start)
        ends[1, here] = np.repeat(np.arange(len(sums), dtype=np.int32), np.diff(start))
        for q in receivers:
            of_part = [p for p, other in pairs if other == q]
            if not of_part:
                continue
            found = self._merged(of_part, q, partial(columns, q=q))
            rowptr, row, order = (
                None if one is None else one.numpy()
                for one in ops.csr_from_edges(
                    torch.from_numpy(found["sum"]), torch.from_numpy(found["row"]), None, len(sums), len(rows)
                )
            )
            assert rowptr is not None
            place = np.repeat(start[:-1] - rowptr[:-1] + here.start, np.diff(rowptr))
            place += np.arange(len(place))
            ends[0, place] = row
            if edge_id is not None:
                edge_id[place] = found["edge_id"] if order is None else found["edge_id"][order]
        return (rows, sent[0]), (sums, sent[1])

    def _distinct(self, pairs: Sequence[tuple[int, int]], name: str) -> tuple[Array, dict[tuple[int, int], Array]]:
        """The distinct ids in a list of some blocks, ascending; and the number of each entry of each list, int32."""
        end = 0 if name == "row_id" else 1  # the lists of different parts have nothing in common
        distinct, numbers, low = [], dict[tuple[int, int], Array](), 0
        for part in sorted({pair[end] for pair in pairs}):
            own = [pair for pair in pairs if pair[end] == part]
            lists = [self._list(p, q, name) for p, q in own]
            ids, number = (
                (lists[0], np.arange(len(lists[0])))
                if len(lists) == 1
                else np.unique(np.concatenate(lists), return_inverse=True)
            )
            bounds = np.cumsum([len(one) for one in lists])[:-1]
            numbers |= zip(own, np.split((number + low).astype(np.int32), bounds), strict=True)
            distinct.append(ids)
            low += len(ids)
        if len(distinct) == 1:
            return distinct[0], numbers
        whole = np.concatenate(distinct)
        order = np.argsort(whole, kind="stable")
        place = np.empty(len(order), np.int32)
        place[order] = np.arange(len(order), dtype=np.int32)
        return whole[order], {pair: place[number] for pair, number in numbers.items()}

    def _list(self, sender: int, receiver: int, name: str) -> Array:
        """``row_id`` or ``sum_id`` of a block, a copy that :meth:`block` has yet to check."""
        kind, low, high = self._spans(sender, receiver)[name]
        rows: Array = self.file(f"{kind}-{receiver:05d}").rows(name, low, high).copy()
        return rows

    def _merged(
        self, senders: Sequence[int], receiver: int, columns: Callable[[int, dict[str, Array]], dict[str, Array]]
    ) -> dict[str, Array]:
        """The ids of the edges from some parts into one, and ``columns`` of each block, all by ascending id."""
        found = []
        for sender in senders:
            block = self.block(sender, receiver)
            found.append({"edge_id": block["edge_id"].copy()} | columns(sender, block))
            del block
            self.release(receiver)
        if len(found) == 1:
            return found[0]
        whole = {name: np.concatenate([one.pop(name) for one in found]) for name in list(found[0])}
        order = torch.from_numpy(whole["edge_id"]).argsort().numpy()
        return {name: column[order] for name, column in whole.items()}


_Found = tuple[Array, Array]
"""Distinct ids, ascending, and whether the stored exchange sends something for each."""
_NONE: _Found = (np.empty(0, np.int64), np.empty(0, np.bool_))


def _index(local: Array) -> Array:
    """The number of each id among the distinct ones, ascending: int32 ``[m]``."""
    mark: Array = np.zeros(int(local.max(initial=-1)) + 1, np.int32)
    mark[local] = 1
    np.cumsum(mark, out=mark)
    mark -= 1
    number: Array = mark[local]
    return number
