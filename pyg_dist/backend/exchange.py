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

from pyg_dist.backend.axis import Axis
from pyg_dist.backend.buffers import Buffers


@dataclass
class Traffic:
    """What one rank has sent so far, counted where the messages are handed to the process group."""

    num_bytes: int = 0
    num_messages: int = 0
    num_rows: int = 0


@dataclass
class Flight:
    """Messages under way. ``land()`` waits for them and returns the rows that arrived."""

    received: Tensor
    sent: Tensor  # must stay alive until the messages have left
    works: list[dist.Work]

    def land(self) -> Tensor:
        """Wait until all rows have arrived (and all sent ones have left)."""
        for work in self.works:
            work.wait()
        return self.received


@dataclass(frozen=True)
class Exchange:
    """Fixed lists of who sends how many rows to whom.

    Attributes:
        axis: the ranks.
        send_counts: rows to send, by receiver.
        recv_counts: rows that arrive, by sender.
        traffic: counts what was really sent; shared by all exchanges of a graph.
        is_dense: whether to use one all-to-all-v, the same on every rank; else one non-blocking message per neighbour.
        buffers: for rows on their way; shared like ``traffic``.
    """

    axis: Axis
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
        return Exchange(self.axis, self.recv_counts, self.send_counts, self.traffic, self.is_dense, self.buffers)

    def start(self, rows: Tensor, received: Tensor | None = None) -> Flight:
        """Send rows, grouped by receiver (collective, does not wait).

        Shapes:
            - rows: ``[num_sent, ...]``
            - received: ``[num_received, ...]``, where they will land, grouped by sender; a new tensor by default
        """
        if received is None:
            received = rows.new_empty((self.num_received, *rows.shape[1:]))
        width = rows.shape[1:].numel()
        if self.axis.size == 1 or width == 0:
            return Flight(received, rows, [])
        self.traffic.num_bytes += rows.numel() * rows.element_size()
        self.traffic.num_rows += rows.shape[0]
        self.traffic.num_messages += sum(count > 0 for count in self.send_counts)
        return Flight(received, rows, self._all_to_all(received, rows) if self.is_dense else self._send(received, rows))

    def _all_to_all(self, received: Tensor, rows: Tensor) -> list[dist.Work]:
        """One collective, whose cost does not depend on how many neighbours there are."""
        counts = list(self.recv_counts), list(self.send_counts)
        return [dist.all_to_all_single(received, rows, *counts, group=self.axis.process_group, async_op=True)]

    def _send(self, received: Tensor, rows: Tensor) -> list[dist.Work]:
        """One message per neighbour."""
        messages = []
        incoming = [0, *accumulate(self.recv_counts)]
        outgoing = [0, *accumulate(self.send_counts)]
        for offset in range(1, self.axis.size):  # each rank starts with its successor, so no rank is everyone's first
            sender, receiver = (self.axis.rank - offset) % self.axis.size, (self.axis.rank + offset) % self.axis.size
            if self.recv_counts[sender]:
                piece = received[incoming[sender] : incoming[sender + 1]]
                messages.append(self._message(dist.irecv, piece, sender))
            if self.send_counts[receiver]:
                piece = rows[outgoing[receiver] : outgoing[receiver + 1]]
                messages.append(self._message(dist.isend, piece, receiver))
        return dist.batch_isend_irecv(messages) if messages else []

    def _message(self, direction: Callable[..., Any], piece: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(direction, piece, self.axis.global_rank(peer), self.axis.process_group)
