"""Remote rows and sums of them: packed, sent, and added where they are needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.codec import EXACT, Codec
from pyg_dist.backend.comm.transport import Messages, Pending, Transport
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.backend.timing import overlaps, phase
from pyg_dist.halo.exchange import Exchange


@dataclass(frozen=True)
class TransferStep:
    """``incoming P outgoing``, P being an exchange of s rows for r.

    Attributes:
        outgoing: ``[s, k]``: makes the send buffer from the last k rows of the input; ``None``: that is the input.
        exchange: P.
        incoming: ``[b, r]``: makes addends for the last b rows of the result; ``None``: what arrives is the result.
        codecs: how rows travel, and how on the way back.
    """

    outgoing: Matrix | None
    exchange: Exchange
    incoming: Matrix | None
    codecs: tuple[Codec, Codec] = (EXACT, EXACT)

    @property
    def transposed(self) -> TransferStep:
        """The way back."""
        incoming, outgoing = (None if m is None else m.transposed for m in (self.outgoing, self.incoming))
        return TransferStep(outgoing, self.exchange.transposed, incoming, self.codecs[::-1])

    @property
    def num_rows(self) -> int:
        """Rows of the result that it adds to."""
        return self.exchange.num_received if self.incoming is None else self.incoming.num_rows


@dataclass(frozen=True)
class HaloTransfer:
    """How remote rows, or sums of them, reach the targets: a chain of steps, each of which takes the last one's result.

    A linear map: :meth:`start` applies it alone; :meth:`send` and :meth:`add` apply it beside a product of local rows,
    to the last rows of which it adds.

    Attributes:
        steps: the chain; one step where each rank sends to each that needs its rows.
        transport: the ranks.
    """

    steps: tuple[TransferStep, ...]
    transport: Transport

    @cached_property
    def transposed(self) -> HaloTransfer:
        """The way back: the chain reversed."""
        return replace(self, steps=tuple(step.transposed for step in reversed(self.steps)))

    @property
    def outgoing(self) -> Matrix:
        """What the rank's own rows are multiplied by before they are sent."""
        assert self.steps[0].outgoing is not None
        return self.steps[0].outgoing

    @property
    def incoming(self) -> Matrix:
        """What rows are multiplied by where they are needed."""
        assert self.steps[-1].incoming is not None
        return self.steps[-1].incoming

    @cached_property
    def is_empty(self) -> bool:
        """Whether there is nothing to exchange, and nobody to exchange it with."""
        return self.transport.group.size == 1 and self.steps[0].exchange.num_sent == 0

    @cached_property
    def to_slots(self) -> HaloTransfer:
        """The same rows as they arrive, not yet multiplied: from all local rows to halo slots."""
        return self._changed(-1, replace(self.steps[-1], incoming=None))

    @cached_property
    def between_slots(self) -> HaloTransfer:
        """From send buffer to halo slots: rows are multiplied neither before nor after."""
        return self.to_slots._changed(0, replace(self.to_slots.steps[0], outgoing=None))

    def weighted(self, outgoing: Tensor, incoming: Tensor) -> HaloTransfer:
        """The same with values: of what is multiplied before sending, and where it is needed."""
        first = replace(self.steps[0], outgoing=Matrix(self.outgoing.pattern, outgoing))
        made = self._changed(0, first)
        return made._changed(-1, replace(made.steps[-1], incoming=Matrix(self.incoming.pattern, incoming)))

    def coded(self, codecs: tuple[Codec, Codec]) -> HaloTransfer:
        """The same, whose rows travel in other codecs in the first step, and on its way back."""
        first = self.steps[0]
        return self if codecs == first.codecs else self._changed(0, replace(first, codecs=codecs))

    def _changed(self, place: int, step: TransferStep) -> HaloTransfer:
        steps = [*self.steps]
        steps[place] = step
        return replace(self, steps=tuple(steps))

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Apply it to x alone (collective, no autograd). Exact steps take rows of any shape; others ``[n, F]``."""
        pending = self._apply(self.steps[0], x.contiguous())
        return self._then(pending, self.steps[1:]) if len(self.steps) > 1 else pending

    def _then(self, pending: Pending[Tensor], steps: tuple[TransferStep, ...]) -> Pending[Tensor]:
        def finish() -> Tensor:
            rows = pending.wait()
            for step in steps:
                rows = self._apply(step, rows).wait()
            return rows

        return Pending(finish)

    def _apply(self, step: TransferStep, x: Tensor) -> Pending[Tensor]:
        outgoing, incoming = step.outgoing, step.incoming
        if step.codecs[0] is not EXACT:
            messages = self._send(step, x)
            return Pending(lambda: self._add(step, messages, x.new_zeros(step.num_rows, x.shape[1])))
        if outgoing is not None:
            with phase("pack"):
                x = outgoing.multiply(_last(x, outgoing.num_cols))
        messages = step.exchange.start(x)
        if incoming is None:
            return messages

        def finish() -> Tensor:
            received = messages.wait()
            with phase("unpack"):
                return incoming.multiply(received)

        return Pending(finish)

    def send(self, x: Tensor, col_scale: Tensor | None = None, divide: bool = False) -> Messages:
        """Send what ``diag(col_scale) x`` makes others need (collective, does not wait). Shapes: ``[n, F]``.

        With ``divide``: by the scale's inverse.
        """
        return self._send(self.steps[0], x, col_scale, divide)

    def add(self, messages: Messages, out: Tensor, row_scale: Tensor | None = None, divide: bool = False) -> Tensor:
        """Add ``diag(row_scale)`` times what comes of the messages to ``out`` (waits). Shapes: ``[n, F]``.

        With ``divide``: by the scale's inverse.
        """
        for step, following in zip(self.steps, self.steps[1:], strict=False):
            messages = self._send(following, self._add(step, messages, out.new_zeros(step.num_rows, out.shape[1])))
        return self._add(self.steps[-1], messages, out, row_scale, divide)

    def _send(self, step: TransferStep, x: Tensor, col_scale: Tensor | None = None, divide: bool = False) -> Messages:
        codec, exchange = step.codecs[0], step.exchange
        row_bytes = codec.row_bytes(x.shape[1], x.dtype)
        empty = x.new_empty((0, row_bytes), dtype=torch.uint8)
        sent, received = (ops.empty_rows(empty, n, row_bytes) for n in (exchange.num_sent, exchange.num_received))
        if exchange.num_sent:
            outgoing = _identity(exchange.num_sent, x.device) if step.outgoing is None else step.outgoing
            k = outgoing.num_cols
            with phase("pack"):
                codec.pack(sent, outgoing, _last(x, k), _factor(col_scale, k, divide))
        if overlaps():
            return exchange.start(sent, received)
        self.transport.barrier()  # what slower ranks are late is no part of the exchange
        messages = exchange.start(sent, received)
        messages.wait()
        return messages

    def _add(
        self, step: TransferStep, messages: Messages, out: Tensor, row_scale: Tensor | None = None, divide: bool = False
    ) -> Tensor:
        received, incoming, arrivals = messages.received, step.incoming, step.exchange.arrivals
        addends, factor = _last(out, step.num_rows), _factor(row_scale, step.num_rows, divide)
        for sender, low, high in arrivals:
            messages.wait_for(sender)
            with phase("unpack"):
                if incoming is None:  # each message has rows of its own
                    slots = _identity(high - low, received.device)
                    step.codecs[0].unpack_add(received[low:high], slots, addends[low:high])
                else:  # where all arrives as one, nothing is cut
                    piece = incoming if len(arrivals) == 1 else incoming.columns(low, high)
                    step.codecs[0].unpack_add(received[low:high], piece, addends, factor)
        messages.wait()
        return out


def _identity(size: int, device: torch.device) -> Matrix:
    return Matrix(CSR.identity(size, device))


def _last(rows: Tensor, count: int) -> Tensor:
    return rows.narrow(0, rows.shape[0] - count, count)


def _factor(scale: Tensor | None, count: int, divide: bool) -> Tensor | None:
    """The last factors; codecs only multiply."""
    if scale is None:
        return None
    return _last(scale, count).reciprocal() if divide else _last(scale, count)
