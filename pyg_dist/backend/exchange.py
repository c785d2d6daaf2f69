"""The halo exchange: rows to the ranks whose edges need them, and back.

One message per neighbour and direction, non-blocking point-to-point: a rank with no rows for another sends it
nothing. The transposed exchange uses the same lists with the roles of sender and receiver swapped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend import ops
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
class HaloExchange:
    """The fixed lists of one graph's halo, and the two directions of traffic over them.

    Attributes:
        axis: the ranks.
        send_index: local ids of the rows to send, int64 ``[s]``, grouped by receiver.
        send_counts: rows to send, by receiver.
        recv_counts: halo rows, by owner.
        traffic: counts what was really sent; shared by all exchanges of a graph.
    """

    axis: Axis
    send_index: Tensor
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def num_halo(self) -> int:
        """Number of halo rows, h."""
        return sum(self.recv_counts)

    def start(self, x: Tensor) -> Flight:
        """Send local rows to those who need them (collective, does not wait).

        Shapes:
            - x: ``[n, F]``
            - rows that land: ``[h, F]``, by slot
        """
        return self._send(ops.gather_rows(x, self.send_index), self.send_counts, self.recv_counts)

    def start_transposed(self, halo: Tensor) -> Flight:
        """Send halo rows back to their owners (collective, does not wait).

        Shapes:
            - halo: ``[h, F]``, by slot
            - rows that land: ``[s, F]``, to be added at ``send_index``
        """
        return self._send(halo, self.recv_counts, self.send_counts)

    def _send(self, rows: Tensor, out_counts: tuple[int, ...], in_counts: tuple[int, ...]) -> Flight:
        received = rows.new_empty((sum(in_counts), *rows.shape[1:]))
        if self.axis.size == 1 or rows.shape[1:].numel() == 0:
            return Flight(received, rows, [])
        messages = []
        incoming = [0, *accumulate(in_counts)]
        outgoing = [0, *accumulate(out_counts)]
        for offset in range(1, self.axis.size):  # each rank starts with its successor, so no rank is everyone's first
            sender, receiver = (self.axis.rank - offset) % self.axis.size, (self.axis.rank + offset) % self.axis.size
            if in_counts[sender]:
                piece = received[incoming[sender] : incoming[sender + 1]]
                messages.append(self._message(dist.irecv, piece, sender))
            if out_counts[receiver]:
                piece = rows[outgoing[receiver] : outgoing[receiver + 1]]
                messages.append(self._message(dist.isend, piece, receiver))
                self.traffic.num_bytes += piece.numel() * piece.element_size()
                self.traffic.num_rows += piece.shape[0]
                self.traffic.num_messages += 1
        return Flight(received, rows, dist.batch_isend_irecv(messages) if messages else [])

    def _message(self, direction: Callable[..., Any], piece: Tensor, peer: int) -> dist.P2POp:
        return dist.P2POp(direction, piece, self.axis.global_rank(peer), self.axis.process_group)

    def to(self, device: torch.device | str) -> HaloExchange:
        """The same exchange for rows on ``device``."""
        return HaloExchange(self.axis, self.send_index.to(device), self.send_counts, self.recv_counts, self.traffic)
