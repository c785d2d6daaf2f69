"""Redistribute rows or elements over ranks in a fixed pattern: each goes to one rank, or copies of it to several.

Permutations of rows, changes of a matrix' layout on the grid and values of edges that several tiles need are all done
so: each rank picks what the others get, one all-to-all carries it, and what arrives is written to its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.comm.group import Group, from_wire, to_wire
from pyg_dist.backend.comm.transport import Pending, Transport
from pyg_dist.backend.on_device import on_device


@dataclass(frozen=True)
class RowsByRank:
    """Rows of a local tensor of any shape, by rank."""

    index: Tensor  # int64, on the host, the rows for one rank after another
    sizes: tuple[int, ...]  # how many there are, by rank
    num_rows: int  # of the tensor
    repeats: bool = False  # whether rows may occur several times; then what is put there is added up

    def pack(self, x: Tensor) -> Tensor:
        """The rows, by rank. Shapes: ``[n, ...] -> [sum(sizes), ...]``."""
        return x.index_select(0, on_device(self.index, x.device))

    def unpack(self, rows: Tensor) -> Tensor:
        """The tensor whose rows these are. Shapes: ``[sum(sizes), ...] -> [n, ...]``."""
        index, shape = on_device(self.index, rows.device), (self.num_rows, *rows.shape[1:])
        if self.repeats:
            sums = rows.new_zeros(shape)
            # Torch's sum of floats on a GPU depends on who comes first.
            is_ours = rows.dtype in ops.FLOATS and rows.numel() > 0
            return ops.scatter_add_rows(sums, index, rows) if is_ours else sums.index_add_(0, index, rows)
        return rows.new_empty(shape).index_copy_(0, index, rows)


@dataclass(frozen=True)
class BlocksByRank:
    """Blocks of a local matrix, one for each rank."""

    blocks: tuple[tuple[Tensor | None, int, int], ...]  # rows, on the host; first and last column, exclusive
    shape: tuple[int, int]  # of the matrix

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements by rank."""
        return tuple(0 if rows is None else rows.numel() * (high - low) for rows, low, high in self.blocks)

    def pack(self, x: Tensor) -> Tensor:
        """The elements, by rank. Shapes: ``[n, m] -> [sum(sizes)]``."""
        taken = [
            x[:, low:high].index_select(0, on_device(rows, x.device)).view(-1)
            for rows, low, high in self.blocks
            if rows is not None
        ]
        return taken[0] if len(taken) == 1 else torch.cat([x.new_empty(0), *taken])

    def unpack(self, elements: Tensor) -> Tensor:
        """The matrix whose elements these are. Shapes: ``[sum(sizes)] -> [n, m]``."""
        out = elements.new_empty(self.shape)
        for piece, (rows, low, high) in zip(torch.split(elements, list(self.sizes)), self.blocks, strict=True):
            if rows is not None:
                out[:, low:high].index_copy_(0, on_device(rows, out.device), piece.view(rows.numel(), high - low))
        return out


@dataclass(eq=False)
class Redistribution:
    """A change of distribution, as this rank sees it: a :class:`~pyg_dist.backend.autograd.linear_map.LinearMap`."""

    transport: Transport
    send: RowsByRank | BlocksByRank  # what other ranks get of the local tensor
    receive: RowsByRank | BlocksByRank  # where what they send belongs in the result

    @cached_property
    def transposed(self) -> Redistribution:
        """The way back, on which copies are added up. It may be set: in some, copies count once."""
        return Redistribution(self.transport, self.receive, self.send)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Send the elements of ``x`` (collective). Any dtype."""
        elements, dtype = self.send.pack(x), x.dtype
        if self.transport.group.size == 1:
            return Pending(lambda: self.receive.unpack(elements))
        messages = self.transport.all_to_all(to_wire(elements), self.send.sizes, self.receive.sizes)
        return Pending(lambda: self.receive.unpack(from_wire(messages.wait(), dtype)))

    @staticmethod
    def by_position(group: Group, before: Sequence[Tensor], after: Sequence[Tensor]) -> Redistribution:
        """The move from each rank's positions among 0 ... R-1 to those that it gets, one for one (not collective)."""
        send = _by_rank(before[group.rank], _owner(after), group.size)
        receive = _by_rank(after[group.rank], _owner(before), group.size)
        return Redistribution(Transport(group), send, receive)

    @staticmethod
    def of_copies(transport: Transport, receiver: Tensor, row: Tensor, key: Tensor) -> Redistribution:
        """Send local ``row[i]`` to ``receiver[i]``, where rows are sorted by ``key`` of the local row (collective)."""
        group = transport.group
        order = torch.argsort(receiver, stable=True)
        sent = torch.bincount(receiver, minlength=group.size)
        received = group.stack(sent)[:, group.rank]
        num_received, sizes = int(received.sum()), tuple(received.tolist())
        send = RowsByRank(row[order], tuple(sent.tolist()), key.numel(), repeats=True)
        unsorted = RowsByRank(host.arange(num_received), sizes, num_received)
        arrived = Redistribution(transport, send, unsorted).start(key).wait()
        place = torch.argsort(torch.argsort(arrived, stable=True))
        return Redistribution(transport, send, RowsByRank(place, sizes, num_received))

    @staticmethod
    def of_requests(transport: Transport, owner: Tensor, row: Tensor, num_rows: int) -> Redistribution:
        """Fetch local ``row[i]`` of rank ``owner[i]`` as row i; several ranks may fetch one row (collective).

        ``owner`` and ``row`` are on the host; this rank has ``num_rows``.
        """
        group = transport.group
        order = torch.argsort(owner, stable=True)
        asked = torch.bincount(owner, minlength=group.size)
        sent = group.stack(asked)[:, group.rank].tolist()
        received = tuple(asked.tolist())
        wanted = transport.all_to_all(row[order], received, sent).wait() if group.size > 1 else row[order]
        send = RowsByRank(wanted, tuple(sent), num_rows, repeats=True)
        return Redistribution(transport, send, RowsByRank(order, received, row.numel()))


def _owner(positions: Sequence[Tensor]) -> Tensor:
    ranks = torch.repeat_interleave(host.arange(len(positions)), host.tensor([p.numel() for p in positions]))
    return torch.empty_like(ranks).index_copy_(0, torch.cat(list(positions)).cpu(), ranks)


def _by_rank(position: Tensor, owner: Tensor, num_ranks: int) -> RowsByRank:
    """Local rows ordered by the rank at the other end and then by position."""
    position = position.cpu()
    order = torch.argsort(position)
    rank = owner[position[order]]
    sizes = tuple(torch.bincount(rank, minlength=num_ranks).tolist())
    return RowsByRank(order[torch.argsort(rank, stable=True)], sizes, position.numel())
