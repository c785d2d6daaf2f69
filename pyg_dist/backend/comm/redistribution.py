"""Elements that change ranks, the same way every time: each goes to one rank, or to several that get copies of it.

A permutation of rows, a change of a matrix' layout on the grid and the values of edges that several tiles need are all
this: each rank picks what the others get, one all-to-all carries it, and what arrives is put where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import Group, from_wire, to_wire
from pyg_dist.backend.comm.transport import Pending, Transport


@dataclass(frozen=True)
class Blocks:
    """Which elements of a local tensor each rank has to do with.

    Attributes:
        rows: int64, local rows, by rank.
        counts: how many there are, by rank.
        shape: of the local tensor: its rows and, with ``columns``, its columns.
        columns: the first and the last column, exclusive, by rank; ``None``: whole rows, of any shape.
        repeats: whether rows occur several times; then what is put there is added up.
    """

    rows: Tensor
    counts: tuple[int, ...]
    shape: tuple[int, ...]
    columns: tuple[tuple[int, int], ...] | None = None
    repeats: bool = False

    @staticmethod
    def of_columns(pieces: Sequence[tuple[Tensor | None, int, int]], shape: tuple[int, int]) -> Blocks:
        """Rows (or ``None``), first and last column, exclusive, for each rank."""
        rows = [piece[0] if piece[0] is not None else torch.empty(0, dtype=torch.int64) for piece in pieces]
        columns = tuple((low, high) for _, low, high in pieces)
        return Blocks(torch.cat(rows), tuple(r.numel() for r in rows), shape, columns)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Entries of the first dimension of the messages, by rank."""
        if self.columns is None:
            return self.counts
        return tuple(count * (high - low) for count, (low, high) in zip(self.counts, self.columns, strict=True))

    def take(self, x: Tensor) -> Tensor:
        """The elements, by rank. Shapes: ``[n, ...] -> [sum(sizes), ...]``."""
        rows = self.rows.to(x.device)
        if self.columns is None:
            return x.index_select(0, rows)
        of_ranks = zip(torch.split(rows, list(self.counts)), self.columns, strict=True)
        pieces = [x[:, low:high].index_select(0, mine).view(-1) for mine, (low, high) in of_ranks]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def put(self, elements: Tensor) -> Tensor:
        """The tensor whose elements these are. Shapes: ``[sum(sizes), ...] -> [n, ...]``."""
        rows = self.rows.to(elements.device)
        if self.repeats:
            return elements.new_zeros(*self.shape, *elements.shape[1:]).index_add_(0, rows, elements)
        out = elements.new_empty(*self.shape, *elements.shape[1:])
        if self.columns is None:
            return out.index_copy_(0, rows, elements)
        pieces, of_ranks = torch.split(elements, list(self.sizes)), torch.split(rows, list(self.counts))
        for piece, mine, (low, high) in zip(pieces, of_ranks, self.columns, strict=True):
            out[:, low:high].index_copy_(0, mine, piece.view(mine.numel(), high - low))
        return out


@dataclass(eq=False)
class Redistribution:
    """A change of distribution, as this rank sees it: a :class:`~pyg_dist.backend.autograd.linear_map.LinearMap`.

    Attributes:
        transport: the ranks.
        send: what they get of the local tensor.
        receive: where what they send belongs in the result.
    """

    transport: Transport
    send: Blocks
    receive: Blocks

    @cached_property
    def transposed(self) -> Redistribution:
        """The way back, on which copies are added up. It may be set: in some, copies count once."""
        return Redistribution(self.transport, self.receive, self.send)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Send the elements of ``x`` (collective). Any dtype."""
        elements, dtype = self.send.take(x), x.dtype
        if self.transport.group.size == 1:
            return Pending(lambda: self.receive.put(elements))
        messages = self.transport.all_to_all(to_wire(elements), self.send.sizes, self.receive.sizes)
        return Pending(lambda: self.receive.put(from_wire(messages.wait(), dtype)))

    @staticmethod
    def by_position(group: Group, before: Sequence[Tensor], after: Sequence[Tensor]) -> Redistribution:
        """The move between two distributions of the positions 0 ... R-1, one for one (not collective).

        Args:
            group: the ranks.
            before: the positions of the rows of each rank.
            after: those that each rank gets.
        """
        send = _by_rank(before[group.rank], _owner(after), group.size)
        receive = _by_rank(after[group.rank], _owner(before), group.size)
        return Redistribution(Transport(group), send, receive)

    @staticmethod
    def of_copies(transport: Transport, receiver: Tensor, row: Tensor, key: Tensor) -> Redistribution:
        """Send local ``row[i]`` to ``receiver[i]``, where rows are sorted by their ``key`` (collective).

        Shapes:
            - receiver, row: int64 ``[s]``
            - key: int64, by local row
        """
        group = transport.group
        order = torch.argsort(receiver, stable=True)
        sent = torch.bincount(receiver, minlength=group.size)
        received = group.gather_rows(sent.view(1, -1), [1] * group.size)[:, group.rank]
        send = Blocks(row[order], tuple(sent.tolist()), (key.numel(),), repeats=True)
        num_received, counts = int(received.sum()), tuple(received.tolist())
        unsorted = Blocks(torch.arange(num_received), counts, (num_received,))
        arrived = Redistribution(transport, send, unsorted).start(key).wait()
        place = torch.argsort(torch.argsort(arrived, stable=True))
        return Redistribution(transport, send, Blocks(place, counts, (num_received,)))


def _owner(positions: Sequence[Tensor]) -> Tensor:
    """The rank that holds each position."""
    ranks = torch.repeat_interleave(torch.arange(len(positions)), torch.tensor([p.numel() for p in positions]))
    return torch.empty_like(ranks).index_copy_(0, torch.cat(list(positions)).cpu(), ranks)


def _by_rank(position: Tensor, owner: Tensor, num_ranks: int) -> Blocks:
    """Local rows ordered by the rank at the other end and then by position."""
    position = position.cpu()
    order = torch.argsort(position)
    rank = owner[position[order]]
    counts = tuple(torch.bincount(rank, minlength=num_ranks).tolist())
    return Blocks(order[torch.argsort(rank, stable=True)], counts, (position.numel(),))
