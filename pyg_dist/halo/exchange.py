"""The halo exchange: rows to the ranks that need them, and back.

:class:`Exchange` is all that the rest of the layout uses of one; only :func:`exchange_of` names its implementations.
Each passes ``tests/halo/test_exchange_contract.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from torch import Tensor

from pyg_dist.backend.comm.transport import Messages, Transport
from pyg_dist.backend.comm.wires.wire import Piece
from pyg_dist.halo.plan.levels import is_dense

Arrival = tuple[int, int, int]
"""Sender, first row and last row, exclusive, of what arrives together; sender -1: of several ranks."""


@dataclass(frozen=True)
class Exchange:
    """Moves rows between the ranks of a group by fixed numbers: a linear map, whose transpose is the way back."""

    transport: Transport  # the ranks, and where what is sent is counted
    send_counts: tuple[int, ...]  # rows to send, by receiver
    recv_counts: tuple[int, ...]  # rows that arrive, by sender

    @cached_property
    def num_sent(self) -> int:
        """Rows that leave this rank, s."""
        return sum(self.send_counts)

    @cached_property
    def num_received(self) -> int:
        """Rows that arrive, r."""
        return sum(self.recv_counts)

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        """The pieces of the r rows that arrive together, in the order to wait in, which is fixed, as that of sums."""
        return self.together

    @cached_property
    def together(self) -> tuple[Arrival, ...]:
        """All rows that arrive, as one piece."""
        return ((-1, 0, self.num_received),) if self.num_received else ()

    @cached_property
    def transposed(self) -> Exchange:
        """Who received sends, in the same order."""
        return type(self)(self.transport, self.recv_counts, self.send_counts)

    def start(self, rows: Tensor, received: Tensor | None = None) -> Messages:
        """Send rows (collective, does not wait); what leaves the rank is counted as its transport's traffic.

        Shapes: rows ``[s, ...]``, any dtype, grouped by receiver; received ``[r, ...]``, where they will land, grouped
        by sender; a new tensor by default.
        """
        if received is None:
            received = rows.new_empty((self.num_received, *rows.shape[1:]))
        if self.transport.group.size == 1 or rows.shape[1:].numel() == 0:
            return Messages(received, rows)
        return self._send(rows.contiguous(), received)

    def _send(self, rows: Tensor, received: Tensor) -> Messages:
        raise NotImplementedError  # by each kind of exchange, unless it starts in a way of its own


class ToNeighbours(Exchange):
    """One message to each rank that gets rows: none to the others (Demirci et al., 4.1)."""

    @cached_property
    def arrivals(self) -> tuple[Arrival, ...]:
        """See :class:`Exchange`: by sender, in the order in which messages are sent."""
        return self._pieces(self.recv_counts, -1)

    @cached_property
    def departures(self) -> tuple[Piece, ...]:
        """Who gets which rows: each rank starts with its successor, so no rank is everyone's first."""
        return self._pieces(self.send_counts, 1)

    def _pieces(self, counts: tuple[int, ...], way: int) -> tuple[Piece, ...]:
        bounds = [0, *accumulate(counts)]
        rank, size = self.transport.group.rank, self.transport.group.size
        peers = ((rank + way * offset) % size for offset in range(1, size))
        return tuple((peer, bounds[peer], bounds[peer + 1]) for peer in peers if counts[peer])

    def _send(self, rows: Tensor, received: Tensor) -> Messages:
        return self.transport.to_neighbours(rows, self.departures, self.arrivals, received)


class AllToAll(Exchange):
    """One all-to-all-v, whose cost does not depend on the number of neighbours."""

    def _send(self, rows: Tensor, received: Tensor) -> Messages:
        return self.transport.all_to_all(rows, self.send_counts, self.recv_counts, received)


def exchange_of(
    transport: Transport, send_counts: tuple[int, ...], recv_counts: tuple[int, ...], num_messages: int = 0
) -> Exchange:
    """The exchange of rows whose numbers are known (not collective).

    ``num_messages``: how many pairs of ranks exchange, the same on every rank, which decides how rows travel.
    """
    implementation = AllToAll if is_dense(num_messages, transport.group.size) else ToNeighbours
    return implementation(transport, send_counts, recv_counts)
