"""One rank's side of the traffic of an aggregation: what it multiplies before sending and after receiving.

Any mix of post and pre edges is one product of three: ``y = local x + incoming P outgoing x``, where ``outgoing`` makes
the send buffer (a row as it is: one entry; a partial sum: one entry per edge), the exchange P moves rows between ranks,
and ``incoming`` adds the receive buffer to the targets (a row: one entry per edge; a partial sum: one entry). The
transposed product swaps the two and needs as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.ops.row_format import SUM_KEY
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.halo.plan.cover import Cover, OneWay

UNIT = -1
"""In place of an edge: an entry whose value is one, whatever the edges' weights are."""

_ENTRIES_AT_A_TIME = 1 << 16
"""What is made of them on the way takes some 3 MB."""


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


class ReceiveLists(NamedTuple):
    """What of a :class:`Transfer` is about what arrives."""

    matrix: CSR
    counts: tuple[int, ...]
    key: Tensor
    weights: Tensor
    weight_counts: tuple[int, ...]


class SendLists(NamedTuple):
    """What is about what leaves."""

    matrix: CSR
    counts: tuple[int, ...]
    key: Tensor
    weight_counts: tuple[int, ...]


@dataclass(frozen=True)
class Places:
    """Where a rank keeps its boundary nodes, and the edges that arrive.

    Attributes:
        sum: numbers of the sums that end here among the boundary nodes, int32.
        incoming: boundary nodes by rows that arrive; entries are the edges that end here, as they are stored.
        order: which of these, in the order of the remote edges, each entry is; None: they are in this order.
        first: the place of the first one in edge storage.
    """

    sum: Tensor
    incoming: CSR
    order: Tensor | None
    first: int

    @staticmethod
    def of(arriving: OneWay, local_id: LocalId, num_local: int, num_inner: int, first: int) -> Places:
        """Those of ``arriving`` edges, on a rank of so many nodes, some before the boundary. O(m) time."""
        at = local_id(arriving.sums.node).sub_(num_inner)
        start, col, order = ops.csr_from_edges(
            at.index_select(0, arriving.sum), arriving.row, None, num_local - num_inner, len(arriving.rows)
        )
        return Places(at, CSR(start, col, None, len(arriving.rows)), order, first)

    @property
    def dtype(self) -> torch.dtype:
        """Of places in edge storage: int32, and int64 where they are too many."""
        last = self.first + self.incoming.num_entries
        return torch.int32 if last <= torch.iinfo(torch.int32).max else torch.int64

    def stored(self, arriving: Tensor, out: Tensor | None = None) -> Tensor:
        """Numbers of the edges that end here, in the order of edge storage."""
        if self.order is not None:
            return torch.index_select(arriving, 0, self.order, out=out)
        return arriving if out is None else out.copy_(arriving)

    def places(self) -> Tensor:
        """Where each is stored, in the order of the remote edges."""
        place = torch.arange(self.first, self.first + self.incoming.num_entries, dtype=self.dtype)
        if self.order is None:
            return place
        out = torch.empty_like(place)
        for low in range(0, place.numel(), _ENTRIES_AT_A_TIME):
            some = slice(low, low + _ENTRIES_AT_A_TIME)
            out.index_copy_(0, self.order[some].long(), place[some])
        return out


LocalId = Callable[[Tensor], Tensor]
"""Local ids, int32, of a rank's nodes, given by their global ids."""


def transfer(received: ReceiveLists, sent: SendLists) -> Transfer:
    """Both halves. Both ranks of a pair find the same without messages."""
    if received.key.numel() + sent.key.numel() == 0:
        return no_transfer(len(sent.counts), sent.matrix.num_cols, received.matrix.num_rows)
    return Transfer(
        sent.matrix, received.matrix, sent.counts, received.counts,
        received.weights, received.weight_counts, sent.weight_counts, sent.key, received.key,
    )  # fmt: skip


def send_lists(leaving: OneWay, cover: Cover, local_id: LocalId, num_local: int) -> SendLists:
    """What a rank sends. Not collective; O(m) time and memory in the edges that begin there."""
    slots = _Slots.of(leaving, cover)
    edges = (~cover.left.index_select(0, leaving.row)).nonzero().view(-1)
    row, total = (ends.index_select(0, edges) for ends in (leaving.row, leaving.sum))
    del edges
    weights, edges_of = leaving.sums.counts_of(total), torch.bincount(total, minlength=len(leaving.sums))
    del total
    ones = torch.ones_like(slots.rows)
    start = torch.cat([ones.new_zeros(1), slots.mixed(ones, edges_of[slots.sums]).cumsum_(0)])
    del ones, edges_of
    local = local_id(leaving.rows.node)
    col = _mixed(local[slots.rows], slots.row_counts, local.index_select(0, row), weights)
    del row, local
    unit = torch.full((slots.rows.numel(),), UNIT, dtype=torch.int32)
    place = _mixed(unit, slots.row_counts, torch.arange(sum(weights), dtype=torch.int32), weights)
    del unit
    own = SUM_KEY * (leaving.rank + 1)
    key = slots.mixed(leaving.rows.node[slots.rows], leaving.sums.node[slots.sums].add_(own))
    return SendLists(CSR(start, col, place, num_local), slots.counts, key, tuple(weights))


def receive_lists(arriving: OneWay, cover: Cover, places: Places) -> ReceiveLists:
    """What a rank receives. Not collective; O(m) time and memory in the edges that end there."""
    if bool(cover.left.all()):
        weights, weight_counts = torch.empty(0, dtype=torch.int32), [0] * arriving.num_ranks
    else:
        is_summed = ~cover.left.index_select(0, arriving.row)
        weights = _masked(places.places(), is_summed)
        weight_counts = arriving.sums.counts_of(_masked(arriving.sum, is_summed))
        del is_summed
    slots = _Slots.of(arriving, cover)
    own = SUM_KEY * (arriving.rank + 1)
    key = slots.mixed(arriving.rows.node[slots.rows].add_(own), arriving.sums.node[slots.sums])
    return ReceiveLists(_incoming(slots, cover, places, key.numel()), slots.counts, key, weights, tuple(weight_counts))


def _masked(values: Tensor, mask: Tensor) -> Tensor:
    """Those that a mask selects. torch would make an int64 of each entry of the mask first."""
    return torch.from_numpy(values.numpy()[mask.numpy()])


def _incoming(slots: _Slots, cover: Cover, places: Places, num_slots: int) -> CSR:
    """Boundary nodes by receive slots."""
    stored, dtype = places.incoming, places.dtype
    row_slot = torch.empty(cover.left.numel(), dtype=torch.int32)
    row_slot[slots.rows] = slots.row_slots()
    if slots.sums.numel() == 0:
        col = row_slot.index_select(0, stored.col)
        return CSR(stored.rowptr, col, None, num_slots, first=places.first)

    # In each row the edges whose rows arrive, as they are stored, then the sums that do. Some rows at a time.
    sum_start, sum_slot, _ = ops.csr_from_edges(
        places.sum[slots.sums], slots.sum_slots(), None, stored.num_rows, num_slots
    )
    start, end = stored.rowptr.clone(), 0
    is_carried = cover.left.index_select(0, stored.col)
    col = torch.empty(int(is_carried.sum()) + sum_slot.numel(), dtype=torch.int32)
    place = torch.full_like(col, UNIT, dtype=dtype)
    for low, high in _runs(stored.rowptr):
        entries = slice(int(stored.rowptr[low]), int(stored.rowptr[high]))
        edge = entries.start + is_carried[entries].nonzero().view(-1)
        edge_start = torch.searchsorted(edge, stored.rowptr[low : high + 1])
        sums_of = sum_start[low : high + 1] - sum_start[low]
        start[low : high + 1] = end + edge_start + sums_of
        to = torch.arange(end, end + edge.numel()) + torch.repeat_interleave(sums_of[:-1], edge_start.diff())
        col.index_copy_(0, to, row_slot[stored.col[edge]])
        place.index_copy_(0, to, (edge + places.first).to(dtype))
        to = torch.arange(end, end + int(sums_of[-1])) + torch.repeat_interleave(edge_start[1:], sums_of.diff())
        col.index_copy_(0, to, sum_slot[int(sum_start[low]) : int(sum_start[high])])
        end = int(start[high])
    return CSR(start, col, place, num_slots)


def _runs(rowptr: Tensor) -> Iterator[tuple[int, int]]:
    """Consecutive rows, of about so many entries together that what is made of them fits into a cache."""
    low, num_rows = 0, rowptr.numel() - 1
    while low < num_rows:
        limit = int(rowptr[low]) + _ENTRIES_AT_A_TIME
        high = max(low + 1, int(torch.searchsorted(rowptr, limit, right=True)) - 1)
        yield low, min(high, num_rows)
        low = high


class _Slots(NamedTuple):
    """A buffer of one direction, for each peer rows before sums: which are in it, ascending, and how many by peer."""

    rows: Tensor
    sums: Tensor
    row_counts: list[int]
    sum_counts: list[int]

    @staticmethod
    def of(edges: OneWay, cover: Cover) -> _Slots:
        rows, sums = cover.left.nonzero().view(-1), cover.right.nonzero().view(-1)
        return _Slots(rows, sums, edges.rows.counts_of(rows), edges.sums.counts_of(sums))

    @property
    def counts(self) -> tuple[int, ...]:
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


def no_transfer(num_ranks: int, num_local: int, num_boundary: int) -> Transfer:
    """The lists of a rank without remote edges."""
    none, peers = torch.empty(0, dtype=torch.int64), (0,) * num_ranks
    rowptr, col = torch.zeros(num_boundary + 1, dtype=torch.int64), none.int()
    outgoing, incoming = CSR(rowptr[:1], col, None, num_local), CSR(rowptr, col, None, 0)
    return Transfer(outgoing, incoming, peers, peers, none, peers, peers, none, none)
