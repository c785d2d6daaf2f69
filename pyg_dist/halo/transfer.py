"""Remote rows and sums of them: packed, sent, and added where they are needed; in one level, or by agents in two."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.codec import EXACT, Codec
from pyg_dist.backend.comm.transport import Messages, Pending, Transport
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix
from pyg_dist.backend.timing import overlaps, phase
from pyg_dist.halo.exchange import Arrival, Exchange


class Codecs(NamedTuple):
    """How rows travel, forward and backward.

    Addends to agents are exact: a sum is rounded once, when it leaves its machine.
    """

    direct: tuple[Codec, Codec] = (EXACT, EXACT)  # in one level; in two between ranks of a machine
    rows: tuple[Codec, Codec] = (EXACT, EXACT)  # in two levels by the link, and on from there
    sums: tuple[Codec, Codec] = (EXACT, EXACT)  # likewise, by the link

    @property
    def transposed(self) -> Codecs:
        """The codecs of the way back, on which the gradients of rows are sums."""
        return Codecs(self.direct[::-1], self.sums[::-1], self.rows[::-1])


AS_THEY_ARE = Codecs()


@dataclass(frozen=True)
class Relay:
    """How rows and sums cross machines (:mod:`~.plan.two_level`): rows by the link and from an agent, sums to an agent
    and by the link. Rows leave first: while they cross, addends are gathered; while sums cross, rows are spread.
    """

    rows: Exchange  # moves rows between machines
    out_of: Tensor  # which of those that arrive each row to spread is, int64
    spread: Exchange  # moves rows from agents
    gather: Exchange  # moves addends to agents
    into: Tensor  # which of the sums that leave each addend that arrives is added to, int64
    sums: Exchange  # moves sums between machines

    @cached_property
    def transposed(self) -> Relay:
        """The way back: the gradients of rows are sums, and those of sums are rows."""
        rows, spread, gather, sums = (e.transposed for e in (self.sums, self.gather, self.spread, self.rows))
        return Relay(rows, self.into, spread, gather, self.out_of, sums)

    def add(self, sums: Tensor, addends: Messages) -> None:
        """Add what arrives of the gather to the sums that leave (waits)."""
        into = on_device(self.into, sums.device)
        for sender, low, high in self.gather.arrivals:  # of each sender at most one addend for a sum
            addends.wait_for(sender)
            sums.index_add_(0, into[low:high], addends.received[low:high].view(sums.dtype))
        addends.wait()

    def rows_to_spread(self, arrived: Tensor) -> Tensor:
        """Copies of what has arrived by the link."""
        return arrived.index_select(0, on_device(self.out_of, arrived.device))


class InFlight(NamedTuple):
    """Messages of a product under way: between ranks of one level, and by the link."""

    direct: Messages
    link: tuple[Messages, Messages] | None  # rows and sums


@dataclass(frozen=True)
class HaloTransfer:
    """How remote rows, or sums of them, reach the targets: ``incoming P outgoing``, P moving s slots to h.

    A linear map: :meth:`start` applies it alone; :meth:`send` and :meth:`add` apply it beside a product of local rows,
    to the last rows of which it adds. In two levels the slots are in four pieces: what the exchange moves; rows and
    sums that leave by the link, or sums and rows that arrive so; addends to agents, or rows from them.
    """

    # ``[s, k]``: makes the send buffer from the last k rows of the input; ``None``: that is the input
    before: Matrix | None
    exchange: Exchange  # P, or its first piece: between ranks of a machine
    # ``[b, h]``: makes addends for the last b rows of the result; ``None``: what arrives is the result
    after: Matrix | None
    transport: Transport  # the ranks
    relay: Relay | None = None  # what crosses machines; ``None``: there is one level
    codecs: Codecs = AS_THEY_ARE  # how rows travel

    @cached_property
    def transposed(self) -> HaloTransfer:
        after, before = (None if m is None else m.transposed for m in (self.before, self.after))
        return replace(
            self,
            before=before,
            exchange=self.exchange.transposed,
            after=after,
            relay=None if self.relay is None else self.relay.transposed,
            codecs=self.codecs.transposed,
        )

    @property
    def outgoing(self) -> Matrix:
        """The matrix by which the rank's own rows are multiplied before they are sent."""
        assert self.before is not None
        return self.before

    @property
    def incoming(self) -> Matrix:
        """The matrix by which rows are multiplied where they are needed."""
        assert self.after is not None
        return self.after

    @cached_property
    def is_empty(self) -> bool:
        """Whether there is nothing to exchange, and nobody to exchange it with."""
        return self.transport.group.size == 1 and self.exchange.num_sent == 0

    @cached_property
    def to_slots(self) -> HaloTransfer:
        """The same rows as they arrive, not yet multiplied: from all local rows to halo slots."""
        return replace(self, after=None)

    @cached_property
    def between_slots(self) -> HaloTransfer:
        """From send buffer to halo slots: rows are multiplied neither before nor after."""
        return replace(self, before=None, after=None)

    def weighted(self, outgoing: Tensor, incoming: Tensor) -> HaloTransfer:
        """The same transfer with values for the entries before sending (``outgoing``), and for those on arrival."""
        before, after = Matrix(self.outgoing.pattern, outgoing), Matrix(self.incoming.pattern, incoming)
        return replace(self, before=before, after=after)

    def coded(self, codecs: Codecs) -> HaloTransfer:
        """The same, whose rows travel in other codecs."""
        return self if codecs == self.codecs else replace(self, codecs=codecs)

    @cached_property
    def _sent(self) -> tuple[int, ...]:
        """Slots of each piece that leave, from 0 on."""
        relay = self.relay
        others = () if relay is None else (relay.rows.num_sent, relay.sums.num_sent, relay.gather.num_sent)
        return (0, *accumulate((self.exchange.num_sent, *others)))

    @cached_property
    def _received(self) -> tuple[int, ...]:
        """Slots of each piece that arrive, from 0 on."""
        relay = self.relay
        others = () if relay is None else tuple(e.num_received for e in (relay.sums, relay.rows, relay.spread))
        return (0, *accumulate((self.exchange.num_received, *others)))

    @property
    def num_rows(self) -> int:
        """Rows of the result that it adds to."""
        return self._received[-1] if self.after is None else self.after.num_rows

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Apply it to x alone (collective, no autograd). Exact ones take rows of any shape; others ``[n, F]``."""
        x, outgoing, incoming = x.contiguous(), self.before, self.after
        if any(codecs[0] is not EXACT for codecs in self.codecs):
            in_flight = self.send(x)
            return Pending(lambda: self.add(in_flight, x.new_zeros(self.num_rows, x.shape[1])))
        if outgoing is not None:
            x = self._slots(outgoing, x)
        pending = self.exchange.start(x) if self.relay is None else self._pass(self.relay, x)
        if incoming is None:
            return pending

        def finish() -> Tensor:
            received = pending.wait()
            with phase("unpack"):
                return incoming.multiply(received)

        return Pending(finish)

    def _slots(self, outgoing: Matrix, x: Tensor) -> Tensor:
        """The rows that leave, of any shape."""
        num_columns = x.shape[1:].numel()
        if not num_columns:
            return x.new_empty(outgoing.num_rows, *x.shape[1:])
        sent = self._empty(outgoing.num_rows, num_columns * x.itemsize, x)
        with phase("pack"):
            EXACT.pack(sent, outgoing, _last(x.reshape(-1, num_columns), outgoing.num_cols))
        return sent.view(x.dtype).view(-1, *x.shape[1:])

    def _empty(self, num_rows: int, row_bytes: int, like: Tensor) -> Tensor:
        """Memory for rows that leave, uint8 ``[num_rows, row_bytes]``, which this machine's ranks share if they do."""
        shared = self.transport.shared(num_rows * row_bytes) if like.is_cpu else None
        return _bytes(num_rows, row_bytes, like) if shared is None else shared.view(num_rows, row_bytes)

    def _pass(self, relay: Relay, sent: Tensor) -> Pending[Tensor]:
        """Move slots as they are in two levels. Shapes: ``[s, ...] -> [h, ...]``."""
        received = sent.new_empty(self._received[-1], *sent.shape[1:])
        direct, rows, sums, addends = (sent[low:high] for low, high in pairwise(self._sent))
        near, of_sums, far, spread = (received[low:high] for low, high in pairwise(self._received))
        crossing = relay.rows.start(rows, far)
        gathered = relay.gather.start(addends)
        if relay.gather.num_received:
            sums = sums.clone()
        relay.add(sums, gathered)
        others = relay.sums.start(sums, of_sums), self.exchange.start(direct, near)

        def finish() -> Tensor:
            crossing.wait()
            spreading = relay.spread.start(relay.rows_to_spread(far), spread)
            for messages in (*others, spreading):
                messages.wait()
            return received

        return Pending(finish)

    def send(self, x: Tensor, col_scale: Tensor | None = None, divide: bool = False) -> InFlight:
        """Send what ``diag(col_scale) x`` makes others need (collective, does not wait). Shapes: ``[n, F]``.

        With ``divide``: by the scale's inverse. In two levels addends for sums that leave the machine are waited for.
        """
        factor = None if col_scale is None else _factor(col_scale, self.outgoing.num_cols, divide)
        link = None if self.relay is None else self._send_by(self.relay, x, factor)
        return InFlight(self._launch(self.exchange, self._packed(self.codecs.direct[0], 0, x, factor)), link)

    def _send_by(self, relay: Relay, x: Tensor, factor: Tensor | None) -> tuple[Messages, Messages]:
        """Send the rows that leave the machine; gather addends, add them, and send the sums."""
        rows = self._launch(relay.rows, self._packed(self.codecs.rows[0], 1, x, factor))
        codec = self.codecs.sums[0]
        gathered = self._launch(relay.gather, self._packed(EXACT, 3, x, factor))
        if not relay.gather.num_received or x.shape[1] == 0:
            crossing = self._packed(codec, 2, x, factor)
            gathered.wait()
        else:
            crossing = sums = self._packed(EXACT, 2, x, factor)
            relay.add(sums.view(x.dtype), gathered)
            if codec is not EXACT:
                crossing = self._empty(len(sums), codec.row_bytes(x.shape[1], x.dtype), x)
                with phase("pack"):
                    codec.pack(crossing, _identity(len(sums), x.device), sums.view(x.dtype))
        return rows, self._launch(relay.sums, crossing)

    def _packed(self, codec: Codec, piece: int, x: Tensor, factor: Tensor | None) -> Tensor:
        """The buffer of a piece of what leaves: uint8 ``[s', B]``."""
        low, high = self._sent[piece : piece + 2]
        sent = self._empty(high - low, codec.row_bytes(x.shape[1], x.dtype), x)
        if high > low:
            with phase("pack"):
                if self.before is None:
                    codec.pack(sent, _identity(high - low, x.device), x[low:high])
                else:
                    codec.pack(sent, self.outgoing.rows(low, high), _last(x, self.outgoing.num_cols), factor)
        return sent

    def _launch(self, exchange: Exchange, sent: Tensor) -> Messages:
        """Start messages; where nothing is to overlap, wait for them."""
        received = _bytes(exchange.num_received, sent.shape[1], sent)
        if overlaps():
            return exchange.start(sent, received)
        self.transport.barrier()  # the time that slower ranks are late is no part of the exchange
        messages = exchange.start(sent, received)
        messages.wait()
        return messages

    def add(self, in_flight: InFlight, out: Tensor, row_scale: Tensor | None = None, divide: bool = False) -> Tensor:
        """Add ``diag(row_scale)`` times what comes of the messages to ``out`` (waits). Shapes: ``[n, F]``.

        With ``divide``: by the scale's inverse.
        """
        factor, relay, link, codecs = _factor(row_scale, self.num_rows, divide), self.relay, in_flight.link, self.codecs
        self._unpack(codecs.direct[0], in_flight.direct, self.exchange.arrivals, 0, out, factor)
        if relay is None or link is None:
            return out
        rows, sums = link
        rows.wait()  # all of them, and what others wait for goes on first
        spreading = self._launch(relay.spread, relay.rows_to_spread(rows.received))
        self._unpack(codecs.rows[0], rows, relay.rows.together, 2, out, factor)
        self._unpack(codecs.rows[0], spreading, relay.spread.arrivals, 3, out, factor)
        self._unpack(codecs.sums[0], sums, relay.sums.together, 1, out, factor)
        return out

    def _unpack(
        self,
        codec: Codec,
        messages: Messages,
        arrivals: tuple[Arrival, ...],
        piece: int,
        out: Tensor,
        factor: Tensor | None,
    ) -> None:
        """Add the messages of a piece, each when it has come; all in one product where they come together."""
        first, received, addends = self._received[piece], messages.received, _last(out, self.num_rows)
        for sender, low, high in messages.together(arrivals):
            messages.wait_for(sender)
            with phase("unpack"):
                if self.after is None:  # each message has rows of its own
                    slots = _identity(high - low, received.device)
                    codec.unpack_add(received[low:high], slots, addends[first + low : first + high])
                else:
                    columns = self.incoming.columns(first + low, first + high)
                    codec.unpack_add(received[low:high], columns, addends, factor)
        messages.wait()


def _bytes(num_rows: int, row_bytes: int, like: Tensor) -> Tensor:
    """A message's memory, uint8 ``[num_rows, row_bytes]``, with any content."""
    return ops.empty_rows(like.new_empty((0, row_bytes), dtype=torch.uint8), num_rows, row_bytes)


def _identity(size: int, device: torch.device) -> Matrix:
    return Matrix(CSR.identity(size, device))


def _last(rows: Tensor, count: int) -> Tensor:
    return rows.narrow(0, rows.shape[0] - count, count)


def _factor(scale: Tensor | None, count: int, divide: bool) -> Tensor | None:
    if scale is None:
        return None
    return _last(scale, count).reciprocal() if divide else _last(scale, count)
