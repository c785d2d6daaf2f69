"""Rows that change ranks one for one: the same rows, distributed in another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import Group, from_wire, to_wire
from pyg_dist.backend.halo.exchange import Exchange
from pyg_dist.backend.local_function import LocalFunction


@dataclass(frozen=True)
class RowPermutation:
    """A permutation of the rows of an axis, as this rank sees it.

    Attributes:
        departure: local rows before, by receiver and then by position.
        exchange: what carries them.
        arrival: for each local row afterwards, where it stands among those that arrive.
    """

    departure: Tensor
    exchange: Exchange
    arrival: Tensor

    @staticmethod
    def by_position(group: Group, before: Sequence[Tensor], after: Sequence[Tensor]) -> RowPermutation:
        """The move between two distributions of the positions 0 ... R-1 (not collective).

        Args:
            group: the ranks.
            before: the positions of the rows of each rank.
            after: those that each rank gets.
        """
        departure, send_counts = _by_rank(before[group.rank], _owner(after), group.size)
        filled, recv_counts = _by_rank(after[group.rank], _owner(before), group.size)
        # Many rows stay, and only an all-to-all carries what a rank sends to itself.
        exchange = Exchange(group, send_counts, recv_counts, is_dense=True)
        return RowPermutation(departure, exchange, torch.argsort(filled))

    @property
    def transposed(self) -> RowPermutation:
        """The way back."""
        return RowPermutation(torch.argsort(self.arrival), self.exchange.transposed, torch.argsort(self.departure))


def _owner(positions: Sequence[Tensor]) -> Tensor:
    """The rank that holds each position."""
    ranks = torch.repeat_interleave(torch.arange(len(positions)), torch.tensor([p.numel() for p in positions]))
    return torch.empty_like(ranks).index_copy_(0, torch.cat(list(positions)).cpu(), ranks)


def _by_rank(position: Tensor, owner: Tensor, num_ranks: int) -> tuple[Tensor, tuple[int, ...]]:
    """Local rows ordered by the rank at the other end and then by position, and how many there are by rank."""
    position = position.cpu()
    order = torch.argsort(position)
    rank = owner[position[order]]
    return order[torch.argsort(rank, stable=True)], tuple(torch.bincount(rank, minlength=num_ranks).tolist())


class _PermuteRows(LocalFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, move: RowPermutation) -> Tensor:
        ctx.move = move
        moved = rows.index_select(0, move.departure.to(rows.device))
        if move.exchange.group.size > 1:
            moved = from_wire(move.exchange.start(to_wire(moved)).wait(), rows.dtype)
        return moved.index_select(0, move.arrival.to(rows.device))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return permute_rows(grad, ctx.move.transposed), None


def permute_rows(rows: Tensor, move: RowPermutation) -> Tensor:
    """The rows in their other distribution, differentiable; collective both ways. Shapes: ``[b, ...] -> [a, ...]``."""
    return _PermuteRows.apply(rows, move)  # type: ignore[no-any-return, no-untyped-call]
