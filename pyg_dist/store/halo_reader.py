"""What one rank needs of a halo store: its parts' files, and its slices of the others'."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.ops.memory import release_after
from pyg_dist.errors import StoreError
from pyg_dist.store.folder import require_digest
from pyg_dist.store.format import as_torch, storage_dtype
from pyg_dist.store.halo_writer import BLOCK_COLUMNS, block_digest
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.shard_reader import PIECE_BYTES, ShardReader

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ends:
    """Distinct ends of a rank's edges that cross, those that it receives first, by other rank and node.

    Attributes:
        sender, receiver: ranks, int32 ``[k]``.
        node: global ids, int64 ``[k]``.
        is_sent: what the stored exchange sends a row of, or a sum for, bool ``[k]``; None: parts are merged, and
            theirs is another one.
    """

    sender: Tensor
    receiver: Tensor
    node: Tensor
    is_sent: Tensor | None


@dataclass(frozen=True)
class CrossEdges:
    """Edges that end on a rank, then those that begin there; not those that do both.

    By ascending ``sum``, in input order for each.

    Attributes:
        edge_id: global ids, int64 ``[m]``.
        row, sum: which of ``rows`` is each edge's source, and of ``sums`` its target, int32 ``[m]``.
        rows: the distinct sources.
        sums: the distinct targets.
    """

    edge_id: Tensor
    row: Tensor
    sum: Tensor
    rows: Ends
    sums: Ends


class HaloStore(ShardReader):
    """A halo store, opened for reading. Whatever is handed out was checked by its digest.

    Args:
        path: the folder.
        manifest: its manifest.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest)
        self.num_parts = manifest.num_parts
        node_ids = (manifest.shards[f"nodes-{part:05d}"].tensors["node_id"] for part in range(self.num_parts))
        self.nodes_of = [spec.num_rows for spec in node_ids]
        """Nodes of each part."""
        self.edges_between = self.between("edges")
        """Edges from part p to part q, int64 ``[P, P]``."""
        self._rows, self._sums = self.between("rows"), self.between("sums")

    def between(self, name: str) -> Tensor:
        """A number of each block: sender by receiver, int64 ``[P, P]``."""
        columns = [self.manifest.shards[f"edges-{q:05d}"].blocks[name] for q in range(self.num_parts)]
        return torch.tensor(columns, dtype=torch.int64).T.contiguous()

    def boundary(self) -> list[int]:
        """Nodes with a source in another part, by part."""
        return [self.manifest.shards[f"edges-{q:05d}"].blocks["boundary"][0] for q in range(self.num_parts)]

    def rows(self, kind: str, name: str, parts: Sequence[int], place: Sequence[Tensor]) -> Tensor:
        """Attribute rows of several parts in one tensor.

        Args:
            kind: ``"nodes"`` or ``"edges"``.
            name: of the attribute.
            parts: whose rows.
            place: where each row of each part goes in the result, int64 by part; together a permutation.
        """
        specs = [self.file(f"{kind}-{part:05d}").spec(name) for part in parts]
        shape = (sum(spec.num_rows for spec in specs), *specs[0].shape[1:])
        out = as_torch(np.empty(shape, storage_dtype(specs[0].dtype)), specs[0].dtype)
        for part, spec, where in zip(parts, specs, place, strict=True):
            file, hasher, low = self.file(f"{kind}-{part:05d}"), xxhash.xxh3_128(), 0
            for piece in file.pieces(name, num_bytes=PIECE_BYTES):
                hasher.update(piece.reshape(-1).view(np.uint8).data)
                high = low + len(piece)
                out[where[low:high]] = as_torch(np.array(piece), spec.dtype)
                low = high
            expected = self.manifest.shards[f"{kind}-{part:05d}"].digests[name]
            require_digest(file.path, name, str(hasher.hexdigest()), expected)
        return out

    def block(self, sender: int, receiver: int) -> dict[str, Array]:
        """The edges from one part into another: views of the mapped files, which :meth:`release` lets go of."""
        spans = self._spans(sender, receiver)
        views = {
            name: self.file(f"{kind}-{receiver:05d}").rows(name, low, high) for name, (kind, low, high) in spans.items()
        }
        digests = (xxhash.xxh3_128(views[name].view(np.uint8).data).digest() for name in BLOCK_COLUMNS)
        expected = self.manifest.shards[f"edges-{receiver:05d}"].blocks["digest"][sender]
        path = self.file(f"edges-{receiver:05d}").path
        require_digest(path, f"edges from part {sender}", block_digest(digests), expected)
        return views

    def check_blocks(self, receiver: int) -> None:
        """Check all edges into a part, block by block, and the numbers that the manifest has of them.

        Raises:
            StoreError: A block is damaged, or not what its numbers say.
        """
        shard = self.manifest.shards[f"edges-{receiver:05d}"]
        on_boundary = np.zeros(self.nodes_of[receiver], np.bool_)
        for sender in range(self.num_parts):
            block = self.block(sender, receiver)
            if sender != receiver:
                is_post = block["is_post"]
                on_boundary[block["target"]] = True
                found = {
                    "post_edges": int(is_post.sum()),
                    "post_rows": _num_distinct(block["source"][is_post], self.nodes_of[sender]),
                    "pre_sums": _num_distinct(block["target"][~is_post], self.nodes_of[receiver]),
                }
                for name, number in found.items():
                    self._require_number(name, shard.blocks[name][sender], number, receiver)
            del block
            self.release(sender, receiver)
        self._require_number("boundary", shard.blocks["boundary"][0], int(on_boundary.sum()), receiver)

    def _require_number(self, name: str, expected: int, found: int, receiver: int) -> None:
        if found != expected:
            raise StoreError(
                f"Expected {expected} '{name}' of the edges into part {receiver} in {self.path} (got {found}): write "
                f"the store again"
            )

    def release(self, sender: int, receiver: int) -> None:
        """Let go of a block's pages."""
        for name, (kind, low, high) in self._spans(sender, receiver).items():
            self.file(f"{kind}-{receiver:05d}").release(name, low, high)

    def _spans(self, sender: int, receiver: int) -> dict[str, tuple[str, int, int]]:
        """The file and the rows of each column of a block."""

        def span(counts: Tensor) -> tuple[int, int]:
            low = int(counts[:sender, receiver].sum())
            return low, low + int(counts[sender, receiver])

        low, high = span(self.edges_between)
        own = int(self.edges_between[receiver, receiver])
        crossing = (low, low) if sender == receiver else (low, high)
        if sender >= receiver:
            crossing = (crossing[0] - own * (sender > receiver), crossing[1] - own * (sender > receiver))
        spans = {name: ("edges", low, high) for name in ("edge_id", "source", "target")}
        spans["is_post"] = ("edges", *crossing)
        return spans | {"row_id": ("halo", *span(self._rows)), "sum_id": ("halo", *span(self._sums))}

    def node_id(self, parts: Sequence[int]) -> Tensor:
        """The nodes of several parts: global ids, ascending, int64 ``[n]``."""
        ids = [self.tensor(f"nodes-{part:05d}", "node_id") for part in parts]
        return ids[0] if len(ids) == 1 else torch.cat(ids).sort().values

    def inside(self, parts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """The edges between nodes of several parts, those of one target in input order.

        Returns:
            Global ids, int64 ``[l]``; and the places of sources and targets in :meth:`node_id`, int32 ``[l]``.

        Raises:
            StoreError: Something that is needed is missing or damaged.
        """
        nodes = None if len(parts) == 1 else self.node_id(parts)
        place = {} if nodes is None else {part: _places(nodes, self.node_id([part])) for part in parts}
        count, low = sum(int(self.edges_between[p, q]) for p in parts for q in parts), 0
        edge_id = torch.empty(count, dtype=torch.int64)
        source, target = (torch.empty(count, dtype=torch.int32) for _ in range(2))
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
        parts: list[int] = (rank_of_part == rank).nonzero().view(-1).tolist()
        if not parts:
            raise StoreError(f"Expected a part for rank {rank} in {self.path} (got {self.num_parts} parts): use fewer")
        return parts

    def cross(self, rank: int, rank_of_part: Tensor) -> CrossEdges:
        """The edges between the parts of ``rank`` and those of other ranks.

        Args:
            rank: the rank.
            rank_of_part: int64 ``[P]``.

        Raises:
            StoreError: Something that is needed is missing or damaged.
        """
        num_ranks = int(rank_of_part.max()) + 1
        parts = [self.parts_of(other, rank_of_part) for other in range(num_ranks)]
        others = [other for other in range(num_ranks) if other != rank]
        pairs = [(other, rank) for other in others] + [(rank, other) for other in others]
        between = {(p, q): int(self.edges_between[parts[p]][:, parts[q]].sum()) for p, q in pairs}
        edge_id = torch.empty(sum(between.values()), dtype=torch.int64)
        ends = torch.empty(2, edge_id.numel(), dtype=torch.int32)
        kinds: list[list[Ends]] = [[], []]
        low, first = 0, [0, 0]
        for (sender, receiver), count in between.items():
            if count == 0:
                continue
            found = self._between(parts[sender], parts[receiver])
            edge_id[low : low + count] = found.edge_id
            for number, kind in enumerate((found.rows, found.sums)):
                end = torch.full((kind.node.numel(),), sender, dtype=torch.int32)
                kinds[number].append(Ends(end, torch.full_like(end, receiver), kind.node, kind.is_sent))
                torch.add((found.row, found.sum)[number], first[number], out=ends[number, low : low + count])
                first[number] += end.numel()
            low += count
            del found
            release_after(count)
        return CrossEdges(edge_id, ends[0], ends[1], *map(_joined, kinds))

    def _between(self, senders: Sequence[int], receivers: Sequence[int]) -> CrossEdges:
        """The edges from parts of one rank into parts of another; ranks are left to the caller."""
        pairs = [(p, q) for p in senders for q in receivers if int(self.edges_between[p, q])]
        rows, row_of = self._distinct(pairs, "row_id")
        sums, sum_of = self._distinct(pairs, "sum_id")
        is_merged = len(senders) > 1 or len(receivers) > 1
        is_sent = [None if is_merged else np.zeros(len(ids), np.bool_) for ids in (rows, sums)]

        def columns(p: int, block: dict[str, Array], q: int) -> dict[str, Array]:
            row, total = row_of[p, q][_index(block["source"])], sum_of[p, q][_index(block["target"])]
            for sent, number, is_carried in zip(
                is_sent, (row, total), (block["is_post"], ~block["is_post"]), strict=True
            ):
                if sent is not None:
                    sent[number[is_carried]] = True
            return {"row": row, "sum": total}

        found = [
            self._merged([p for p, other in pairs if other == q], q, partial(columns, q=q))
            for q in receivers
            if any(other == q for _, other in pairs)
        ]
        edge_id, row, total = (
            torch.from_numpy(np.concatenate([one[name] for one in found])) for name in ("edge_id", "row", "sum")
        )
        del found
        start, row, order = ops.csr_from_edges(total, row, None, len(sums), len(rows))
        if order is not None:
            edge_id = edge_id[order]
            total = torch.repeat_interleave(torch.arange(len(sums), dtype=torch.int32), start.diff())
        none = torch.empty(0, dtype=torch.int32)
        return CrossEdges(
            edge_id,
            row,
            total,
            *(
                Ends(none, none, torch.from_numpy(node), None if sent is None else torch.from_numpy(sent))
                for node, sent in zip((rows, sums), is_sent, strict=True)
            ),
        )

    def _distinct(self, pairs: Sequence[tuple[int, int]], name: str) -> tuple[Array, dict[tuple[int, int], Array]]:
        """The distinct ids in a list of some blocks, ascending; and the number of each entry of each list, int32."""
        lists = [self._list(p, q, name) for p, q in pairs]
        if len(lists) == 1:
            return lists[0], {pairs[0]: np.arange(len(lists[0]), dtype=np.int32)}
        distinct, number = np.unique(np.concatenate(lists), return_inverse=True)
        bounds = np.cumsum([len(ids) for ids in lists])[:-1]
        return distinct, dict(zip(pairs, np.split(number.astype(np.int32), bounds), strict=True))

    def _list(self, sender: int, receiver: int, name: str) -> Array:
        """``row_id`` or ``sum_id`` of a block, a copy that :meth:`block` has yet to check."""
        kind, low, high = self._spans(sender, receiver)[name]
        rows: Array = self.file(f"{kind}-{receiver:05d}").rows(name, low, high).copy()
        return rows

    def _merged(
        self, senders: Sequence[int], receiver: int, columns: Callable[[int, dict[str, Array]], dict[str, Array]]
    ) -> dict[str, Array]:
        """The ids of the edges from some parts into one, and what is made of their blocks; of each target in order."""
        found = []
        for sender in senders:
            block = self.block(sender, receiver)
            found.append({"edge_id": block["edge_id"].copy()} | columns(sender, block))
            del block
            self.release(sender, receiver)
        if len(found) == 1:
            return found[0]
        whole = {name: np.concatenate([one.pop(name) for one in found]) for name in list(found[0])}
        order = torch.from_numpy(whole["edge_id"]).argsort().numpy()
        return {name: column[order] for name, column in whole.items()}


def _joined(ends: Sequence[Ends]) -> Ends:
    """One after another."""
    if not ends:
        none = torch.empty(0, dtype=torch.int32)
        return Ends(none, none, none.long(), none.bool())
    sent = [one.is_sent for one in ends if one.is_sent is not None]
    sender, receiver, node = (torch.cat([getattr(e, name) for e in ends]) for name in ("sender", "receiver", "node"))
    return Ends(sender, receiver, node, torch.cat(sent) if len(sent) == len(ends) else None)


def _num_distinct(ids: Array, bound: int) -> int:
    is_there = np.zeros(bound, np.bool_)
    is_there[ids] = True
    return int(is_there.sum())


def _places(node_id: Tensor, own: Tensor) -> Array:
    """The place of a part's nodes among all of a rank's, int32."""
    place: Array = torch.searchsorted(node_id, own, out_int32=True).numpy()
    return place


def _index(local: Array) -> Array:
    """The number of each id among the distinct ones, ascending: int32 ``[m]``."""
    mark: Array = np.zeros(int(local.max(initial=-1)) + 1, np.int32)
    mark[local] = 1
    np.cumsum(mark, out=mark)
    mark -= 1
    number: Array = mark[local]
    return number
