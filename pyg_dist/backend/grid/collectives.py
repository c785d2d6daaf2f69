"""Sums and gathers along mesh axes, and their adjoints, with messages in the dtype that the caller chooses.

=====================  ==========================  ==========================
function               forward                     backward
=====================  ==========================  ==========================
``gather_enter``       all-gather                  sum, each rank its piece
``leave_scatter``      sum, each rank its piece    all-gather
``enter_replicas``     identity                    sum over the ranks
``leave_replicas``     sum over ranks              identity
=====================  ==========================  ==========================

The first two are the *reduce-scatter* form of the grid's sums, the other two the *all-reduce* form (Plexus, Alg. 1); an
all-reduce is a reduce-scatter and an all-gather. Each sum is made on one rank in rank order (the same bits everywhere)
and in full precision, whatever the dtype of the messages.

Legend: a tensor's *pieces* are ranges of its rows (dim 0) or columns (dim 1), one for each rank of the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.grid.transport import Flight, Wire
from pyg_dist.backend.local_function import LocalFunction


def gather_pieces(piece: Tensor, wire: Wire, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """Every rank's piece, concatenated along ``dim`` (collective, no autograd)."""
    axis = wire.axis
    if axis.size == 1:
        return piece
    flat = piece.to(wire.narrow(piece.dtype)).contiguous().view(-1)
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
        axis, dtype = wire.axis, wire.narrow(whole.dtype)
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
