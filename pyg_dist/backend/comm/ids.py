"""Lists of ids between ranks: ascending ones as differences, in as few bytes as each takes.

Nothing here sums, so a thread of its own may use it while the main thread trains
(:meth:`~pyg_dist.backend.comm.group.Group.apart`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pyg_dist.backend import host, ops, timing
from pyg_dist.backend.comm.connection import wait
from pyg_dist.backend.comm.group import Group

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]
R = TypeVar("R")


class IdList(NamedTuple):
    """Rows of ids, int64 ``[n, columns]``, those for a rank together, and how many each gets; ``None``: all of them.

    ``is_ascending``: whether the first column mostly ascends in what goes to a rank. A number takes one to three bytes,
    or eight: where that column falls, where an id is negative, and from 2^24 on.
    """

    rows: Tensor
    counts: Sequence[int] | None = None
    is_ascending: bool = True


Arrived = list[tuple[Tensor, list[int]]]
"""Of each list that was sent, the rows that arrive, ``[m, columns]``, by sender, and how many there are by sender."""


class Call(NamedTuple):
    """A call of :meth:`IdLists.exchange` that waits for those of others, see :func:`side_by_side`."""

    lists: IdLists
    rows: Sequence[IdList]
    kind: str


def side_by_side(tasks: Iterable[Generator[Call, Arrived, R]]) -> list[R]:
    """Run tasks that yield the same calls: what all send by one of them is one message to each rank (collective).

    Returns:
        What the tasks return.
    """
    running, found = dict(enumerate(tasks)), dict[int, R]()
    answers: list[Any] = [None] * len(running)
    while running:
        calls = dict[int, Call]()
        for number, task in list(running.items()):
            try:
                calls[number] = task.send(answers[number])
            except StopIteration as end:
                found[number] = end.value
                del running[number]
        if calls:
            first = next(iter(calls.values()))
            rows = [of_call for call in calls.values() for of_call in call.rows]
            arrived = iter(first.lists.exchange(*rows, kind=first.kind))
            for number, call in calls.items():
                answers[number] = [next(arrived) for _ in call.rows]
    return [found[number] for number in sorted(found)]


class IdLists:
    """Sends lists of ids, and counts their bytes.

    A message has room for an eighth more than the one of the same kind before it, which both ranks know, so that no
    other one says how long it is. It begins with the lengths of its lists; what has no room follows in another.

    ``num_bytes``: what this rank has sent to others so far.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.num_bytes = group, 0
        self._capacities: dict[str, tuple[list[int], list[int]]] = {}  # by kind: to each rank, and from each

    def exchange(self, *lists: IdList, kind: str = "") -> Arrived:
        """Send each rank its rows of each list, in one message (collective).

        ``kind``: what they are, for those of a kind take about as many bytes each time.
        """
        size, rank = self.group.size, self.group.rank
        if size == 1:
            return [(rows, [len(rows)]) for rows, *_ in lists]
        own, leaving, lengths = list[Tensor | None](), list[list[Bytes]](), np.empty((size, len(lists)), np.int64)
        for number, (rows, counts, ascends) in enumerate(lists):
            of_lists = rows.shape[:1] if counts is None else counts
            encoded, num_bytes = ops.encode_ids(rows, host.tensor(of_lists), ascends)
            content, of_content = encoded.numpy(), num_bytes.tolist()
            lengths[:, number] = of_content
            pieces = [content[end - n : end] for end, n in zip(accumulate(of_content), of_content, strict=True)]
            leaving.append(pieces * size if counts is None else pieces)
            first, count = (0, rows.shape[0]) if counts is None else (sum(counts[:rank]), counts[rank])
            own.append(rows[first : first + count] if count else None)
        arrived, lengths = self._exchange_bytes(
            [_joined(of_peer) for of_peer in zip(*leaving, strict=True)], lengths, kind
        )
        found, begin = [], [0] * size
        for (rows, _, ascends), of_list, mine in zip(lists, lengths.T.tolist(), own, strict=True):
            end = [first + n for first, n in zip(begin, of_list, strict=True)]
            places = zip(arrived, begin, end, of_list, strict=True)
            content = _joined([of_peer[first:last] for of_peer, first, last, n in places if n])
            ids, count_of = ops.decode_ids(torch.from_numpy(content), host.tensor(of_list), rows.shape[1], ascends)
            of_sender, begin = count_of.tolist(), end
            if mine is not None:
                before = sum(of_sender[:rank])
                ids, of_sender[rank] = torch.cat([ids[:before], mine, ids[before:]]), mine.shape[0]
            found.append((ids, of_sender))
        return found

    def send(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Send each rank its rows, int64 ``[n, columns]``; those that arrive, by sender (collective)."""
        return self.exchange(IdList(rows, counts, is_ascending=False))[0][0]

    def _exchange_bytes(self, whole: list[Bytes], lengths: Numbers, kind: str) -> tuple[list[Bytes], Numbers]:
        """The bytes from each other rank, and their ``lengths``, given those that this one sends to each (collective).

        ``whole``: by rank; ``lengths``: of each list in it, ``[ranks, lists]``.
        """
        size, rank, begin = self.group.size, self.group.rank, lengths[0].nbytes
        capacity, their_capacity = self._capacities.get(kind, ([0] * size, [0] * size))
        wire, tag, call = self.group.begin("ids", torch.from_numpy(lengths), 1)

        def exchanged(leaving: list[Bytes], sent: list[int], arriving: list[int]) -> list[Bytes]:
            sent[rank] = arriving[rank] = 0
            self._count(sum(sent))
            out, rows = np.empty((sum(arriving), 1), np.uint8), _joined(leaving).reshape(-1, 1)
            flight = wire.all_to_all(torch.from_numpy(out), torch.from_numpy(rows), sent, arriving, tag)
            for message in (*flight.arriving.values(), *flight.others):
                wait(message)
            return [out[end - n : end, 0] for end, n in zip(accumulate(arriving), arriving, strict=True)]

        with call:
            whole[rank] = whole[rank][:0]
            messages = [
                part
                for peer, (piece, n) in enumerate(zip(whole, capacity, strict=True))
                if peer != rank
                for part in (lengths[peer].view(np.uint8), piece[:n], np.empty(max(0, n - len(piece)), np.uint8))
            ]
            found = exchanged(messages, [begin + n for n in capacity], [begin + n for n in their_capacity])
            theirs = np.zeros_like(lengths)
            for peer in range(size):
                if peer != rank:
                    theirs[peer] = found[peer][:begin].view(np.int64)
                    found[peer] = found[peer][begin:]
            length = theirs.sum(1).tolist()
            left = [piece[n:] for piece, n in zip(whole, capacity, strict=True)]
            missing = [max(0, n - m) for n, m in zip(length, their_capacity, strict=True)]
            if any(missing) or any(len(piece) for piece in left):
                rest = exchanged(left, [len(piece) for piece in left], missing)
                found = [np.concatenate(both) for both in zip(found, rest, strict=True)]
        self._capacities[kind] = _capacities([len(piece) for piece in whole]), _capacities(length)
        return found, theirs

    def gather(self, row: Sequence[int]) -> Tensor:
        """Every rank's row of numbers, int64 ``[size, len(row)]`` (collective)."""
        mine = host.tensor(row, dtype=torch.int64)
        self._count(mine.nbytes * (self.group.size - 1))
        return self.group.stack(mine)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        timing.add_to("id_bytes", num_bytes)


def _joined(pieces: Sequence[Bytes]) -> Bytes:
    """One after another; a single one is not copied."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


def _capacities(lengths: list[int]) -> list[int]:
    """Multiples of 8, so that numbers of 64 bits are where a message begins."""
    return [-(-9 * n // 64) * 8 for n in lengths]
