"""A wire as small as one can be: gloo's messages, counted. An example of what the contract suite asks for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pyg_dist.backend.comm.wires.gloo import GlooWire
from pyg_dist.backend.comm.wires.point_to_point import PointToPoint
from pyg_dist.backend.comm.wires.wire import Message


class CountingWire(PointToPoint):
    """Counts what it hands to another wire."""

    def __init__(self, wire: GlooWire) -> None:
        super().__init__(wire.rank, wire.ranks)
        self._wire = wire
        self.num_bytes = 0

    def among(self, ranks: Sequence[int]) -> CountingWire:
        other = super().among(ranks)
        other._wire = self._wire.among(ranks)
        return other

    def send(self, x: Tensor, peer: int, tag: int) -> Message:
        self.num_bytes += x.nbytes
        return self._wire.send(x, peer, tag)

    def receive(self, x: Tensor, peer: int, tag: int) -> Message:
        return self._wire.receive(x, peer, tag)
