"""What one rank needs of a halo store: its parts' files, and its slices of the others'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from pyg_dist.errors import StoreError
from pyg_dist.store.folder import require_digest
from pyg_dist.store.format import as_torch, storage_dtype
from pyg_dist.store.halo_writer import BLOCK_COLUMNS, block_digest
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.shard_reader import PIECE_BYTES, ShardReader

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Ends:
    """Distinct ends of edges that cross, in the order (sender, receiver, node).

    Attributes:
        sender, receiver: ranks, int64 ``[k]``.
        node: global ids, int64 ``[k]``.
    """

    sender: Tensor
    receiver: Tensor
    node: Tensor


@dataclass(frozen=True)
class CrossEdges:
    """Edges that begin or end in some parts, and do not do both. By ascending ``edge_id``.

    Attributes:
        edge_id: global ids, int64 ``[m]``.
        row, sum: which of ``rows`` is each edge's source, and of ``sums`` its target, int32 ``[m]``.
        is_post: how the stored exchange carries them, bool ``[m]``.
        rows: the distinct sources.
        sums: the distinct targets.
    """

    edge_id: Tensor
    row: Tensor
    sum: Tensor
    is_post: Tensor
    rows: Ends
    sums: Ends


@dataclass(frozen=True)
class RankEdges:
    """The nodes of some parts and all edges that touch them.

    Attributes:
        node_id: global ids, ascending, int64 ``[n]``.
        edge_id: edges with both ends here, by ascending target or by id, int64 ``[l]``.
        source, target: places of their ends in ``node_id``, int32 ``[l]``.
        cross: edges with one end here.
        load: edges into each rank's nodes, int64 ``[P]``.
    """

    node_id: Tensor
    edge_id: Tensor
    source: Tensor
    target: Tensor
    cross: CrossEdges
    load: Tensor


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

    def rank_edges(self, rank: int, rank_of_part: Tensor) -> RankEdges:
        """The nodes and edges of the parts that ``rank`` holds.

        Args:
            rank: the rank.
            rank_of_part: int64 ``[P]``.

        Raises:
            StoreError: Something that is needed is missing or damaged.
        """
        parts = self.parts_of(rank, rank_of_part)
        owner = rank_of_part.tolist()
        ids = [self.tensor(f"nodes-{part:05d}", "node_id") for part in parts]
        node_id = ids[0] if len(ids) == 1 else torch.cat(ids).sort().values
        place = {part: _place(node_id, own, len(ids) == 1) for part, own in zip(parts, ids, strict=True)}
        del ids
        inside = [(p, q) for q in parts for p in parts]
        across = [
            (p, q)
            for p in range(self.num_parts)
            for q in range(self.num_parts)
            if (owner[p] == rank) != (owner[q] == rank) and int(self.edges_between[p, q])
        ]
        cross = self._cross(across, owner)
        count = sum(int(self.edges_between[pair]) for pair in inside)
        edge_id, ends, low = torch.empty(count, dtype=torch.int64), torch.empty(2, count, dtype=torch.int32), 0
        for p, q in inside:
            block = self.block(p, q)
            high = low + len(block["edge_id"])
            edge_id[low:high] = torch.from_numpy(np.array(block["edge_id"]))
            for row, (part, name) in enumerate(((p, "source"), (q, "target"))):
                where, local = place[part], torch.from_numpy(np.array(block[name]))
                ends[row, low:high] = local if where is None else where[local]
            self.release(p, q)
            low = high
        if len(parts) > 1:
            edge_id, order = edge_id.sort()
            for row in ends:
                row.copy_(row[order])
            del order
        into = torch.zeros(int(rank_of_part.max()) + 1, dtype=torch.int64)
        load = into.index_add_(0, rank_of_part, self.edges_between.sum(0))
        return RankEdges(node_id, edge_id, ends[0], ends[1], cross, load)

    def parts_of(self, rank: int, rank_of_part: Tensor) -> list[int]:
        """The parts of a rank, ascending."""
        parts: list[int] = (rank_of_part == rank).nonzero().view(-1).tolist()
        if not parts:
            raise StoreError(f"Expected a part for rank {rank} in {self.path} (got {self.num_parts} parts): use fewer")
        return parts

    def _cross(self, pairs: Sequence[tuple[int, int]], owner: Sequence[int]) -> CrossEdges:
        """Rows and sums are numbered by the lists that the store has of them, which are merged where parts are."""
        count, low = sum(int(self.edges_between[pair]) for pair in pairs), 0
        found = {name: np.empty(count, np.int32) for name in ("row_id", "sum_id")}
        edge_id = torch.empty(count, dtype=torch.int64)
        is_post = np.empty(count, np.bool_)
        of_ranks: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for p, q in pairs:
            of_ranks.setdefault((owner[p], owner[q]), []).append((p, q))
        ends: dict[str, list[Array]] = {"row_id": [], "sum_id": []}
        for ranks in sorted(of_ranks):
            before = {name: sum(map(len, lists)) for name, lists in ends.items()}
            place = {}
            for name, kind in (("row_id", "source"), ("sum_id", "target")):
                lists = [self.block_list(p, q, name) for p, q in of_ranks[ranks]]
                distinct, number = np.unique(np.concatenate(lists), return_inverse=True)
                ends[name].append(distinct)
                number = (number + before[name]).astype(np.int32)
                place[name] = (kind, np.split(number, np.cumsum([len(ids) for ids in lists])[:-1]))
            for turn, (p, q) in enumerate(of_ranks[ranks]):
                block = self.block(p, q)
                high = low + len(block["edge_id"])
                edge_id.numpy()[low:high], is_post[low:high] = block["edge_id"], block["is_post"]
                for name, (kind, numbers) in place.items():
                    found[name][low:high] = numbers[turn][_index(block[kind])]
                self.release(p, q)
                low = high
        edge_id, order = edge_id.sort()
        ordered = {name: torch.from_numpy(found.pop(name))[order] for name in ("row_id", "sum_id")}
        keys = sorted(of_ranks)
        return CrossEdges(
            edge_id,
            ordered["row_id"],
            ordered["sum_id"],
            torch.from_numpy(is_post)[order],
            *(_ends(keys, ends[name]) for name in ("row_id", "sum_id")),
        )

    def block_list(self, sender: int, receiver: int, name: str) -> Array:
        """``row_id`` or ``sum_id`` of a block, a copy that :meth:`block` has yet to check."""
        kind, low, high = self._spans(sender, receiver)[name]
        rows: Array = self.file(f"{kind}-{receiver:05d}").rows(name, low, high).copy()
        return rows


def _ends(keys: Sequence[tuple[int, int]], lists: Sequence[Array]) -> Ends:
    """The lists of pairs of ranks, one after another."""
    sizes = torch.tensor([len(ids) for ids in lists], dtype=torch.int64)
    pair = torch.tensor(keys, dtype=torch.int64).view(-1, 2).repeat_interleave(sizes, 0)
    node = torch.from_numpy(np.concatenate(lists)) if lists else torch.empty(0, dtype=torch.int64)
    return Ends(pair[:, 0].contiguous(), pair[:, 1].contiguous(), node)


def _num_distinct(ids: Array, bound: int) -> int:
    is_there = np.zeros(bound, np.bool_)
    is_there[ids] = True
    return int(is_there.sum())


def _place(node_id: Tensor, own: Tensor, is_all: bool) -> Tensor | None:
    """The place of a part's nodes among all of a rank's, int32; None: they are all."""
    return None if is_all else torch.searchsorted(node_id, own).to(torch.int32)


def _index(local: Array) -> Array:
    """The number of each id among the distinct ones, ascending: int32 ``[m]``."""
    mark: Array = np.zeros(int(local.max(initial=-1)) + 1, np.int32)
    mark[local] = 1
    np.cumsum(mark, out=mark)
    mark -= 1
    number: Array = mark[local]
    return number
