"""Sums and gathers along mesh axes, and their adjoints, with messages in the dtype that the caller chooses.

=====================  ==========================  ==========================
function               forward                     backward
=====================  ==========================  ==========================
``all_gather``       all-gather                  sum, each rank its piece
``reduce_scatter``      sum, each rank its piece    all-gather
``copy_to_replicas``     identity                    sum over the ranks
``reduce_from_replicas``     sum over ranks              identity
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

from pyg_dist.backend.grid.transport import MeshTransport, Pending
from pyg_dist.backend.local_function import LocalFunction


def gather_pieces(piece: Tensor, wire: MeshTransport, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """Every rank's piece, concatenated along ``dim`` (collective, no autograd)."""
    group = wire.group
    if group.size == 1:
        return piece
    flat = piece.to(wire.narrow(piece.dtype)).contiguous().view(-1)
    shapes = [(size, *piece.shape[1:]) if dim == 0 else (piece.shape[0], size, *piece.shape[2:]) for size in sizes]
    received = [math.prod(shape) for shape in shapes]
    arrived = Pending(wire, flat.repeat(group.size), [flat.numel()] * group.size, received).wait().to(piece.dtype)
    if dim == 0:
        return arrived.view(sum(sizes), *piece.shape[1:])
    return torch.cat([p.view(s) for p, s in zip(torch.split(arrived, received), shapes, strict=True)], dim)


class PendingSum:
    """:func:`sum_pieces` under way; :meth:`wait` adds up what arrived."""

    def __init__(self, whole: Tensor, wire: MeshTransport, sizes: Sequence[int], dim: int) -> None:
        self._dtype = whole.dtype
        group, dtype = wire.group, wire.narrow(whole.dtype)
        pieces = torch.split(whole, list(sizes), dim)
        self._shape = pieces[group.rank].shape
        sent = [piece.numel() for piece in pieces]
        whole = whole.to(dtype)
        if dim == 0:
            flat = whole.contiguous().view(-1)
        else:
            flat = torch.cat([piece.reshape(-1) for piece in torch.split(whole, list(sizes), dim)])
        self._num_ranks = group.size
        self._pending = Pending(wire, flat, sent, [sent[group.rank]] * group.size)

    def wait(self) -> Tensor:
        """This rank's piece of the sum."""
        arrived = self._pending.wait().view(self._num_ranks, *self._shape)
        # Wide enough that messages in bfloat16 lose nothing here that they did not lose on the way.
        return arrived.sum(0, dtype=self._dtype)


def sum_pieces(whole: Tensor, wire: MeshTransport, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """This rank's piece of the sum of every rank's ``whole`` (collective, no autograd)."""
    return whole if wire.group.size == 1 else PendingSum(whole, wire, sizes, dim).wait()


def sum_all(tensor: Tensor, wire: MeshTransport) -> Tensor:
    """The sum of every rank's ``tensor``, the same bits on every rank (collective, no autograd)."""
    if wire.group.size == 1:
        return tensor
    sizes = near_equal(tensor.numel(), wire.group.size)
    return gather_pieces(sum_pieces(tensor.reshape(-1), wire, sizes), wire, sizes).view(tensor.shape)


def near_equal(size: int, num_parts: int) -> list[int]:
    """Sizes of ``num_parts`` near-equal ranges."""
    bounds = [size * part // num_parts for part in range(num_parts + 1)]
    return [high - low for low, high in pairwise(bounds)]


class _AllGather(LocalFunction):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, wire: MeshTransport, sizes: Sequence[int], dim: int) -> Tensor:
        ctx.rest = (wire, sizes, dim)
        return gather_pieces(piece, wire, sizes, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_scatter(grad, *ctx.rest), None, None, None


class _ReduceScatter(LocalFunction):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, wire: MeshTransport, sizes: Sequence[int], dim: int) -> Tensor:
        ctx.rest = (wire, sizes, dim)
        return sum_pieces(whole, wire, sizes, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return all_gather(grad, *ctx.rest), None, None, None


class _CopyToReplicas(LocalFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wire: MeshTransport) -> Tensor:
        ctx.wire = wire
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_from_replicas(grad, ctx.wire), None


class _ReduceFromReplicas(LocalFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, wire: MeshTransport) -> Tensor:
        ctx.wire = wire
        return sum_all(tensor, wire)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_to_replicas(grad, ctx.wire), None


def all_gather(piece: Tensor, wire: MeshTransport, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """Every rank's piece, for a product in which each rank has another part (collective; backward: a sum)."""
    if wire.group.size == 1:
        return piece
    out: Tensor = _AllGather.apply(piece, wire, sizes, dim)  # type: ignore[no-untyped-call]
    return out


def reduce_scatter(whole: Tensor, wire: MeshTransport, sizes: Sequence[int], dim: int = 0) -> Tensor:
    """This rank's piece of the sum of every rank's ``whole`` (collective; backward: an all-gather)."""
    if wire.group.size == 1:
        return whole
    out: Tensor = _ReduceScatter.apply(whole, wire, sizes, dim)  # type: ignore[no-untyped-call]
    return out


def copy_to_replicas(tensor: Tensor, wire: MeshTransport) -> Tensor:
    """A replica, for a product in which each rank has another part (backward: a sum, collective)."""
    if wire.group.size == 1 or not tensor.requires_grad:
        return tensor
    out: Tensor = _CopyToReplicas.apply(tensor, wire)  # type: ignore[no-untyped-call]
    return out


def reduce_from_replicas(tensor: Tensor, wire: MeshTransport) -> Tensor:
    """The sum over the ranks, on every rank (collective; backward: identity)."""
    if wire.group.size == 1:
        return tensor
    out: Tensor = _ReduceFromReplicas.apply(tensor, wire)  # type: ignore[no-untyped-call]
    return out
