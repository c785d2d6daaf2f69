"""Lists of ids between ranks: ascending ones as differences, in as few bytes as each takes.

Nothing here sums, so a thread of its own may use it while the main thread trains
(:meth:`~pyg_dist.backend.comm.group.Group.apart`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import ops, timing
from pyg_dist.backend.comm.connection import wait
from pyg_dist.backend.comm.group import Group


class IdList(NamedTuple):
    """Rows of ids, int64 ``[n, columns]``, those for a rank together, and how many each gets; ``None``: all of them.

    ``is_ascending``: whether the first column mostly ascends in what goes to a rank; where it falls, and where an id is
    negative, a row takes ten bytes more.
    """

    rows: Tensor
    counts: Sequence[int] | None = None
    is_ascending: bool = True


class IdLists:
    """Sends lists of ids, and counts their bytes.

    A message has room for an eighth more than the one of the same kind before it, which both ranks know, so that no
    other one says how long it is. It begins with the lengths of its lists; what has no room follows in another.

    ``num_bytes``: what this rank has sent to others so far.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.num_bytes = group, 0
        self._rooms: dict[str, tuple[list[int], list[int]]] = {}  # by kind: to each rank, and from each

    def exchange(self, *lists: IdList, kind: str = "") -> list[tuple[Tensor, list[int]]]:
        """Send each rank its rows of each list, in one message (collective).

        ``kind``: what they are, for those of a kind take about as many bytes each time.

        Returns:
            Of each list, the rows that arrive, ``[m, columns]``, by sender, and how many there are by sender.
        """
        size, rank = self.group.size, self.group.rank
        if size == 1:
            return [(rows, [len(rows)]) for rows, *_ in lists]
        own, lengths = [], torch.empty(size, len(lists), dtype=torch.int64)
        pieces: list[list[Tensor]] = [[] for _ in range(size)]
        for number, (rows, counts, ascends) in enumerate(lists):
            content, length = ops.encode_ids(rows, torch.tensor([len(rows)] if counts is None else counts), ascends)
            of_ranks = [content] * size if counts is None else content.split(length.tolist())
            own.append(rows if counts is None else rows.split(list(counts))[rank])
            lengths[:, number] = length
            for piece, of_rank in zip(pieces, of_ranks, strict=True):
                piece.append(of_rank)
        arrived, lengths = self._exchange_bytes(pieces, lengths, kind)
        by_sender = [piece.split(sizes) for piece, sizes in zip(arrived, lengths.tolist(), strict=True)]
        found = []
        for number, (rows, _, ascends) in enumerate(lists):
            content = _joined([of_rank[number] for of_rank in by_sender if of_rank[number].numel()], arrived[rank])
            ids, length = ops.decode_ids(content, lengths[:, number], rows.shape[1], ascends)
            of_sender = length.tolist()
            if len(own[number]):
                before = sum(of_sender[:rank])
                ids, of_sender[rank] = torch.cat([ids[:before], own[number], ids[before:]]), len(own[number])
            found.append((ids, of_sender))
        return found

    def send(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Send each rank its rows, int64 ``[n, columns]``; those that arrive, by sender (collective)."""
        return self.exchange(IdList(rows, counts, is_ascending=False))[0][0]

    def _exchange_bytes(
        self, pieces: Sequence[Sequence[Tensor]], lengths: Tensor, kind: str
    ) -> tuple[list[Tensor], Tensor]:
        """What the other ranks send this one, and its ``lengths``, given what it sends to each (collective).

        ``pieces``: of each list, uint8, by rank; ``lengths``: theirs, int64 ``[ranks, lists]``.
        """
        size, rank, begin = self.group.size, self.group.rank, 8 * lengths.shape[1]
        room, their_room = self._rooms.get(kind, ([0] * size, [0] * size))
        wire, tag, call = self.group.begin("ids", lengths, 1)
        headers, none = lengths.view(torch.uint8), torch.empty(0, dtype=torch.uint8)

        def exchanged(leaving: list[Tensor], sent: list[int], arriving: list[int]) -> list[Tensor]:
            sent[rank] = arriving[rank] = 0
            self._count(sum(sent))
            out = torch.empty(sum(arriving), 1, dtype=torch.uint8)
            flight = wire.all_to_all(out, _joined(leaving, none).view(-1, 1), sent, arriving, tag)
            for message in (*flight.arriving.values(), *flight.others):
                wait(message)
            return list(out.view(-1).split(arriving))

        with call:
            whole = [none if peer == rank else _joined(piece, none) for peer, piece in enumerate(pieces)]
            messages = [
                part
                for peer, (piece, n) in enumerate(zip(whole, room, strict=True))
                if peer != rank
                for part in (headers[peer], piece[:n], piece.new_empty(max(0, n - piece.numel())))
            ]
            first = exchanged(messages, [begin + n for n in room], [begin + n for n in their_room])
            first[rank] = torch.zeros(begin, dtype=torch.uint8)
            theirs = torch.stack([message[:begin].view(torch.int64) for message in first])
            found, length = [message[begin:] for message in first], theirs.sum(1).tolist()
            left = [piece[n:] for piece, n in zip(whole, room, strict=True)]
            missing = [max(0, n - m) for n, m in zip(length, their_room, strict=True)]
            if any(missing) or any(piece.numel() for piece in left):
                rest = exchanged(left, [piece.numel() for piece in left], missing)
                found = [torch.cat(both) for both in zip(found, rest, strict=True)]
        self._rooms[kind] = _rooms([piece.numel() for piece in whole]), _rooms(length)
        return [message[:n] for message, n in zip(found, length, strict=True)], theirs

    def gather(self, row: Sequence[int]) -> Tensor:
        """Every rank's row of numbers, int64 ``[size, len(row)]`` (collective)."""
        mine = torch.tensor([row], dtype=torch.int64)
        self._count(mine.nbytes * (self.group.size - 1))
        return self.group.gather_rows(mine, [1] * self.group.size)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        timing.count_ids(num_bytes)


def _joined(pieces: Sequence[Tensor], none: Tensor) -> Tensor:
    """``torch.cat``, which copies a single one, too; of no pieces ``none``."""
    return pieces[0] if len(pieces) == 1 else torch.cat([none, *pieces])


def _rooms(lengths: list[int]) -> list[int]:
    """Multiples of 8, so that numbers of 64 bits are where a message begins."""
    return [-(-9 * n // 64) * 8 for n in lengths]
