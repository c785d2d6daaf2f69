"""The one collective of the grid: an all-to-all with uneven pieces among the ranks of mesh axes, counted.

Every number of rows fits without padding, and what is sent is what is counted. On gloo it also beat the ring
collectives, 16 against 53 ms for a sum of 8 MB on four processes of one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.halo.exchange import Traffic
from pyg_dist.backend.session.failure import connected, wait
from pyg_dist.backend.timing import phase


@dataclass(frozen=True)
class MeshTransport:
    """One product of mesh axes as the grid's sums use it.

    Attributes:
        group: the ranks.
        traffic: where to count what this rank sends to others.
        dtype: of the messages, or ``None`` for the tensor's own.
    """

    group: Group
    traffic: Traffic
    dtype: torch.dtype | None = None

    def narrow(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of messages for tensors of ``dtype``: the wire's where it is narrower."""
        return self.dtype if self.dtype is not None and self.dtype.itemsize < dtype.itemsize else dtype


class Pending:
    """An all-to-all under way; :meth:`wait` waits for it."""

    def __init__(self, wire: MeshTransport, outgoing: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        group = wire.group
        self.outgoing = outgoing  # must live until it has left
        self.incoming = outgoing.new_empty(sum(received), *outgoing.shape[1:])
        wire.traffic.num_bytes += (sum(sent) - sent[group.rank]) * outgoing.shape[1:].numel() * outgoing.element_size()
        wire.traffic.num_messages += sum(n > 0 for r, n in enumerate(sent) if r != group.rank)
        with phase("exchange"), connected():
            self._work = dist.all_to_all_single(
                self.incoming, outgoing, list(received), list(sent), group=group.process_group, async_op=True
            )

    def wait(self) -> Tensor:
        """What has arrived, by sender."""
        with phase("exchange"):
            wait(self._work)
        return self.incoming
