"""Remote rows and sums of them: packed, sent, and added where they are needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from torch import Tensor

from pyg_dist.backend.codec import EXACT, Codec
from pyg_dist.backend.exchange import Exchange, Flight
from pyg_dist.backend.matrix import Matrix


@dataclass(frozen=True)
class Halo:
    """How remote rows, or sums of them, reach the targets: ``incoming P outgoing``, P being the exchange.

    Attributes:
        outgoing: ``[s, k]``: makes the send buffer from the last k local rows.
        exchange: moves s rows away and brings h.
        incoming: ``[b, h]``: makes addends for the last b local rows from what has arrived.
        codecs: how rows travel in this direction, and in the transposed one.
    """

    outgoing: Matrix
    exchange: Exchange
    incoming: Matrix
    codecs: tuple[Codec, Codec] = (EXACT, EXACT)

    @cached_property
    def transposed(self) -> Halo:
        """The way back."""
        outgoing, incoming = self.incoming.transposed, self.outgoing.transposed
        return Halo(outgoing, self.exchange.transposed, incoming, self.codecs[::-1])

    def coded(self, codecs: tuple[Codec, Codec]) -> Halo:
        """The same, with other codecs. Everything that is kept, is kept by the parts."""
        return self if codecs == self.codecs else replace(self, codecs=codecs)

    def start(self, x: Tensor, col_scale: Tensor | None = None) -> Flight:
        """Multiply by ``outgoing diag(col_scale)`` and send (collective, does not wait). Shapes: ``[n, F]``."""
        codec, exchange, k = self.codecs[0], self.exchange, self.outgoing.num_cols
        row_bytes = codec.row_bytes(x.shape[1], x.dtype)
        sent = exchange.buffers.take(exchange.num_sent, row_bytes, x.device)
        received = exchange.buffers.take(exchange.num_received, row_bytes, x.device)
        if exchange.num_sent:
            codec.pack(sent, self.outgoing, _last(x, k), _last(col_scale, k))
        return exchange.start(sent, received)

    def finish(self, flight: Flight, out: Tensor, row_scale: Tensor | None = None) -> Tensor:
        """Add ``diag(row_scale) incoming`` times what has arrived to ``out`` (waits). Shapes: ``[n, F]``."""
        received, b = flight.land(), self.incoming.num_rows
        if self.exchange.num_received:
            self.codecs[0].unpack_add(received, self.incoming, _last(out, b), _last(row_scale, b))
        self.exchange.buffers.give(flight.sent, received)
        return out


T = TypeVar("T", Tensor, "Tensor | None")


def _last(rows: T, count: int) -> T:
    return rows if rows is None else rows.narrow(0, rows.shape[0] - count, count)
