"""The halo exchange: rows to the ranks that need them, and back.

With few neighbours per rank, one non-blocking message to each: a rank with no rows for another sends it nothing
(Demirci et al., 4.1). With many, one all-to-all-v (the plan chooses). The transposed exchange uses the same lists with
the roles of sender and receiver swapped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from pyg_dist.backend.comm.buffers import Buffers
from pyg_dist.backend.comm.transport import Messages, Transport
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix


@dataclass(frozen=True)
class Exchange:
    """Fixed lists of who sends how many rows to whom.

    Attributes:
        transport: the ranks; its counter is shared by all exchanges of a graph.
        send_counts: rows to send, by receiver.
        recv_counts: rows that arrive, by sender.
        is_dense: whether to use one all-to-all-v, the same on every rank; else one non-blocking message per neighbour.
        buffers: for rows on their way; shared like the counter.
    """

    transport: Transport
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
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
        return Exchange(self.transport, self.recv_counts, self.send_counts, self.is_dense, self.buffers)

    def slots(self, device: torch.device) -> Matrix:
        """Which slot each row that arrives belongs in: its own. Of rows that are not added to anything."""
        if device not in self._slots:
            self._slots[device] = Matrix(CSR.identity(self.num_received, device))
        return self._slots[device]

    @cached_property
    def _slots(self) -> dict[torch.device, Matrix]:
        return {}

    @cached_property
    def arrivals(self) -> tuple[tuple[int, int, int], ...]:
        """Sender, first slot and last slot, exclusive, of each message, in the order in which they are sent.

        An all-to-all-v arrives as one, of no sender (-1).
        """
        if self.is_dense:
            return ((-1, 0, self.num_received),) if self.num_received else ()
        bounds = [0, *accumulate(self.recv_counts)]
        rank, size = self.transport.group.rank, self.transport.group.size
        senders = [(rank - offset) % size for offset in range(1, size)]
        return tuple((p, bounds[p], bounds[p + 1]) for p in senders if self.recv_counts[p])

    def start(self, rows: Tensor, received: Tensor | None = None) -> Messages:
        """Send rows, grouped by receiver (collective, does not wait).

        Shapes:
            - rows: ``[num_sent, ...]``
            - received: ``[num_received, ...]``, where they will land, grouped by sender; a new tensor by default
        """
        if received is None:
            received = rows.new_empty((self.num_received, *rows.shape[1:]))
        if self.transport.group.size == 1 or rows.shape[1:].numel() == 0:
            return Messages(received, rows)
        if self.is_dense:
            return self.transport.all_to_all(rows, self.send_counts, self.recv_counts, received)
        return self.transport.to_neighbours(rows, self.send_counts, self.arrivals, received)
