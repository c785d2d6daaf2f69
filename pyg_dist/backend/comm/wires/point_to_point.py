"""Collectives of tagged messages: a rank that makes another call than the others never gets their messages.

Every message carries the tag of its call (:mod:`~pyg_dist.backend.comm.checks.calls`) mixed with its own length, and
nothing else is sent for it. What a rank sends is handed over before what it receives: where processors are shared,
gloo's thread otherwise spins on a lock that the waiting thread holds (29 against 18 ms of processor time in an epoch of
cora on the grid). Large messages are the other way round: by gloo a receiver tells the sender to begin, and that word
would wait behind what it sends itself, so that a link would carry one direction at a time. Sums are made in one order
of the ranks, whatever carries the messages: all such wires have the same bits. Large ones are made within machines
first, where as many ranks share each: less crosses between machines.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from ctypes import memmove
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.checks.calls import message_tag
from pyg_dist.backend.comm.connection import wait
from pyg_dist.backend.comm.wires.shared_memory import NO_PLACE, PeerMemory, SharedMemory
from pyg_dist.backend.comm.wires.wire import Flight, Machines, Message, Piece, Wire, by_machine
from pyg_dist.backend.session.state import current

_REDUCE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

# Bytes of the number before the elements of a small sum, and what it becomes where ranks have others.
_NUMBER = 8
_DIFFERENT = -1

# Shapes and dtypes of small sums whose memory is used again.
_MAX_PACKETS = 64

# Bytes above which sums go in pieces: each rank then sends 2 n bytes and not n log2(P).
_IN_PIECES = 1 << 16
# Bytes above which a rank hands over what it receives first. Four ranks on two machines, graph A, a link of 200 Mbit/s:
# 11.4 s an epoch, and 15.9 with what it sends first (benchmarks/two_machines.py).
_LARGE = 1 << 20
# The same of two ranks, which send as much either way, but add and allocate half.
_IN_HALVES = 1 << 20


W = TypeVar("W", bound="PointToPoint")


class PointToPoint(ABC):
    """A :class:`~pyg_dist.backend.comm.wires.wire.Wire` made of messages between two ranks.

    ``ranks`` are the global numbers.
    """

    devices = frozenset({"cpu"})
    has_tags = True

    def __init__(self, rank: int, ranks: Sequence[int]) -> None:
        self.rank, self.size, self.ranks = rank, len(ranks), tuple(ranks)
        self._packets: dict[tuple[torch.Size, torch.dtype], _Packets] = {}
        self._of_rank: dict[int, PeerMemory] | None = None  # who shares memory; None: who does at the time of a message
        self._by_machine: dict[tuple[int, ...], tuple[PointToPoint, PointToPoint | None]] = {}

    def among(self: W, ranks: Sequence[int]) -> W:
        other = copy.copy(self)
        other.rank, other.size, other.ranks = list(ranks).index(self.ranks[self.rank]), len(ranks), tuple(ranks)
        other._packets, other._by_machine = {}, {}
        other._of_rank = dict(current().of(SharedMemory).of_rank)  # another thread sees no change under way
        return other

    def _levels(self) -> tuple[PointToPoint, PointToPoint | None]:
        """The ranks of this machine, and those of its number on theirs; all ranks and None: machines share no work."""
        of_rank, own = current().of(Machines).of_rank, self.ranks[self.rank]
        if of_rank not in self._by_machine:
            machines = by_machine(self.ranks, of_rank) if of_rank else []
            levels: tuple[PointToPoint, PointToPoint | None] = self, None
            if machines:
                inner = next(ranks for ranks in machines if own in ranks)
                levels = self.among(inner), self.among([ranks[inner.index(own)] for ranks in machines])
            self._by_machine[of_rank] = levels
        return self._by_machine[of_rank]

    @abstractmethod
    def send(self, x: Tensor, peer: int, tag: int) -> Message:
        """Start to send a tensor, which has to live until the message has left."""

    @abstractmethod
    def receive(self, x: Tensor, peer: int, tag: int) -> Message:
        """Start to receive into a tensor."""

    def send_rows(self, x: Tensor, low: int, high: int, peer: int, tag: int) -> Message:
        """Start to send some rows of a contiguous tensor."""
        return self.send(x[low:high], peer, tag)

    def receive_rows(self, x: Tensor, low: int, high: int, peer: int, tag: int) -> Message:
        """Start to receive some rows of it."""
        return self.receive(x[low:high], peer, tag)

    def all_reduce(self, x: Tensor, op: str, tag: int, number: int | None = None) -> tuple[Tensor, bool]:
        """See ``Wire``. A number goes before the elements, in the same messages."""
        if number is None and x.nbytes > (_IN_PIECES if self.size > 2 else _IN_HALVES):
            inner, outer = self._levels()
            inner._reduce_in_pieces(x.view(-1), op, tag, outer)
            return x, True
        return self._doubled(x, number, op, tag)

    def _doubled(self, x: Tensor, number: int | None, op: str, tag: int) -> tuple[Tensor, bool]:
        """Recursive doubling. Ranks beyond a power of two hand their tensor to another, and get the result from it."""
        reduce, rank = _REDUCE[op], self.rank
        packets = None if number is None else self._packets_like(x)
        power = 1 << (self.size.bit_length() - 1)
        if rank >= power:
            _wait([self.send(_packed(x, number, packets), rank - power, tag)])
            x, number = self._unpacked(x, packets, rank - power, tag)
            return x if packets is None else x.clone(), number != _DIFFERENT
        if rank < self.size - power:
            theirs, other = self._unpacked(x, packets, rank + power, tag)
            x, number = reduce(x, theirs), number if number == other else _DIFFERENT
        distance = 1
        while distance < power:
            peer = rank ^ distance
            leaving = self.send(_packed(x, number, packets), peer, tag)
            theirs, other = self._unpacked(x, packets, peer, tag, leaving)
            x = reduce(x, theirs) if rank < peer else reduce(theirs, x)
            number = number if number == other else _DIFFERENT
            distance *= 2
        if rank < self.size - power:
            _wait([self.send(_packed(x, number, packets), rank + power, tag)])
        return x, number != _DIFFERENT

    def _packets_like(self, x: Tensor) -> _Packets:
        """For messages of small tensors like ``x``; one after another, they use the same memory."""
        key = x.shape, x.dtype
        packets = self._packets.get(key)
        if packets is None:
            if len(self._packets) == _MAX_PACKETS:
                self._packets.clear()
            packets = self._packets[key] = _Packets(x)
        return packets

    def _unpacked(
        self, like: Tensor, packets: _Packets | None, peer: int, tag: int, *leaving: Message
    ) -> tuple[Tensor, int | None]:
        """A rank's tensor like ``like``, and its number; waits for ``leaving``, too."""
        theirs = torch.empty_like(like) if packets is None else packets.arriving
        _wait([self.receive(theirs, peer, tag), *leaving])
        return (theirs, None) if packets is None else (packets.their_elements, int(packets.their_number[0]))

    def _reduce_in_pieces(self, flat: Tensor, op: str, tag: int, outer: PointToPoint | None = None) -> None:
        """Rank i gets everyone's piece i, reduces them in the order of the ranks, and sends the result to all.

        With ``outer``, these are the ranks of one machine, whose piece i is reduced with that of the other machines.
        """
        size, others = self.size, self._others()
        ends = [r * flat.numel() // size for r in range(size + 1)]
        low, high = ends[self.rank], ends[self.rank + 1]
        own, pieces = flat[low:high], flat.new_empty(size, high - low)  # the rank's own row of them stays unused
        of_others = [(peer, ends[peer], ends[peer + 1]) for peer in others]
        _wait(self._start_all(pieces, flat, of_others, [(peer, peer, peer + 1) for peer in others], tag))
        addends = [*pieces[: self.rank], own, *pieces[self.rank + 1 :]]
        total = addends[0]
        for rank, addend in enumerate(addends[1:], 1):
            total = _REDUCE[op](total, addend, out=total if rank < self.rank else own)
        if outer is not None:
            outer._reduce_in_pieces(own, op, tag)
        _wait(self._start_all(flat, own, [(peer, 0, high - low) for peer in others], of_others, tag))

    def broadcast(self, x: Tensor, source: int, tag: int) -> None:
        """See ``Wire``; along a binomial tree."""
        relative = (self.rank - source) % self.size
        distance = 1
        while distance < self.size:
            if relative < distance:
                if relative + distance < self.size:
                    _wait([self.send(x, (self.rank + distance) % self.size, tag)])
            elif relative < 2 * distance:
                _wait([self.receive(x, (self.rank - distance) % self.size, tag)])
            distance *= 2

    def all_gather(self, out: Tensor, rows: Tensor, counts: Sequence[int], tag: int) -> Flight:
        """See ``Wire``; a rank's own rows are there at once."""
        places, own = [0, *accumulate(counts)], counts[self.rank]
        messages = self._start_all(
            out, rows, self._pieces([0] * self.size, [own] * self.size), self._pieces(places, counts), tag
        )
        if rows.numel():
            _copy_rows(out, places[self.rank], rows, 0, own)
        return Flight(others=messages)

    def reduce_scatter(self, out: Tensor, rows: Tensor, counts: Sequence[int], tag: int) -> Flight:
        """See ``Wire``; added in the order of the ranks."""
        return summed(self, out, rows, counts, tag)

    def all_to_all(self, out: Tensor, rows: Tensor, sent: Sequence[int], received: Sequence[int], tag: int) -> Flight:
        """See ``Wire``; a rank's own rows are there at once."""
        starts, places = [0, *accumulate(sent)], [0, *accumulate(received)]
        messages = self._start_all(out, rows, self._pieces(starts, sent), self._pieces(places, received), tag)
        if sent[self.rank]:
            _copy_rows(out, places[self.rank], rows, starts[self.rank], sent[self.rank])
        return Flight(others=messages)

    def exchange(
        self, out: Tensor, rows: Tensor, receivers: Sequence[Piece], senders: Sequence[Piece], tag: int
    ) -> Flight:
        if not rows.shape[1:].numel():
            return Flight()
        arriving = {piece[0]: self._receive(out, *piece, tag) for piece in senders}
        return Flight(arriving, self._send_all(rows, receivers, tag))

    def _start_all(
        self, out: Tensor, rows: Tensor, receivers: Sequence[Piece], senders: Sequence[Piece], tag: int
    ) -> list[Message]:
        """All messages of a call, started in the order that suits their size; to be waited for in this one."""
        if not rows.shape[1:].numel():
            return []
        begun = [] if rows.nbytes > _LARGE else self._send_all(rows, receivers, tag)
        arriving = [self._receive(out, *piece, tag) for piece in senders]
        return [*arriving, *(begun or self._send_all(rows, receivers, tag))]

    def _send_all(self, rows: Tensor, receivers: Sequence[Piece], tag: int) -> list[Message]:
        """Start to send some rows to each receiver, through this machine's memory where that pays."""
        if rows.nbytes < current().of(SharedMemory).least_bytes:
            return [self.send_rows(rows, low, high, peer, tag) for peer, low, high in receivers]
        messages, row_bytes = list[Message](), rows.nbytes // rows.shape[0]
        for (peer, low, high), place in zip(receivers, self._places(rows, row_bytes, receivers), strict=True):
            if place is not None:
                word = torch.tensor([place], device="cpu")
                messages.append(self.send(word, peer, message_tag(tag, (high - low) * row_bytes)))
            if place in (None, NO_PLACE):
                messages.append(self.send_rows(rows, low, high, peer, tag))
        return messages

    def _places(self, rows: Tensor, row_bytes: int, receivers: Sequence[Piece]) -> list[int | None]:
        """Where each receiver reads its rows; None: it shares no memory with this rank.

        What several get is copied once. No receiver is told before all places are known: it may have read at once.
        """
        places, copies = list[int | None](), dict[tuple[int, int], int]()
        for peer, low, high in receivers:
            way = self._way(peer, (high - low) * row_bytes)
            if way is None:
                places.append(None)
                continue
            address = copies.get((low, high), rows.data_ptr() + low * row_bytes)
            place = way.own.place(address, (high - low) * row_bytes)
            if place != NO_PLACE:
                copies[low, high] = way.own.address_of(place)
            places.append(place)
        return places

    def _way(self, peer: int, num_bytes: int) -> PeerMemory | None:
        """The shared memory by which a message of so many bytes goes to or from a rank; None: it goes by this wire."""
        memory = current().of(SharedMemory)
        if num_bytes < memory.least_bytes:
            return None
        return (memory.of_rank if self._of_rank is None else self._of_rank).get(self.ranks[peer])

    def _receive(self, out: Tensor, peer: int, low: int, high: int, tag: int) -> Message:
        """Start to receive some rows, sent by :meth:`_send_all`."""
        row_bytes = out.nbytes // out.shape[0]
        num_bytes, start = (high - low) * row_bytes, low * row_bytes
        way = self._way(peer, num_bytes)
        if way is None:
            return self.receive_rows(out, low, high, peer, tag)
        told = torch.empty(1, dtype=torch.int64, device="cpu")

        def read() -> None:
            place = int(told)
            if place == NO_PLACE:
                wait(self.receive_rows(out, low, high, peer, tag))
            else:
                way.read(place, out.data_ptr() + start, num_bytes)

        word = self.receive(told, peer, message_tag(tag, num_bytes))
        return Message(Then([word], read), word.peer)

    def _pieces(self, starts: Sequence[int], counts: Sequence[int]) -> list[Piece]:
        """Where the rows of each other rank are, without those that have none."""
        return [(peer, starts[peer], starts[peer] + counts[peer]) for peer in self._others() if counts[peer]]

    def _others(self) -> list[int]:
        """Each rank starts with its successor, so no rank is everyone's first."""
        return [(self.rank + offset) % self.size for offset in range(1, self.size)]


def summed(wire: Wire, out: Tensor, rows: Tensor, counts: Sequence[int], tag: int) -> Flight:
    """``Wire.reduce_scatter`` by an all-to-all: the same bits on every such wire."""
    own = counts[wire.rank]
    addends = rows.new_empty(wire.size * own, *rows.shape[1:])
    flight = wire.all_to_all(addends, rows, counts, [own] * wire.size, tag)

    def add() -> None:
        torch.sum(addends.view(wire.size, *out.shape), 0, dtype=out.dtype, out=out)

    return Flight(others=[Message(Then(flight.others, add), None)])


class Then:
    """Messages, and what is done when all have left or arrived; ``kept`` lives until then."""

    def __init__(self, messages: Sequence[Message], finish: Callable[[], object], *kept: object) -> None:
        self._messages, self._finish, self._kept = messages, finish, kept
        self._is_done = False

    def wait(self) -> None:
        if not self._is_done:  # of several messages a later one may have failed, and all be waited for again
            _wait(self._messages)
            self._finish()
            self._is_done = True


def _copy_rows(out: Tensor, place: int, rows: Tensor, start: int, count: int) -> None:
    """Rows from ``start`` on to ``place`` in ``out``: views of both would take five times as long as a small copy."""
    row_bytes = rows.nbytes // rows.shape[0]
    memmove(out.data_ptr() + place * row_bytes, rows.data_ptr() + start * row_bytes, count * row_bytes)


def _wait(messages: Iterable[Message]) -> None:
    for message in messages:
        wait(message)


class _Packets:
    """Memory for small messages of one shape and dtype, each with a number before the elements."""

    def __init__(self, like: Tensor) -> None:
        with torch.inference_mode(False):  # it serves training, too
            self.leaving, self.arriving = (host.empty(_NUMBER + like.nbytes, dtype=torch.uint8) for _ in range(2))
            self.elements, self.their_elements = (
                packed[_NUMBER:].view(like.dtype).view(like.shape) for packed in (self.leaving, self.arriving)
            )
        self.number, self.their_number = (
            packed.numpy()[:_NUMBER].view(np.int64) for packed in (self.leaving, self.arriving)
        )


def _packed(x: Tensor, number: int | None, packets: _Packets | None) -> Tensor:
    """The tensor to send: ``x``, with a number before it where there is one."""
    if packets is None or number is None:
        return x
    packets.number[0] = number
    packets.elements.copy_(x)
    return packets.leaving
