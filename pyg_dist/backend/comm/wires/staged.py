"""Messages that no wire of a group carries go through other memory, mostly the host's.

Rows of ranks that share a GPU, which nccl refuses, are copied to pinned memory, sent from there, and copied to where
they belong when they have arrived. CPU rows of a group that is nccl alone go by way of the GPU. ``PYG_DIST_STAGE=1``
sends all this way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyg_dist.backend.comm.wires.point_to_point import Then
from pyg_dist.backend.comm.wires.wire import Flight, Message, Piece, Wire
from pyg_dist.backend.session.state import current

logger = logging.getLogger("pyg_dist")

_HOST = torch.device("cpu")


class _Warned(set[str]):
    """The devices that were warned of."""


class StagedWire:
    """A :class:`~pyg_dist.backend.comm.wires.wire.Wire` for tensors of a device, by another wire's messages."""

    def __init__(self, wire: Wire, device: str) -> None:
        self._wire = wire
        self.rank, self.size, self.ranks, self.has_tags = wire.rank, wire.size, wire.ranks, wire.has_tags
        self.devices = frozenset({device})
        self._stage = torch.device("cpu" if "cpu" in wire.devices else next(iter(wire.devices)))
        if device not in wire.devices and device not in current().of(_Warned):
            current().of(_Warned).add(device)
            if self.rank == 0:
                logger.warning(
                    "messages of tensors on %s are copied to %s and back, since the process group carries those alone: "
                    "give every rank a GPU of its own, and open the group with pyg_dist.init()",
                    device, self._stage,
                )  # fmt: skip

    def among(self, ranks: Sequence[int]) -> StagedWire:
        return StagedWire(self._wire.among(ranks), *self.devices)

    def all_reduce(self, x: Tensor, op: str, tag: int, number: int | None = None) -> tuple[Tensor, bool]:
        total, are_equal = self._wire.all_reduce(self._lift(x), op, tag, number)
        return self._land(total, x.device), are_equal

    def broadcast(self, x: Tensor, source: int, tag: int) -> None:
        staged = self._lift(x)
        self._wire.broadcast(staged, source, tag)
        x.copy_(staged)

    def all_gather(self, out: Tensor, rows: Tensor, counts: Sequence[int], tag: int) -> Flight:
        return self._staged(self._wire.all_gather, out, rows, counts, tag)

    def reduce_scatter(self, out: Tensor, rows: Tensor, counts: Sequence[int], tag: int) -> Flight:
        return self._staged(self._wire.reduce_scatter, out, rows, counts, tag)

    def all_to_all(self, out: Tensor, rows: Tensor, sent: Sequence[int], received: Sequence[int], tag: int) -> Flight:
        return self._staged(self._wire.all_to_all, out, rows, sent, received, tag)

    def _staged(self, start: Callable[..., Flight], out: Tensor, rows: Tensor, *args: object) -> Flight:
        staged_rows, staged_out = self._lift(rows), self._like(out)
        flight = start(staged_out, staged_rows, *args)
        messages = [*flight.arriving.values(), *flight.others]
        return Flight(others=[Message(_landing(messages, [(staged_out, out)], staged_rows), None)])

    def exchange(
        self, out: Tensor, rows: Tensor, receivers: Sequence[Piece], senders: Sequence[Piece], tag: int
    ) -> Flight:
        staged_rows, staged_out = self._lift(rows), self._like(out)
        flight = self._wire.exchange(staged_out, staged_rows, receivers, senders, tag)
        pieces = {sender: (staged_out[low:high], out[low:high]) for sender, low, high in senders}
        arriving = {
            sender: Message(_landing([message], [pieces.pop(sender)]), message.peer)
            for sender, message in flight.arriving.items()
        }
        return Flight(arriving, [Message(_landing(flight.others, [*pieces.values()], staged_rows), None)])

    def _lift(self, x: Tensor) -> Tensor:
        """A copy that is sent (waits for it)."""
        return self._like(x).copy_(x)

    def _like(self, x: Tensor) -> Tensor:
        pins = self._stage == _HOST and not x.is_cpu
        return torch.empty(x.shape, dtype=x.dtype, device=self._stage, pin_memory=pins)

    @staticmethod
    def _land(arrived: Tensor, device: torch.device) -> Tensor:
        return arrived if arrived.device == device else arrived.to(device, non_blocking=device != _HOST)


def _landing(messages: Sequence[Message], pieces: Sequence[tuple[Tensor, Tensor]], sent: Tensor | None = None) -> Then:
    """Messages whose rows are copied to where they belong when they have arrived."""

    def copy() -> None:
        for staged, out in pieces:
            out.copy_(staged, non_blocking=True)

    return Then(messages, copy, sent)
