"""Collectives of tagged messages, on gloo: a rank that makes another call than the others never gets their messages.

gloo matches the point-to-point messages of two ranks by tag. Here every message carries the tag of its call
(:mod:`~pyg_dist.backend.comm.checks.calls`) mixed with its own length. gloo's own collectives
match by order alone: ranks that diverge would read one call's numbers as those of another.

What a rank sends is handed over before what it receives: where processors are shared, gloo's thread otherwise spins
on a lock that the waiting thread holds (29 against 18 ms of processor time in an epoch of cora on the grid).
Every result has the same bits on every rank. Nothing here knows of autograd.

A small sum also says whether a number is the same on every rank, in the same messages: a digest of the plain tensors
that the ranks have met (:mod:`~pyg_dist.backend.comm.checks.replicas`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.comm.checks.calls import message_tag
from pyg_dist.backend.comm.connection import wait

_REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}

Sent = tuple[dist.Work, int]
"""A message on its way, and the global number of the other rank."""

# Bytes of the number before the elements of a small sum, and what it becomes where ranks have others.
_NUMBER = 8
_DIFFERENT = -1

# Shapes and dtypes of small sums whose memory is used again.
_MAX_ROOMS = 64

# Bytes above which sums go in pieces: each rank then sends 2 n bytes and not n log2(P).
_IN_PIECES = 1 << 16


class TaggedMessages:
    """The messages among the ranks of a process group that carries CPU tensors by gloo; all tensors are contiguous.

    Args:
        process_group: the group. Its own object sends without the detour through torch's dispatcher.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._rooms: dict[tuple[torch.Size, torch.dtype], _Room] = {}
        self._gloo: Any = process_group._get_backend(torch.device("cpu"))
        self.rank: int = process_group.rank()
        self.size: int = process_group.size()
        self.ranks = dist.get_process_group_ranks(process_group)

    def send(self, tensor: Tensor, peer: int, tag: int) -> Sent:
        """Start to send a tensor, which has to live until the message has left."""
        return self._gloo.send([tensor], peer, message_tag(tag, tensor.nbytes)), self.ranks[peer]

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Sent:
        """Start to receive into a tensor."""
        return self._gloo.recv([tensor], peer, message_tag(tag, tensor.nbytes)), self.ranks[peer]

    def all_reduce(self, x: Tensor, op: str, tag: int) -> Tensor:
        """The sum, maximum or minimum of every rank's tensor. What it is given stays as it was."""
        if self.size > 2 and x.nbytes > _IN_PIECES:
            return self._reduce_in_pieces(x, op, tag)
        return self._doubled(x, None, op, tag)[0]

    def all_reduce_with(self, x: Tensor, number: int, op: str, tag: int) -> tuple[Tensor, bool]:
        """:meth:`all_reduce`, and whether every rank has given the same number: of 64 bits, not -1."""
        x, number_of_all = self._doubled(x, number, op, tag)
        return x, number_of_all != _DIFFERENT

    def _doubled(self, x: Tensor, number: int | None, op: str, tag: int) -> tuple[Tensor, int | None]:
        """Recursive doubling. Ranks beyond a power of two hand their tensor to another, and get the result from it."""
        reduce, rank = _REDUCE[op], self.rank
        room = None if number is None else self._room(x)
        power = 1 << (self.size.bit_length() - 1)
        if rank >= power:
            self._wait([self.send(_packed(x, number, room), rank - power, tag)])
            x, number = self._unpacked(x, room, rank - power, tag)
            return x if room is None else x.clone(), number
        if rank < self.size - power:
            theirs, other = self._unpacked(x, room, rank + power, tag)
            x, number = reduce(x, theirs), number if number == other else _DIFFERENT
        distance = 1
        while distance < power:
            peer = rank ^ distance
            mine = _packed(x, number, room)
            leaving = self.send(mine, peer, tag)
            theirs, other = self._unpacked(x, room, peer, tag, leaving)
            x = reduce(x, theirs) if rank < peer else reduce(theirs, x)
            number = number if number == other else _DIFFERENT
            distance *= 2
        if rank < self.size - power:
            self._wait([self.send(_packed(x, number, room), rank + power, tag)])
        return x, number

    def _room(self, x: Tensor) -> _Room:
        """For messages of small tensors like ``x``; one after another, they use the same memory."""
        key = x.shape, x.dtype
        room = self._rooms.get(key)
        if room is None:
            if len(self._rooms) == _MAX_ROOMS:
                self._rooms.clear()
            room = self._rooms[key] = _Room(x)
        return room

    def broadcast(self, x: Tensor, source: int, tag: int) -> None:
        """Overwrite ``x`` with the one of rank ``source``, along a binomial tree."""
        relative = (self.rank - source) % self.size
        distance = 1
        while distance < self.size:
            if relative < distance:
                if relative + distance < self.size:
                    self._wait([self.send(x, (self.rank + distance) % self.size, tag)])
            elif relative < 2 * distance:
                self._wait([self.receive(x, (self.rank - distance) % self.size, tag)])
            distance *= 2

    def gather(self, rows: Tensor, counts: Sequence[int], tag: int) -> Tensor:
        """Every rank's rows, by rank. Shapes: ``[counts[rank], ...] -> [sum(counts), ...]``."""
        out = rows.new_empty(sum(counts), *rows.shape[1:])
        pieces = torch.split(out, list(counts))
        works = []
        for peer in self._others():
            if rows.numel():
                works.append(self.send(rows, peer, tag))
            if pieces[peer].numel():
                works.append(self.receive(pieces[peer], peer, tag))
        pieces[self.rank].copy_(rows)
        self._wait(works)
        return out

    def all_to_all(
        self, out: Tensor, rows: Tensor, sent: Sequence[int], received: Sequence[int], tag: int
    ) -> tuple[dict[int, Sent], list[Sent]]:
        """Start to send each rank its rows: what arrives by sender, and what leaves.

        Shapes:
            - rows: ``[sum(sent), ...]``, by receiver
            - out: ``[sum(received), ...]``, by sender; its own are there at once
        """
        starts, places = [0, *accumulate(sent)], [0, *accumulate(received)]
        arriving: dict[int, Sent] = {}
        leaving: list[Sent] = []
        is_empty = not rows.shape[1:].numel()
        for peer in self._others():
            if sent[peer] and not is_empty:
                leaving.append(self.send(rows[starts[peer] : starts[peer + 1]], peer, tag))
            if received[peer] and not is_empty:
                arriving[peer] = self.receive(out[places[peer] : places[peer + 1]], peer, tag)
        own = self.rank
        if sent[own]:
            out[places[own] : places[own + 1]].copy_(rows[starts[own] : starts[own + 1]])
        return arriving, leaving

    def _others(self) -> list[int]:
        """Each rank starts with its successor, so no rank is everyone's first."""
        return [(self.rank + offset) % self.size for offset in range(1, self.size)]

    def _unpacked(
        self, like: Tensor, room: _Room | None, peer: int, tag: int, *leaving: Sent
    ) -> tuple[Tensor, int | None]:
        """A rank's tensor like ``like``, and its number; waits for ``leaving``, too."""
        theirs = torch.empty_like(like) if room is None else room.arriving
        self._wait([self.receive(theirs, peer, tag), *leaving])
        return (theirs, None) if room is None else (room.their_elements, int(room.their_number[0]))

    def _reduce_in_pieces(self, x: Tensor, op: str, tag: int) -> Tensor:
        """Rank i gets everyone's piece i, reduces them in the order of the ranks, and sends the result to all."""
        flat = x.reshape(-1)
        size, rank = self.size, self.rank
        counts = [(r + 1) * flat.numel() // size - r * flat.numel() // size for r in range(size)]
        mine = flat.new_empty(size * counts[rank])
        arriving, leaving = self.all_to_all(mine, flat, counts, [counts[rank]] * size, tag)
        self._wait([*arriving.values(), *leaving])
        first, *others = mine.view(size, -1)
        for piece in others:
            first = _REDUCE[op](first, piece)
        return self.gather(first, counts, tag).view_as(x)

    def _wait(self, sent: Sequence[Sent]) -> None:
        for work, peer in sent:
            wait(work, peer)


class _Room:
    """Memory for small messages of one shape and dtype, each with a number before the elements."""

    def __init__(self, like: Tensor) -> None:
        with torch.inference_mode(False):  # it serves training, too
            self.leaving, self.arriving = (torch.empty(_NUMBER + like.nbytes, dtype=torch.uint8) for _ in range(2))
            self.elements, self.their_elements = (
                packed[_NUMBER:].view(like.dtype).view(like.shape) for packed in (self.leaving, self.arriving)
            )
        self.number, self.their_number = (
            packed.numpy()[:_NUMBER].view(np.int64) for packed in (self.leaving, self.arriving)
        )


def _packed(x: Tensor, number: int | None, room: _Room | None) -> Tensor:
    """What is sent: a tensor, with a number before it where there is one."""
    if room is None or number is None:
        return x
    room.number[0] = number
    room.elements.copy_(x)
    return room.leaving
