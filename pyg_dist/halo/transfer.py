"""Remote rows and sums of them: packed, sent, and added where they are needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from pyg_dist.backend.comm.codec import EXACT, Codec
from pyg_dist.backend.comm.transport import Messages
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.backend.timing import overlaps, phase
from pyg_dist.halo.exchange import Exchange


@dataclass(frozen=True)
class HaloTransfer:
    """How remote rows, or sums of them, reach the targets: ``incoming P outgoing``, P being the exchange.

    Attributes:
        outgoing: ``[s, k]``: makes the send buffer from the last k local rows.
        exchange: sends s rows and receives h.
        incoming: ``[b, h]``: makes addends for the last b local rows from what has arrived.
        codecs: how rows travel in this direction, and in the transposed one.
    """

    outgoing: Matrix
    exchange: Exchange
    incoming: Matrix
    codecs: tuple[Codec, Codec] = (EXACT, EXACT)

    @cached_property
    def transposed(self) -> HaloTransfer:
        """The way back."""
        outgoing, incoming = self.incoming.transposed, self.outgoing.transposed
        return HaloTransfer(outgoing, self.exchange.transposed, incoming, self.codecs[::-1])

    def coded(self, codecs: tuple[Codec, Codec]) -> HaloTransfer:
        """The same, with other codecs. Everything that is kept, is kept by the parts."""
        return self if codecs == self.codecs else replace(self, codecs=codecs)

    def start(self, x: Tensor, col_scale: Tensor | None = None, divide: bool = False) -> Messages:
        """Multiply by ``outgoing diag(col_scale)`` and send (collective, does not wait). Shapes: ``[n, F]``.

        With ``divide``: by the scale's inverse.
        """
        codec, exchange, k = self.codecs[0], self.exchange, self.outgoing.num_cols
        row_bytes = codec.row_bytes(x.shape[1], x.dtype)
        sent = exchange.buffers.acquire(exchange.num_sent, row_bytes, x.device)
        received = exchange.buffers.acquire(exchange.num_received, row_bytes, x.device)
        if exchange.num_sent:
            with phase("pack"):
                codec.pack(sent, self.outgoing, _last(x, k), _factor(col_scale, k, divide))
        if overlaps():
            return exchange.start(sent, received)
        exchange.transport.barrier()  # what slower ranks are late is no part of the exchange
        messages = exchange.start(sent, received)
        messages.wait()
        return messages

    def finish(self, messages: Messages, out: Tensor, row_scale: Tensor | None = None, divide: bool = False) -> Tensor:
        """Add ``diag(row_scale) incoming`` times what has arrived to ``out`` (waits). Shapes: ``[n, F]``.

        With ``divide``: by the scale's inverse.
        """
        received, b = messages.received, self.incoming.num_rows
        addends, factor = _last(out, b), _factor(row_scale, b, divide)
        is_identity = self.incoming.pattern.is_identity
        for sender, low, high in self.exchange.arrivals:
            messages.wait_for(sender)
            with phase("unpack"):
                if is_identity:  # rows that stay rows: each message has its own place
                    own = slice(low, high)
                    slots = Matrix(CSR.identity(high - low, received.device))
                    self.codecs[0].unpack_add(received[own], slots, addends[own], factor)
                else:
                    self.codecs[0].unpack_add(received[low:high], self._piece(low, high), addends, factor)
        messages.wait()
        self.exchange.buffers.release(messages.sent, received)
        return out

    def _piece(self, low: int, high: int) -> Matrix:
        """What the slots of one message are multiplied by. Where all arrives as one, nothing is cut."""
        return self.incoming if len(self.exchange.arrivals) == 1 else self.incoming.columns(low, high)


def _last(rows: Tensor, count: int) -> Tensor:
    return rows.narrow(0, rows.shape[0] - count, count)


def _factor(scale: Tensor | None, count: int, divide: bool) -> Tensor | None:
    """The last factors; codecs only multiply."""
    if scale is None:
        return None
    return _last(scale, count).reciprocal() if divide else _last(scale, count)
