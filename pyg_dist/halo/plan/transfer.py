"""One rank's side of the traffic of an aggregation: what it multiplies before sending and after receiving.

Any mix of post and pre edges is one product of three: ``y = local x + incoming P outgoing x``, where ``outgoing`` makes
the send buffer (a row as it is: one entry; a partial sum: one entry per edge), the exchange P moves rows between ranks,
and ``incoming`` adds the receive buffer to the targets (a row: one entry per edge; a partial sum: one entry). The
transposed product swaps the two and needs as many rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.ops.quantize import SUM_KEY
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.halo.plan.cover import Cover, OneWay, masked

UNIT = -1
"""In place of an edge: an entry whose value is one, whatever the edges' weights are."""

_ENTRIES_AT_A_TIME = 1 << 16
"""Their temporaries take some 3 MB."""


Counts = tuple[int, ...]
"""By rank, ``[P]``."""


class RelayLists(NamedTuple):
    """A rank's lists of rows and sums that go by agents (:mod:`pyg_dist.halo.plan.two_level`).

    Of each kind, how many leave for each rank, and how many arrive from each.
    """

    rows: tuple[Counts, Counts]  # by the link
    sums: tuple[Counts, Counts]  # likewise
    gather: tuple[Counts, Counts]  # addends to agents
    spread: tuple[Counts, Counts]  # rows from agents
    into: Tensor  # which of the sums that leave each addend that arrives goes into, int64
    out_of: Tensor  # which of the rows that arrive by the link each row to spread is, int64


@dataclass(frozen=True)
class SendLists:
    """The sending half of a :class:`Transfer`."""

    outgoing: CSR  # ``[s, n]``: send slots by local ids. ``edge`` counts received weights (below); UNIT in rows.
    send_counts: Counts  # slots by receiver; in two levels, of the first piece
    # int64 ``[s]``, what stands for each slot where its values are rounded at random: the global id of a row's node; a
    # sum, of which every rank may make another, adds its maker's multiple of SUM_KEY
    outgoing_key: Tensor
    weight_recv_counts: Counts  # values that this rank multiplies by, by sender


@dataclass(frozen=True)
class ReceiveLists:
    """The receiving half."""

    # ``[b, h]``: boundary nodes (local id minus ``num_inner``) by receive slots. ``edge`` counts edge storage; UNIT for
    # sums.
    incoming: CSR
    recv_counts: Counts  # slots by sender; in two levels, of the first piece
    incoming_key: Tensor  # int64 ``[h]``: keys for the way back, on which the gradients of rows are sums
    # places in edge storage of the values that other ranks multiply by, integers, grouped by these ranks: the edges
    # into this rank that are summed at their source
    weights_to_send: Tensor
    weight_send_counts: Counts  # these by receiver


@dataclass(frozen=True)
class Transfer(ReceiveLists, SendLists):
    """The lists of one rank. A buffer is grouped by peer; for each peer, rows come before sums, by node.

    In two levels a buffer has four pieces like that: what goes between ranks of a machine; by the link rows and sums,
    and where they arrive sums and rows; what goes to agents, or comes from them.
    """

    relay: RelayLists | None = None  # the other pieces; None: there is one level

    @property
    def sent(self) -> tuple[Counts, ...]:
        """How many rows leave for each rank, in messages of each kind."""
        others = () if self.relay is None else tuple(counts[0] for counts in self.relay[:4])
        return self.send_counts, *others

    @property
    def received(self) -> tuple[Counts, ...]:
        """How many arrive from each rank, likewise."""
        others = () if self.relay is None else tuple(counts[1] for counts in self.relay[:4])
        return self.recv_counts, *others

    @property
    def num_passed(self) -> int:
        """Addends that the rank adds as an agent."""
        return 0 if self.relay is None else self.relay.into.numel()

    @cached_property
    def keys(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Outgoing and incoming keys of the first piece; in two levels also of rows and of sums by the link."""
        relay = self.relay
        if relay is None:
            return ((self.outgoing_key, self.incoming_key),)
        leaving, arriving = (
            key.split([*map(sum, counts), key.numel() - sum(map(sum, counts))])
            for key, counts in (
                (self.outgoing_key, (self.send_counts, relay.rows[0], relay.sums[0])),
                (self.incoming_key, (self.recv_counts, relay.sums[1], relay.rows[1])),
            )
        )
        return (leaving[0], arriving[0]), (leaving[1], arriving[2]), (leaving[2], arriving[1])


@dataclass(frozen=True)
class Places:
    """Where a rank keeps its boundary nodes, and the edges that arrive."""

    sum: Tensor  # numbers of the sums that end here among the boundary nodes, int32
    incoming: CSR  # boundary nodes by rows that arrive; entries are the edges that end here, as they are stored
    # which of these, in the order of the remote edges, each entry is; None: they are in this order
    order: Tensor | None
    first: int  # the place of the first one in edge storage

    @staticmethod
    def of(arriving: OneWay, local_id: LocalId, num_local: int, num_inner: int, first: int) -> Places:
        """The places of ``arriving`` edges on a rank with so many nodes, of them so many inner ones. O(m) time."""
        at = local_id(arriving.sums.node).sub_(num_inner)
        start, col, order = ops.csr_from_edges(
            at.index_select(0, arriving.sum), arriving.row, None, num_local - num_inner, len(arriving.rows)
        )
        return Places(at, CSR(start, col, None, len(arriving.rows)), order, first)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of places in edge storage: int32, or int64 where they are too many."""
        return host.integers_to(self.first + self.incoming.num_entries)

    def stored(self, arriving: Tensor, out: Tensor | None = None) -> Tensor:
        """Numbers of the edges that end here, in the order of edge storage."""
        if self.order is not None:
            return torch.index_select(arriving, 0, self.order, out=out)
        return arriving if out is None else out.copy_(arriving)

    def places(self) -> Tensor:
        """Where each is stored, in the order of the remote edges."""
        place = host.arange(self.first, self.first + self.incoming.num_entries, dtype=self.dtype)
        if self.order is None:
            return place
        out = torch.empty_like(place)
        for low in range(0, place.numel(), _ENTRIES_AT_A_TIME):
            some = slice(low, low + _ENTRIES_AT_A_TIME)
            out.scatter_(0, self.order[some].long(), place[some])
        return out


LocalId = Callable[[Tensor], Tensor]
"""Local ids, int32, of a rank's nodes, given by their global ids."""


def transfer(received: ReceiveLists, sent: SendLists, relay: RelayLists | None = None) -> Transfer:
    """Both halves. Both ranks of a pair find the same without messages."""
    if relay is None and received.incoming_key.numel() + sent.outgoing_key.numel() == 0:
        return no_transfer(len(sent.send_counts), sent.outgoing.num_cols, received.incoming.num_rows)
    return Transfer(**vars(sent), **vars(received), relay=relay)


def send_lists(leaving: OneWay, slots: Slots, local_id: LocalId, num_local: int) -> SendLists:
    """The sending half of a rank. Not collective; O(m) time and memory in the edges that begin there."""
    edges = host.flatnonzero(~slots.left.index_select(0, leaving.row))
    row, total = (ends.index_select(0, edges) for ends in (leaving.row, leaving.sum))
    del edges
    weights, edges_of = leaving.sums.counts_of(total), torch.bincount(total, minlength=len(leaving.sums))
    ones = torch.ones_like(slots.rows)
    start = torch.cat([ones.new_zeros(1), slots.mixed(ones, edges_of[slots.sums]).cumsum_(0)])
    del ones
    local = local_id(leaving.rows.node)
    col = host.empty(int(start[-1]), dtype=torch.int32)
    place = torch.full_like(col, UNIT)
    col.scatter_(0, start.index_select(0, slots.row_slot), local.index_select(0, slots.rows))
    # The edges of a sum follow one another, here and there: a sum's are all as far from their places.
    shift = torch.zeros_like(edges_of)
    shift[slots.sums] = start[slots.sum_slot] - (edges_of.cumsum(0) - edges_of)[slots.sums]
    del edges_of
    for low in range(0, row.numel(), _ENTRIES_AT_A_TIME):
        some = slice(low, low + _ENTRIES_AT_A_TIME)
        number = host.arange(low, min(some.stop, row.numel()))
        to = shift.index_select(0, total[some]) + number
        col.scatter_(0, to, local.index_select(0, row[some]))
        place.scatter_(0, to, number.to(torch.int32))
    del row, total, local
    own = SUM_KEY * (leaving.rank + 1)
    key = slots.mixed(leaving.rows.node[slots.rows], leaving.sums.node[slots.sums].add_(own))
    return SendLists(CSR(start, col, place, num_local), slots.counts, key, tuple(weights))


def receive_lists(arriving: OneWay, slots: Slots, places: Places) -> ReceiveLists:
    """The receiving half of a rank. Not collective; O(m) time and memory in the edges that end there."""
    if bool(slots.left.all()):
        weights, weight_counts = host.empty(0, dtype=torch.int32), [0] * arriving.num_ranks
    else:
        is_summed = ~slots.left.index_select(0, arriving.row)
        weights = masked(places.places(), is_summed)
        weight_counts = arriving.sums.counts_of(masked(arriving.sum, is_summed))
        del is_summed
    own = SUM_KEY * (arriving.rank + 1)
    key = slots.mixed(arriving.rows.node[slots.rows].add_(own), arriving.sums.node[slots.sums])
    return ReceiveLists(_incoming(slots, places, key.numel()), slots.counts, key, weights, tuple(weight_counts))


def _incoming(slots: Slots, places: Places, num_slots: int) -> CSR:
    stored, dtype = places.incoming, places.dtype
    row_slot = host.empty(slots.left.numel(), dtype=torch.int32)
    row_slot[slots.rows] = slots.row_slot.to(torch.int32)
    if slots.sums.numel() == 0:
        col = row_slot.index_select(0, stored.col)
        return CSR(stored.rowptr, col, None, num_slots, first=places.first)

    # In each row the edges whose rows arrive, as they are stored, then the sums that do. Some rows at a time.
    sum_start, sum_slot, _ = ops.csr_from_edges(
        places.sum[slots.sums], slots.sum_slot.to(torch.int32), None, stored.num_rows, num_slots
    )
    start, end = stored.rowptr.clone(), 0
    is_carried = slots.left.index_select(0, stored.col)
    col = host.empty(int(is_carried.sum()) + sum_slot.numel(), dtype=torch.int32)
    place = torch.full_like(col, UNIT, dtype=dtype)
    for low, high in _runs(stored.rowptr):
        entries = slice(int(stored.rowptr[low]), int(stored.rowptr[high]))
        edge = entries.start + host.flatnonzero(is_carried[entries])
        before = torch.cat([edge.new_zeros(1), is_carried[entries].cumsum(0)])
        edge_start = before.index_select(0, stored.rowptr[low : high + 1] - entries.start)
        sums_of = sum_start[low : high + 1] - sum_start[low]
        start[low : high + 1] = end + edge_start + sums_of
        to = host.arange(end, end + edge.numel()) + torch.repeat_interleave(sums_of[:-1], edge_start.diff())
        col.scatter_(0, to, row_slot.index_select(0, stored.col.index_select(0, edge)))
        place.scatter_(0, to, (edge + places.first).to(dtype))
        to = host.arange(end, end + int(sums_of[-1])) + torch.repeat_interleave(edge_start[1:], sums_of.diff())
        col.scatter_(0, to, sum_slot[int(sum_start[low]) : int(sum_start[high])])
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


class Slots(NamedTuple):
    """The rows and sums in a rank's buffer, among those of some edges, and their slots."""

    left: Tensor  # which rows carry their edges, bool ``[L]``
    rows: Tensor  # those in the buffer, int64
    sums: Tensor  # likewise
    row_slot: Tensor  # where each of these rows is, int64
    sum_slot: Tensor  # and each of these sums
    counts: Counts  # slots by peer; in two levels, of the first piece

    @staticmethod
    def of(edges: OneWay, cover: Cover) -> Slots:
        """In one level: for each peer rows before sums."""
        rows, sums = host.flatnonzero(cover.left), host.flatnonzero(cover.right)
        row_counts, sum_counts = host.tensor([edges.rows.counts_of(rows), edges.sums.counts_of(sums)])
        row_slot = _shifted(row_counts, sum_counts.cumsum(0) - sum_counts)
        counts = tuple((row_counts + sum_counts).tolist())
        return Slots(cover.left, rows, sums, row_slot, _shifted(sum_counts, row_counts.cumsum(0)), counts)

    def mixed(self, of_rows: Tensor, of_sums: Tensor) -> Tensor:
        """Values by slot, from those of the rows and of the sums."""
        out = of_rows.new_empty(of_rows.numel() + of_sums.numel())
        return out.scatter_(0, self.row_slot, of_rows).scatter_(0, self.sum_slot, of_sums)


def _shifted(counts: Tensor, shift: Tensor) -> Tensor:
    """Ascending numbers from 0; to those of each peer its shift is added."""
    return host.arange(int(counts.sum())).add_(torch.repeat_interleave(shift, counts))


def no_transfer(num_ranks: int, num_local: int, num_boundary: int) -> Transfer:
    """The lists of a rank without remote edges."""
    none, peers = host.empty(0, dtype=torch.int64), (0,) * num_ranks
    rowptr, col = host.zeros(num_boundary + 1, dtype=torch.int64), none.int()
    outgoing, incoming = CSR(rowptr[:1], col, None, num_local), CSR(rowptr, col, None, 0)
    return Transfer(outgoing, peers, none, peers, incoming, peers, none, none, peers)
