"""The halo exchange: rows to the ranks that need them, and back.

One message per neighbour and direction, non-blocking point-to-point: a rank with no rows for another sends it
nothing. The transposed exchange uses the same lists with the roles of sender and receiver swapped.
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
    """

    axis: Axis
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def num_received(self) -> int:
        """Number of rows that arrive."""
        return sum(self.recv_counts)

    @cached_property
    def transposed(self) -> Exchange:
        """The way back: who received sends."""
        return Exchange(self.axis, self.recv_counts, self.send_counts, self.traffic)

    def start(self, rows: Tensor) -> Flight:
        """Send rows, grouped by receiver (collective, does not wait).

        Shapes:
            - rows: ``[sum(send_counts), ...]``
            - rows that land: ``[sum(recv_counts), ...]``, grouped by sender
        """
        received = rows.new_empty((self.num_received, *rows.shape[1:]))
        if self.axis.size == 1 or rows.shape[1:].numel() == 0:
            return Flight(received, rows, [])
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
                self.traffic.num_bytes += piece.numel() * piece.element_size()
                self.traffic.num_rows += piece.shape[0]
                self.traffic.num_messages += 1
        return Flight(received, rows, dist.batch_isend_irecv(messages) if messages else [])

    def _message(self, direction: Callable[..., Any], piece: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(direction, piece, self.axis.global_rank(peer), self.axis.process_group)
