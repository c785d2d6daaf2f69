"""The halo exchange: rows to the ranks that need them, and back.

With few neighbours per rank, one non-blocking message to each: a rank with no rows for another sends it nothing
(Demirci et al., 4.1). With many, one all-to-all-v (the plan chooses). The transposed exchange uses the same lists with
the roles of sender and receiver swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.comm.buffers import Buffers
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.session.failure import connected, wait
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.backend.timing import phase


@dataclass
class Traffic:
    """What one rank has sent so far, counted where the messages are handed to the process group."""

    num_bytes: int = 0
    num_messages: int = 0
    num_rows: int = 0


@dataclass
class Pending:
    """Messages under way. ``wait()`` waits for them and returns the rows that arrived."""

    received: Tensor
    sent: Tensor  # must stay alive until the messages have left
    works: list[tuple[dist.Work, int | None]] = field(default_factory=list)  # with the other rank, if it is one
    arrivals: dict[int, tuple[dist.Work, int]] = field(default_factory=dict)  # by sender, if messages can be told apart

    def wait_for(self, sender: int) -> None:
        """Wait until the rows of ``sender`` have arrived."""
        if sender not in self.arrivals:
            self.wait()
            return
        with phase("exchange"):
            wait(*self.arrivals.pop(sender))

    def wait(self) -> Tensor:
        """Wait until all rows have arrived (and all sent ones have left)."""
        if self.works or self.arrivals:
            with phase("exchange"):
                for work in (*self.arrivals.values(), *self.works):
                    wait(*work)
            self.works, self.arrivals = [], {}
        return self.received


@dataclass(frozen=True)
class Exchange:
    """Fixed lists of who sends how many rows to whom.

    Attributes:
        group: the ranks.
        send_counts: rows to send, by receiver.
        recv_counts: rows that arrive, by sender.
        traffic: counts what was really sent; shared by all exchanges of a graph.
        is_dense: whether to use one all-to-all-v, the same on every rank; else one non-blocking message per neighbour.
        buffers: for rows on their way; shared like ``traffic``.
    """

    group: Group
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    traffic: Traffic = field(default_factory=Traffic)
    is_dense: bool = False
    buffers: Buffers = field(default_factory=Buffers)

    @cached_property
    def num_sent(self) -> int:
        """Number of rows that leave."""
        return sum(self.send_counts)

    @cached_property
    def num_received(self) -> int:
        """Number of rows that arrive."""
        return sum(self.recv_counts)

    @cached_property
    def transposed(self) -> Exchange:
        """The way back: who received sends."""
        return Exchange(self.group, self.recv_counts, self.send_counts, self.traffic, self.is_dense, self.buffers)

    @cached_property
    def slots(self) -> Matrix:
        """Which slot each row that arrives belongs in: its own. Of rows that are not added to anything."""
        return Matrix(CSR.identity(self.num_received))

    @cached_property
    def arrivals(self) -> tuple[tuple[int, int, int], ...]:
        """Sender, first slot and last slot, exclusive, of each message, in the order in which they are sent.

        An all-to-all-v arrives as one, of no sender (-1).
        """
        if self.is_dense:
            return ((-1, 0, self.num_received),) if self.num_received else ()
        bounds = [0, *accumulate(self.recv_counts)]
        senders = [(self.group.rank - offset) % self.group.size for offset in range(1, self.group.size)]
        return tuple((p, bounds[p], bounds[p + 1]) for p in senders if self.recv_counts[p])

    def start(self, rows: Tensor, received: Tensor | None = None) -> Pending:
        """Send rows, grouped by receiver (collective, does not wait).

        Shapes:
            - rows: ``[num_sent, ...]``
            - received: ``[num_received, ...]``, where they will land, grouped by sender; a new tensor by default
        """
        if received is None:
            received = rows.new_empty((self.num_received, *rows.shape[1:]))
        width = rows.shape[1:].numel()
        if self.group.size == 1 or width == 0:
            return Pending(received, rows)
        self.traffic.num_bytes += rows.numel() * rows.element_size()
        self.traffic.num_rows += rows.shape[0]
        self.traffic.num_messages += sum(count > 0 for count in self.send_counts)
        with phase("exchange"):
            return self._all_to_all(received, rows) if self.is_dense else self._send(received, rows)

    def meet(self) -> None:
        """Wait until every rank is here (collective)."""
        if self.group.size > 1:
            with phase("wait"), connected():
                dist.barrier(self.group.process_group)

    def _all_to_all(self, received: Tensor, rows: Tensor) -> Pending:
        """One collective, whose cost does not depend on how many neighbours there are."""
        counts = list(self.recv_counts), list(self.send_counts)
        with connected():
            work = dist.all_to_all_single(received, rows, *counts, group=self.group.process_group, async_op=True)
        return Pending(received, rows, [(work, None)])

    def _send(self, received: Tensor, rows: Tensor) -> Pending:
        """One message per neighbour."""
        messages: list[dist.P2POp] = []
        senders: list[int] = []  # of each message; -1: this rank
        bounds = [0, *accumulate(self.send_counts)]
        slots = {sender: (low, high) for sender, low, high in self.arrivals}
        for offset in range(1, self.group.size):  # each rank starts with its successor, so no rank is everyone's first
            sender, receiver = (
                (self.group.rank - offset) % self.group.size,
                (self.group.rank + offset) % self.group.size,
            )
            if sender in slots:
                messages.append(self._message(dist.irecv, received[slice(*slots[sender])], sender))
                senders.append(sender)
            if self.send_counts[receiver]:
                messages.append(self._message(dist.isend, rows[bounds[receiver] : bounds[receiver + 1]], receiver))
                senders.append(-1)
        with connected():
            works = dist.batch_isend_irecv(messages) if messages else []
        if len(works) != len(messages):  # nccl makes one of them
            return Pending(received, rows, [(work, None) for work in works])
        pending = Pending(received, rows)
        for sender, message, work in zip(senders, messages, works, strict=True):
            if sender < 0:
                pending.works.append((work, message.peer))
            else:
                pending.arrivals[sender] = work, message.peer
        return pending

    def _message(self, direction: Callable[..., Any], piece: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(direction, piece, self.group.global_rank(peer), self.group.process_group)
