"""An exchange made of another one, as an example: every row is sent twice, and both copies must be equal."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyg_dist.backend.comm.transport import Messages
from pyg_dist.halo.exchange import Arrival, Exchange, ToNeighbours


class BothCopies(Messages):
    """Messages and their copies: rows are there when both are."""

    def __init__(self, first: Messages, second: Messages) -> None:
        super().__init__(first.received, first.sent)
        self._copies = first, second

    def wait_for(self, sender: int) -> None:
        for copy in self._copies:
            copy.wait_for(sender)

    def wait(self) -> Tensor:
        first, second = (copy.wait() for copy in self._copies)
        assert torch.equal(first, second)
        return first


@dataclass(frozen=True)
class SendsTwice(Exchange):
    @cached_property
    def _once(self) -> ToNeighbours:
        return ToNeighbours(self.transport, self.send_counts, self.recv_counts)

    @property
    def arrivals(self) -> tuple[Arrival, ...]:
        return self._once.arrivals

    def start(self, rows: Tensor, received: Tensor | None = None) -> Messages:
        return BothCopies(self._once.start(rows, received), self._once.start(rows))
