"""Sums and gathers along mesh axes, and their adjoints, with messages in the dtype that the caller chooses.

=====================  ==========================  ==========================
function               forward                     backward
=====================  ==========================  ==========================
``gather_enter``       all-gather                  sum, each rank its piece
``leave_scatter``      sum, each rank its piece    all-gather
``enter_replicas``     identity                    sum over the ranks
``leave_replicas``     sum over ranks              identity
``reroute``            another layout              the layout before
``copy_out``           rows go to several ranks    sum, at the row's rank
=====================  ==========================  ==========================

The first two are the *reduce-scatter* form of the grid's sums, the next two the *all-reduce* form (Plexus, Alg. 1); an
all-reduce is a reduce-scatter and an all-gather. All of them, and the last two, are one collective, the all-to-all with
uneven pieces: every number of rows fits without padding, what is sent is what is counted, each sum is made on one rank
in rank order (the same bits everywhere) and in full precision, whatever the dtype of the messages. On gloo it also beat
the ring collectives, 16 against 53 ms for a sum of 8 MB on four processes of one machine.

Legend: a tensor's *pieces* are ranges of its rows (dim 0) or columns (dim 1), one for each rank of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.axis import Axis
from pyg_dist.backend.exchange import Traffic
from pyg_dist.backend.function import LocalFunction
from pyg_dist.backend.phases import phase


@dataclass(frozen=True)
class Wire:
    """One product of mesh axes as the grid's sums use it.

    Attributes:
        axis: the ranks.
        traffic: where to count what this rank sends to others.
        dtype: of the messages, or ``None`` for the tensor's own.
    """

    axis: Axis
    traffic: Traffic
    dtype: torch.dtype | None = None


class Flight:
    """An all-to-all under way; :meth:`land` waits for it."""

    def __init__(self, wire: Wire, outgoing: Tensor, sent: Sequence[int], received: Sequence[int]) -> None:
        axis = wire.axis
        self.outgoing = outgoing  # must live until it has left
        self.incoming = outgoing.new_empty(sum(received))
        wire.traffic.num_bytes += (sum(sent) - sent[axis.rank]) * outgoing.element_size()
        wire.traffic.num_messages += sum(n > 0 for r, n in enumerate(sent) if r != axis.rank)
        with phase("exchange"):
            self._work = dist.all_to_all_single(
                self.incoming, outgoing, list(received), list(sent), group=axis.process_group, async_op=True
            )

    def land(self) -> Tensor:
        """What has arrived, by sender."""
        with phase("exchange"):
            self._work.wait()
        return self.incoming


def _narrow_dtype(wire: Wire, dtype: torch.dtype) -> torch.dtype:
    """The dtype of messages: the wire's where it is narrower."""
    return wire.dtype if wire.dtype is not None and wire.dtype.itemsize < dtype.itemsize else dtype


def gather_pieces(piece: Tensor, wire: Wire, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """Every rank's piece, concatenated along ``dim`` (collective, no autograd)."""
    axis = wire.axis
    if axis.size == 1:
        return piece
    flat = piece.to(_narrow_dtype(wire, piece.dtype)).contiguous().view(-1)
    shapes = [(size, *piece.shape[1:]) if dim == 0 else (piece.shape[0], size, *piece.shape[2:]) for size in sizes]
    received = [math.prod(shape) for shape in shapes]
    arrived = Flight(wire, flat.repeat(axis.size), [flat.numel()] * axis.size, received).land().to(piece.dtype)
    if dim == 0:
        return arrived.view(sum(sizes), *piece.shape[1:])
    return torch.cat([p.view(s) for p, s in zip(torch.split(arrived, received), shapes, strict=True)], dim)


class SumFlight:
    """:func:`sum_pieces` under way; :meth:`land` adds up what arrived."""

    def __init__(self, whole: Tensor, wire: Wire, sizes: Sequence[int], dim: int) -> None:
        self._dtype = whole.dtype
        axis, dtype = wire.axis, _narrow_dtype(wire, whole.dtype)
        pieces = torch.split(whole, list(sizes), dim)
        self._shape = pieces[axis.rank].shape
        sent = [piece.numel() for piece in pieces]
        whole = whole.to(dtype)
        if dim == 0:
            flat = whole.contiguous().view(-1)
        else:
            flat = torch.cat([piece.reshape(-1) for piece in torch.split(whole, list(sizes), dim)])
        self._num_ranks = axis.size
        self._flight = Flight(wire, flat, sent, [sent[axis.rank]] * axis.size)

    def land(self) -> Tensor:
        """This rank's piece of the sum."""
        arrived = self._flight.land().view(self._num_ranks, *self._shape)
        # Wide enough that messages in bfloat16 lose nothing here that they did not lose on the way.
        return arrived.sum(0, dtype=self._dtype)


def sum_pieces(whole: Tensor, wire: Wire, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """This rank's piece of the sum of every rank's ``whole`` (collective, no autograd)."""
    return whole if wire.axis.size == 1 else SumFlight(whole, wire, sizes, dim).land()


def sum_all(tensor: Tensor, wire: Wire) -> Tensor:
    """The sum of every rank's ``tensor``, the same bits on every rank (collective, no autograd)."""
    if wire.axis.size == 1:
        return tensor
    sizes = near_equal(tensor.numel(), wire.axis.size)
    return gather_pieces(sum_pieces(tensor.reshape(-1), wire, sizes), wire, sizes).view(tensor.shape)


def near_equal(size: int, num_parts: int) -> list[int]:
    """Sizes of ``num_parts`` near-equal ranges."""
    bounds = [size * part // num_parts for part in range(num_parts + 1)]
    return [high - low for low, high in pairwise(bounds)]


class _GatherEnter(LocalFunction):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, wire: Wire, sizes: Sequence[int], dim: int) -> Tensor:
        ctx.rest = (wire, sizes, dim)
        return gather_pieces(piece, wire, sizes, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return leave_scatter(grad, *ctx.rest), None, None, None


class _LeaveScatter(LocalFunction):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, wire: Wire, sizes: Sequence[int], dim: int) -> Tensor:
        ctx.rest = (wire, sizes, dim)
        return sum_pieces(whole, wire, sizes, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather_enter(grad, *ctx.rest), None, None, None


class _EnterReplicas(LocalFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return leave_replicas(grad, ctx.wire), None


class _LeaveReplicas(LocalFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wire: Wire) -> Tensor:
        ctx.wire = wire
        return sum_all(tensor, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return enter_replicas(grad, ctx.wire), None


def gather_enter(piece: Tensor, wire: Wire, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """Every rank's piece, for a product in which each rank has another part (collective; backward: a sum)."""
    if wire.axis.size == 1:
        return piece
    out: Tensor = _GatherEnter.apply(piece, wire, sizes, dim)  # type: ignore[no-untyped-call]
    return out


def leave_scatter(whole: Tensor, wire: Wire, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """This rank's piece of the sum of every rank's ``whole`` (collective; backward: an all-gather)."""
    if wire.axis.size == 1:
        return whole
    out: Tensor = _LeaveScatter.apply(whole, wire, sizes, dim)  # type: ignore[no-untyped-call]
    return out


def enter_replicas(tensor: Tensor, wire: Wire) -> Tensor:
    """A replica, for a product in which each rank has another part (backward: a sum, collective)."""
    if wire.axis.size == 1 or not tensor.requires_grad:
        return tensor
    out: Tensor = _EnterReplicas.apply(tensor, wire)  # type: ignore[no-untyped-call]
    return out


def leave_replicas(tensor: Tensor, wire: Wire) -> Tensor:
    """The sum over the ranks, on every rank (collective; backward: identity)."""
    if wire.axis.size == 1:
        return tensor
    out: Tensor = _LeaveReplicas.apply(tensor, wire)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class Rerouting:
    """A change of layout on this rank: a linear map that moves every element of a matrix.

    Attributes:
        wire: all ranks of the grid.
        send: for each rank: the local rows (or ``None``) and the first and last local column, exclusive, that it gets.
        receive: for each rank: the local rows that it fills, and likewise.
        num_rows, num_columns: the local size afterwards.
        back: the change in the other direction.
    """

    wire: Wire
    send: tuple[tuple[Tensor | None, int, int], ...]
    receive: tuple[tuple[Tensor | None, int, int], ...]
    num_rows: int
    num_columns: int
    back: list[Rerouting]

    def move(self, x: Tensor) -> Tensor:
        """The rows and columns of the other layout (collective, no autograd)."""
        outgoing = [
            x.new_empty(0) if rows is None else x[:, low:high].index_select(0, rows).reshape(-1)
            for rows, low, high in self.send
        ]
        sizes = [0 if rows is None else rows.numel() * (high - low) for rows, low, high in self.receive]
        if self.wire.axis.size == 1:
            arrived = outgoing[0]
        else:
            flat = torch.cat(outgoing)
            wire_dtype = torch.uint8 if flat.dtype == torch.bool else flat.dtype
            sent = [piece.numel() for piece in outgoing]
            arrived = Flight(self.wire, flat.to(wire_dtype), sent, sizes).land().to(x.dtype)
        out = x.new_empty(self.num_rows, self.num_columns)
        for piece, (rows, low, high) in zip(torch.split(arrived, sizes), self.receive, strict=True):
            if rows is not None:
                out[:, low:high].index_copy_(0, rows, piece.view(rows.numel(), high - low))
        return out


class _Reroute(LocalFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rerouting: Rerouting) -> Tensor:
        ctx.rerouting = rerouting
        return rerouting.move(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reroute(grad, ctx.rerouting.back[0]), None


def reroute(x: Tensor, rerouting: Rerouting) -> Tensor:
    """The matrix in its other layout; values and gradients move, nothing is added (collective, both ways).

    The gradient of a matrix, too, is one matrix, of which replicas hold the same elements: so the backward is the
    change of layout in the other direction, and replicas count once.
    """
    out: Tensor = _Reroute.apply(x, rerouting)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class Dispatch:
    """Rows that go to one or several ranks each, the same way every time.

    Attributes:
        wire: the ranks.
        send_index: local rows, by receiver.
        sent, received: rows by rank.
        arrival: puts what arrives into its final order.
        num_rows: local rows.
    """

    wire: Wire
    send_index: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    arrival: Tensor
    num_rows: int

    @staticmethod
    def by_rank(wire: Wire, receiver: Tensor, row: Tensor, key: Tensor) -> Dispatch:
        """Send local ``row[i]`` to ``receiver[i]``, where rows are sorted by their ``key`` (collective).

        Shapes:
            - receiver, row: int64 ``[s]``
            - key: int64, by local row
        """
        axis = wire.axis
        order = torch.argsort(receiver, stable=True)
        sent = torch.bincount(receiver, minlength=axis.size)
        received = axis.gather_rows(sent.view(1, -1), [1] * axis.size)[:, axis.rank]
        unsorted = Dispatch(
            wire,
            row[order],
            tuple(sent.tolist()),
            tuple(received.tolist()),
            torch.arange(int(received.sum())),
            key.numel(),
        )
        return replace(unsorted, arrival=torch.argsort(unsorted.bring(key), stable=True))

    def bring(self, values: Tensor) -> Tensor:
        """What arrives of every rank's ``values`` (collective, no autograd): ``[e, ...] -> [sum(received), ...]``."""
        outgoing = values.index_select(0, self.send_index)
        return self._exchange(outgoing, self.sent, self.received).index_select(0, self.arrival)

    def sum_home(self, copies: Tensor) -> Tensor:
        """The sum of every row's copies, at the row's rank; the transpose of :meth:`bring` (collective, no autograd).

        Shapes:
            - copies: ``[sum(received), ...]``
            - output: ``[e, ...]``
        """
        outgoing = torch.empty_like(copies).index_copy_(0, self.arrival, copies)
        arrived = self._exchange(outgoing, self.received, self.sent)
        return copies.new_zeros(self.num_rows, *copies.shape[1:]).index_add_(0, self.send_index, arrived)

    def _exchange(self, outgoing: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        """Rows by receiver become rows by sender."""
        if self.wire.axis.size == 1:
            return outgoing
        shape = outgoing.shape[1:]
        sizes = ([count * shape.numel() for count in counts] for counts in (sent, received))
        return Flight(self.wire, outgoing.contiguous().view(-1), *sizes).land().view(sum(received), *shape)


class _CopyOut(LocalFunction):
    """Copies of rows, or their sums: each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dispatch: Dispatch, home: bool) -> Tensor:
        ctx.dispatch, ctx.home = dispatch, home
        return dispatch.sum_home(values) if home else dispatch.bring(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _CopyOut.apply(grad, ctx.dispatch, not ctx.home), None, None  # type: ignore[no-untyped-call]


def copy_out(values: Tensor, dispatch: Dispatch) -> Tensor:
    """:meth:`Dispatch.bring`, for products in which each copy has another part (collective; backward: a sum)."""
    out: Tensor = _CopyOut.apply(values, dispatch, False)  # type: ignore[no-untyped-call]
    return out
