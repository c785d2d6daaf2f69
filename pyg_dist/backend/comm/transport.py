"""Point-to-point or all-to-all: messages travel one to each neighbour, or as one all-to-all of a group; counted.

An all-to-all takes uneven pieces: every number of rows fits without padding, and what is sent is what is counted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from pyg_dist.backend.comm.connection import InCall, wait
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.wires.shared_memory import SharedMemory
from pyg_dist.backend.comm.wires.wire import Flight, Machines, Piece, Wire
from pyg_dist.backend.on_device import use_here
from pyg_dist.backend.session.state import current
from pyg_dist.backend.timing import add_to, phase

T_co = TypeVar("T_co", covariant=True)


@dataclass
class Traffic:
    """Counts of one rank's messages to others so far, taken where they are handed to a wire."""

    num_bytes: int = 0  # of all messages
    num_messages: int = 0  # those that are not empty
    num_rows: int = 0  # entries of the first dimension: rows of a halo exchange, elements of the grid's messages
    num_bytes_between: int = 0  # of the bytes, those to ranks on other machines


class Pending(Generic[T_co]):
    """A result under way; :meth:`wait`, to be called once, waits for it.

    ``finish`` waits for the messages, makes the result of them, and keeps alive what is being sent.
    """

    def __init__(self, finish: Callable[[], T_co]) -> None:
        self._finish = finish

    def wait(self) -> T_co:
        """The result."""
        return self._finish()


# Messages that were never waited for, as after an error. gloo's thread, which outlives sessions, spins if the memory of
# one is freed before it has left or arrived.
_abandoned: deque[object] = deque()


class Messages(Pending[Tensor]):
    """Messages of a ``call`` under way; the result is ``received``, by sender; ``sent`` lives until they have left."""

    def __init__(
        self, received: Tensor, sent: Tensor, flight: Flight | None = None, call: InCall | None = None
    ) -> None:
        self.received, self.sent = received, sent
        self._call: AbstractContextManager[None] = call or nullcontext()
        self._arriving, self._others = ({}, []) if flight is None else (dict(flight.arriving), list(flight.others))
        self._come_one_by_one = bool(self._arriving)

    def __del__(self, abandoned: deque[object] = _abandoned) -> None:
        if self._others or self._arriving:
            abandoned.append((self.received, self.sent, self._others, self._arriving))

    def together(self, arrivals: tuple[Piece, ...]) -> tuple[Piece, ...]:
        """The pieces that arrive, one a sender; a single piece where no sender is waited for alone, as on nccl."""
        return arrivals if self._come_one_by_one or len(arrivals) < 2 else ((-1, 0, self.received.shape[0]),)

    def wait_for(self, sender: int) -> None:
        """Wait until the rows of ``sender`` have arrived."""
        if sender not in self._arriving:
            self.wait()
            return
        with phase("exchange"), self._call:
            wait(self._arriving.pop(sender))

    def wait(self) -> Tensor:
        """Wait until all rows have arrived, and all sent ones have left; it may be called again.

        On a GPU the stream that is current here waits, which may be another one than these were allocated on.
        """
        if self._others or self._arriving:
            with phase("exchange"), self._call:
                for message in (*self._arriving.values(), *self._others):
                    wait(message)
            self._arriving, self._others = {}, []
        use_here(self.received, self.sent)
        return self.received


@dataclass(frozen=True)
class Transport:
    """The messages among the ranks of a group (collective, apart from :meth:`narrow`).

    Legend: rows are tensors ``[n, ...]``, and what goes to one rank, or comes from one, is a range of them, by rank.
    """

    group: Group  # the ranks
    traffic: Traffic = field(default_factory=Traffic)  # where to count what this rank sends to others
    dtype: torch.dtype | None = None  # of the messages of sums and gathers, or ``None`` for the tensor's own
    levels: Levels | None = None  # where several of the ranks share each machine: what sums and gathers go by

    def narrow(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of messages for tensors of ``dtype``: the transport's where it is narrower."""
        return self.dtype if self.dtype is not None and self.dtype.itemsize < dtype.itemsize else dtype

    def all_to_all(
        self, rows: Tensor, sent: Sequence[int], received: Sequence[int], out: Tensor | None = None
    ) -> Messages:
        """Send each rank its rows by one collective, whose cost does not depend on how many neighbours there are.

        ``rows``, ``[sum(sent), ...]``, are contiguous; ``out``, ``[sum(received), ...]``, is a new tensor by default.
        """
        out = rows.new_empty(sum(received), *rows.shape[1:]) if out is None else out
        return self._started("all-to-all", out, rows, sent, lambda w, tag: w.all_to_all(out, rows, sent, received, tag))

    def all_gather(self, rows: Tensor, counts: Sequence[int]) -> Messages:
        """Every rank's rows, by rank. Shapes: ``[counts[rank], ...] -> [sum(counts), ...]``."""
        out = rows.new_empty(sum(counts), *rows.shape[1:])
        sent = rows.shape[:1] * self.group.size
        return self._started("gather", out, rows, sent, lambda wire, tag: wire.all_gather(out, rows, counts, tag))

    def reduce_scatter(self, rows: Tensor, counts: Sequence[int], dtype: torch.dtype) -> Messages:
        """This rank's part of the sum of every rank's rows, added up in ``dtype`` when it is waited for.

        Shapes: ``[sum(counts), ...] -> [counts[rank], ...]``.
        """
        out = rows.new_empty(counts[self.group.rank], *rows.shape[1:], dtype=dtype)
        return self._started(
            "scattered sum", out, rows, counts, lambda wire, tag: wire.reduce_scatter(out, rows, counts, tag)
        )

    def _started(
        self, kind: str, out: Tensor, rows: Tensor, sent: Sequence[int], start: Callable[[Wire, int], Flight]
    ) -> Messages:
        """The messages of a collective that sends each rank so many of the rows."""
        self._count(rows, ((rank, count) for rank, count in enumerate(sent) if rank != self.group.rank))
        wire, tag, call = self.group.begin(kind, rows, rows.shape[1:].numel())
        with phase("exchange"), call:
            return Messages(out, rows, start(wire, tag), call)

    def to_neighbours(
        self, rows: Tensor, receivers: Sequence[Piece], senders: Sequence[Piece], out: Tensor
    ) -> Messages:
        """Send rows by one message to each rank that gets some.

        ``receivers``: who gets which of the contiguous ``rows``; ``senders``: whose arrive where in ``out``.
        """
        self._count(rows, ((rank, high - low) for rank, low, high in receivers))
        peers = [peer for peer, _, _ in (*senders, *receivers)]
        wire, tag, call = self.group.begin("exchange", rows, rows.shape[1:].numel(), peers)
        with phase("exchange"), call:
            return Messages(out, rows, wire.exchange(out, rows, receivers, senders, tag), call)

    def shared(self, num_bytes: int) -> Tensor | None:
        """Bytes to write a message to, uint8, which other ranks of the machine then read where it is; None: there are
        no such ranks, or no room, or it is a small one (not collective).
        """
        return None if self.group.size == 1 else current().of(SharedMemory).empty(num_bytes)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with phase("wait"):
            self.group.barrier()

    @cached_property
    def _elsewhere(self) -> frozenset[int]:
        machine, ranks = current().of(Machines).of_rank, self.group.calls.ranks
        if not machine:
            return frozenset()
        own = machine[ranks[self.group.rank]]
        return frozenset(k for k, rank in enumerate(ranks) if machine[rank] != own)

    def _count(self, rows: Tensor, sent: Iterable[tuple[int, int]]) -> None:
        """Count rows by receiver: how many each of some ranks gets."""
        row_bytes = rows.shape[1:].numel() * rows.element_size()
        num_rows = num_between = num_messages = 0
        for rank, count in sent:
            num_rows += count
            num_between += count * (rank in self._elsewhere)
            num_messages += count > 0
        self.traffic.num_rows += num_rows
        self.traffic.num_bytes += num_rows * row_bytes
        self.traffic.num_bytes_between += num_between * row_bytes
        self.traffic.num_messages += num_messages
        add_to("sent_bytes", num_rows * row_bytes)


class Levels(NamedTuple):
    """The messages within a machine and between machines of a group with as many ranks on each."""

    inner: Transport  # the ranks of this machine
    outer: Transport  # those that have this one's number on their machines
