"""One rank's side of the traffic of an aggregation: what it multiplies before sending and after receiving.

Any mix of post and pre edges is one product of three: ``y = local x + incoming P outgoing x``, where ``outgoing`` makes
the send buffer (a row as it is: one entry; a partial sum: one entry per edge), the exchange P moves rows between ranks,
and ``incoming`` adds the receive buffer to the targets (a row: one entry per edge; a partial sum: one entry). The
transposed product swaps the two and needs as many rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.ops.row_format import SUM_KEY
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.plan.halo.remote_edges import Arriving, RemoteEdges
from pyg_dist.plan.halo.vertex_cover import Cover

UNIT = -1
"""In place of an edge: an entry whose value is one, whatever the edges' weights are."""

_ENTRIES_AT_A_TIME = 1 << 18
"""What is made of them on the way takes some 10 MB."""


@dataclass(frozen=True)
class Transfer:
    """The lists of one rank. A buffer is grouped by peer; for each peer, rows come before sums, by node.

    Attributes:
        outgoing: ``[s, n]``: send slots by local ids. ``edge`` counts received weights (below); :data:`UNIT` in rows.
        incoming: ``[b, h]``: boundary nodes (local id minus ``num_inner``) by receive slots. ``edge`` counts edge
            storage; :data:`UNIT` for sums.
        send_counts: slots by receiver, ``[P]``.
        recv_counts: slots by sender, ``[P]``.
        weights_to_send: places in edge storage of the values that other ranks multiply by, integers, grouped by these
            ranks: the edges into this rank that are summed at their source.
        weight_send_counts: ``weights_to_send`` by receiver, ``[P]``.
        weight_recv_counts: values that this rank multiplies by, by sender, ``[P]``.
        outgoing_key: int64 ``[s]``, what stands for each slot where its values are rounded at random: the global id of
            a row's node; a sum, of which every rank may make another, adds its maker's multiple of
            :data:`~pyg_dist.backend.ops.row_format.SUM_KEY`.
        incoming_key: int64 ``[h]``, the same for the way back, on which the gradients of rows are sums.
    """

    outgoing: CSR
    incoming: CSR
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    weights_to_send: Tensor
    weight_send_counts: tuple[int, ...]
    weight_recv_counts: tuple[int, ...]
    outgoing_key: Tensor
    incoming_key: Tensor


@dataclass(frozen=True)
class Places:
    """Where a rank keeps its nodes and edges.

    Attributes:
        rank: the rank.
        num_local: nodes of the rank.
        arriving: how many of the remote edges, and of their rows and sums, end here; the others begin here.
        row: local ids of the rows that begin here, int32.
        sum: numbers of the sums that end here among the boundary nodes, int32.
        incoming: boundary nodes by rows that arrive; entries are the edges that end here, as they are stored.
        order: which of these, in the order of the remote edges, each entry is; None: they are in this order.
        first: the place of the first one in edge storage.
    """

    rank: int
    num_local: int
    arriving: Arriving
    row: Tensor
    sum: Tensor
    incoming: CSR
    order: Tensor | None
    first: int

    @staticmethod
    def of(rank: int, node_id: Tensor, row: Tensor, num_inner: int, remote: RemoteEdges, first: int) -> Places:
        """Not collective; O(m) time in the remote edges, which begin or end on the rank.

        Args:
            rank: the rank.
            node_id: global ids of its nodes, ascending.
            row: local id of each of them.
            num_inner: nodes before the boundary.
            remote: the edges.
            first: see the class.
        """
        arriving = remote.arriving(rank)
        ends = remote.rows.node[arriving.rows :], remote.sums.node[: arriving.sums]
        row_here, sum_here = (row[torch.searchsorted(node_id, node)].to(torch.int32) for node in ends)
        sum_here -= num_inner
        start, col, order = ops.csr_from_edges(
            sum_here.index_select(0, remote.sum[: arriving.edges]),
            remote.row[: arriving.edges],
            None,
            node_id.numel() - num_inner,
            arriving.rows,
        )
        incoming = CSR(start, col, None, arriving.rows)
        return Places(rank, node_id.numel(), arriving, row_here, sum_here, incoming, order, first)

    @property
    def num_boundary(self) -> int:
        """Boundary nodes of the rank."""
        return self.incoming.num_rows

    def stored(self, arriving: Tensor) -> Tensor:
        """Numbers of the edges that end here, in the order of edge storage."""
        return arriving if self.order is None else arriving.index_select(0, self.order)

    def stored_at(self) -> Tensor:
        """Where these edges are stored, one after another: int32 (int64 where they are too many)."""
        last = self.first + self.incoming.num_entries
        fits = last <= torch.iinfo(torch.int32).max
        return torch.arange(self.first, last, dtype=torch.int32 if fits else torch.int64)

    def place(self, edge: Tensor) -> Tensor:
        """Where some are stored, which are numbered in the order of the remote edges."""
        if self.order is None:
            return edge + self.first
        place = self.stored_at()
        return torch.empty_like(place).index_copy_(0, self.order.long(), place)[edge]


def transfer(remote: RemoteEdges, cover: Cover, places: Places) -> Transfer:
    """The lists of the rank whose remote edges ``remote`` are. Both sides of a pair agree without talking.

    Not collective; O(m) time and memory in the remote edges m of the rank.
    """
    if remote.row.numel() == 0:
        return no_transfer(remote.num_ranks, places.num_local, places.num_boundary)
    outgoing, send_counts, weight_recv_counts, outgoing_key = _outgoing(remote, cover, places)
    incoming, recv_counts, incoming_key = _incoming(remote, cover, places)
    here = places.arriving.edges
    summed = (~cover.left.index_select(0, remote.row[:here])).nonzero().view(-1)
    lenders = remote.sums.sender[remote.sum[:here][summed]]
    return Transfer(
        outgoing,
        incoming,
        send_counts,
        recv_counts,
        places.place(summed) if summed.numel() else torch.empty(0, dtype=torch.int32),
        tuple(_counts(lenders, remote.num_ranks)),
        weight_recv_counts,
        outgoing_key,
        incoming_key,
    )


def _outgoing(
    remote: RemoteEdges, cover: Cover, places: Places
) -> tuple[CSR, tuple[int, ...], tuple[int, ...], Tensor]:
    """Send slots by local ids, slots by receiver, weights by the rank that has them, and the keys of the slots."""
    here, rows, sums, num_ranks = places.arriving, remote.rows, remote.sums, remote.num_ranks
    slots = _Slots.of(cover, here, rows.receiver, sums.receiver, num_ranks, leaving=True)
    edges = (~cover.left.index_select(0, remote.row[here.edges :])).nonzero().view(-1)
    row, total = (ends[here.edges :].index_select(0, edges) for ends in (remote.row, remote.sum))
    weights = _counts(sums.receiver[total], num_ranks)
    total -= here.sums
    edges_of = torch.bincount(total, minlength=len(sums) - here.sums)[slots.sums]
    ones = torch.ones_like(slots.rows)
    start = torch.cat([ones.new_zeros(1), slots.mixed(ones, edges_of).cumsum(0)])
    col = _mixed(places.row[slots.rows], slots.row_counts, places.row.index_select(0, row - here.rows), weights)
    unit = torch.full((slots.rows.numel(),), UNIT, dtype=torch.int32)
    place = _mixed(unit, slots.row_counts, torch.arange(total.numel(), dtype=torch.int32), weights)
    own = SUM_KEY * (places.rank + 1)
    key = slots.mixed(rows.node[here.rows :][slots.rows], sums.node[here.sums :][slots.sums] + own)
    return CSR(start, col, place, places.num_local), slots.counts, tuple(weights), key


def _incoming(remote: RemoteEdges, cover: Cover, places: Places) -> tuple[CSR, tuple[int, ...], Tensor]:
    """Boundary nodes by receive slots, slots by sender, and the keys of the slots."""
    here, rows, sums, stored = places.arriving, remote.rows, remote.sums, places.incoming
    slots = _Slots.of(cover, here, rows.sender, sums.sender, remote.num_ranks, leaving=False)
    own = SUM_KEY * (places.rank + 1)
    key = slots.mixed(rows.node[slots.rows] + own, sums.node[slots.sums])
    row_slot = torch.empty(here.rows, dtype=torch.int32)
    row_slot[slots.rows] = slots.row_slots()
    if slots.sums.numel() == 0:
        return (
            CSR(stored.rowptr, row_slot.index_select(0, stored.col), places.stored_at(), key.numel()),
            slots.counts,
            key,
        )

    # In each row the edges whose rows arrive, as they are stored, then the sums that do. Some rows at a time.
    sum_start, sum_slot, _ = ops.csr_from_edges(
        places.sum[slots.sums], slots.sum_slots(), None, places.num_boundary, key.numel()
    )
    stored_at, start, end = places.stored_at(), stored.rowptr.clone(), 0
    is_carried = cover.left.index_select(0, stored.col)
    col = torch.empty(int(is_carried.sum()) + sum_slot.numel(), dtype=torch.int32)
    place = torch.full_like(col, UNIT, dtype=stored_at.dtype)
    for low, high in _runs(stored.rowptr):
        entries = slice(int(stored.rowptr[low]), int(stored.rowptr[high]))
        edge = entries.start + is_carried[entries].nonzero().view(-1)
        edge_start = torch.searchsorted(edge, stored.rowptr[low : high + 1])
        sums_of = sum_start[low : high + 1] - sum_start[low]
        start[low : high + 1] = end + edge_start + sums_of
        to = torch.arange(end, end + edge.numel()) + torch.repeat_interleave(sums_of[:-1], edge_start.diff())
        col.index_copy_(0, to, row_slot[stored.col[edge]])
        place.index_copy_(0, to, stored_at[edge])
        to = torch.arange(end, end + int(sums_of[-1])) + torch.repeat_interleave(edge_start[1:], sums_of.diff())
        col.index_copy_(0, to, sum_slot[int(sum_start[low]) : int(sum_start[high])])
        end = int(start[high])
    return CSR(start, col, place, key.numel()), slots.counts, key


def _runs(rowptr: Tensor) -> Iterator[tuple[int, int]]:
    """Consecutive rows, of about so many entries together that what is made of them fits into a cache."""
    low, num_rows = 0, rowptr.numel() - 1
    while low < num_rows:
        limit = int(rowptr[low]) + _ENTRIES_AT_A_TIME
        high = max(low + 1, int(torch.searchsorted(rowptr, limit, right=True)) - 1)
        yield low, min(high, num_rows)
        low = high


class _Slots(NamedTuple):
    """A buffer of one direction: for each peer, rows before sums, by node.

    Attributes:
        rows: which of the rows of this direction are in it, ascending, int64.
        sums: the same of the sums.
        row_counts: rows by peer.
        sum_counts: sums by peer.
    """

    rows: Tensor
    sums: Tensor
    row_counts: list[int]
    sum_counts: list[int]

    @staticmethod
    def of(
        cover: Cover, arriving: Arriving, row_peer: Tensor, sum_peer: Tensor, num_ranks: int, leaving: bool
    ) -> _Slots:
        """Those that a cover sends, of all that arrive or of all that leave; ``..._peer``: of each candidate."""
        found: list[Tensor] = []
        counts: list[list[int]] = []
        ends = (cover.left, row_peer, arriving.rows), (cover.right, sum_peer, arriving.sums)
        for is_sent, peer, count in ends:
            span = slice(count, None) if leaving else slice(0, count)
            found.append(is_sent[span].nonzero().view(-1))
            counts.append(_counts(peer[span][found[-1]], num_ranks))
        return _Slots(found[0], found[1], counts[0], counts[1])

    @property
    def counts(self) -> tuple[int, ...]:
        """Slots by peer."""
        return tuple(map(sum, zip(self.row_counts, self.sum_counts, strict=True)))

    def mixed(self, of_rows: Tensor, of_sums: Tensor) -> Tensor:
        """Values by slot, from those of the rows and of the sums."""
        return _mixed(of_rows, self.row_counts, of_sums, self.sum_counts)

    def row_slots(self) -> Tensor:
        """The slot of each row, int32."""
        return _shifted(self.row_counts, torch.tensor(self.sum_counts).cumsum(0) - torch.tensor(self.sum_counts))

    def sum_slots(self) -> Tensor:
        """The slot of each sum, int32."""
        return _shifted(self.sum_counts, torch.tensor(self.row_counts).cumsum(0))


def _shifted(counts: list[int], shift: Tensor) -> Tensor:
    """Ascending numbers from 0; to those of each peer its shift is added: int32."""
    number = torch.arange(sum(counts), dtype=torch.int32)
    return number.add_(torch.repeat_interleave(shift.to(torch.int32), torch.tensor(counts)))


def _mixed(first: Tensor, first_counts: list[int], second: Tensor, second_counts: list[int]) -> Tensor:
    """For each peer its values of the first, then those of the second."""
    pieces, low, begin = [first[:0]], 0, 0
    for count, more in zip(first_counts, second_counts, strict=True):
        if count:
            pieces.append(first[low : low + count])
        if more:
            pieces.append(second[begin : begin + more])
        low, begin = low + count, begin + more
    return torch.cat(pieces)


def _counts(peer: Tensor, num_ranks: int) -> list[int]:
    counts: list[int] = torch.bincount(peer, minlength=num_ranks).tolist()
    return counts


def no_transfer(num_ranks: int, num_local: int, num_boundary: int) -> Transfer:
    """The lists of a rank without remote edges."""
    none, peers = torch.empty(0, dtype=torch.int64), (0,) * num_ranks
    rowptr, col = torch.zeros(num_boundary + 1, dtype=torch.int64), none.int()
    outgoing, incoming = CSR(rowptr[:1], col, None, num_local), CSR(rowptr, col, None, 0)
    return Transfer(outgoing, incoming, peers, peers, none, peers, peers, none, none)
