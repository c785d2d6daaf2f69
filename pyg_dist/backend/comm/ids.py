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
        size = self.group.size
        if size == 1:
            return [(rows, [len(rows)]) for rows, *_ in lists]
        by_list, num_bytes = [], []
        for rows, counts, ascends in lists:
            content, length = ops.encode_ids(rows, torch.tensor([len(rows)] if counts is None else counts), ascends)
            by_list.append([content] * size if counts is None else torch.split(content, length.tolist()))
            num_bytes.append(length.expand(size))
        lengths = torch.stack(num_bytes, 1)
        pieces = [torch.cat(to_rank) for to_rank in zip(*by_list, strict=True)]
        arrived, lengths = self._exchange_bytes(pieces, lengths, kind)
        by_sender = [torch.split(piece, sizes) for piece, sizes in zip(arrived, lengths.tolist(), strict=True)]
        found = []
        for number, (rows, _, ascends) in enumerate(lists):
            content = torch.cat([pieces[number] for pieces in by_sender])
            ids, of_sender = ops.decode_ids(content, lengths[:, number], rows.shape[1], ascends)
            found.append((ids, of_sender.tolist()))
        return found

    def _exchange_bytes(self, pieces: Sequence[Tensor], lengths: Tensor, kind: str) -> tuple[list[Tensor], Tensor]:
        """What the ranks send this one, and its ``lengths``, given what it sends to each, uint8 ``[n]`` (collective).

        ``lengths``: of the lists in each piece, int64 ``[ranks, lists]``.
        """
        none = [0] * self.group.size
        room, their_room = self._rooms.get(kind, (none, none))
        wire, tag, call = self.group.begin("ids", pieces[0], 1)
        begin = lengths[0].nbytes

        def exchanged(leaving: list[Tensor], arriving: list[int]) -> list[Tensor]:
            sent = [x.numel() for x in leaving]
            self._count(sum(sent) - sent[self.group.rank])
            out = torch.empty(sum(arriving), 1, dtype=torch.uint8)
            flight = wire.all_to_all(out, torch.cat(leaving).view(-1, 1), sent, arriving, tag)
            for message in (*flight.arriving.values(), *flight.others):
                wait(message)
            return list(torch.split(out.view(-1), arriving))

        with call:
            begun = [_message(of, piece, n) for of, piece, n in zip(lengths, pieces, room, strict=True)]
            first = exchanged(begun, [begin + n for n in their_room])
            theirs = torch.stack([message[:begin].clone().view(torch.int64) for message in first])
            length = theirs.sum(1).tolist()
            left = [piece[n:] for piece, n in zip(pieces, room, strict=True)]
            rest = exchanged(left, [max(0, n - m) for n, m in zip(length, their_room, strict=True)])
        self._rooms[kind] = _rooms([piece.numel() for piece in pieces]), _rooms(length)
        return [torch.cat([x[begin : begin + n], y]) for x, n, y in zip(first, length, rest, strict=True)], theirs

    def gather(self, row: Sequence[int]) -> Tensor:
        """Every rank's row of numbers, int64 ``[size, len(row)]`` (collective)."""
        mine = torch.tensor([row], dtype=torch.int64)
        self._count(mine.nbytes * (self.group.size - 1))
        return self.group.gather_rows(mine, [1] * self.group.size)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        timing.count_ids(num_bytes)


def _message(lengths: Tensor, piece: Tensor, room: int) -> Tensor:
    """The first message of some bytes, uint8: the lengths of its lists, then what it has room for."""
    padding = torch.empty(max(0, room - piece.numel()), dtype=torch.uint8)
    return torch.cat([lengths.contiguous().view(torch.uint8), piece[:room], padding])


def _rooms(lengths: list[int]) -> list[int]:
    return [n + n // 8 for n in lengths]
