"""Lists of ids between ranks: ascending ones as differences, in as few bytes as each takes.

Nothing here sums, so a thread of its own may use it while the main thread trains
(:meth:`~pyg_dist.backend.comm.group.Group.apart`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pyg_dist.backend import ops, timing
from pyg_dist.backend.comm.connection import wait
from pyg_dist.backend.comm.group import Group

_LENGTH = 8
"""Bytes of a message's length, which it begins with."""


class IdLists:
    """Sends lists of ids, and counts their bytes.

    A message has room for an eighth more than the one of the same kind before it, which both ranks know, so that no
    other one says how long it is. It begins with its length; what has no room follows in another.

    ``num_bytes``: what this rank has sent to others so far.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.num_bytes = group, 0
        self._rooms: dict[str, tuple[list[int], list[int]]] = {}  # by kind: to each rank, and from each

    def exchange(
        self, rows: Tensor, counts: Sequence[int], is_ascending: bool = True, kind: str = ""
    ) -> tuple[Tensor, list[int]]:
        """Send each rank its rows (collective).

        ``rows`` are ids, none negative, int64 ``[n, columns]``, by receiver; ``is_ascending``: whether the first column
        ascends in what goes to each rank; ``kind``: what they are, for those of a kind take about as many bytes each
        time.

        Returns:
            The rows that arrive, ``[m, columns]``, by sender, and how many there are by sender.
        """
        size = self.group.size
        if size == 1:
            return rows, list(counts)
        content, num_bytes = ops.encode_ids(rows, torch.tensor(counts), is_ascending)
        arrived = self._exchange_bytes(torch.split(content, num_bytes.tolist()), kind)
        lengths = torch.tensor([piece.numel() for piece in arrived])
        found, of_sender = ops.decode_ids(torch.cat(arrived), lengths, rows.shape[1], is_ascending)
        return found, of_sender.tolist()

    def _exchange_bytes(self, pieces: Sequence[Tensor], kind: str) -> list[Tensor]:
        """What the ranks send this one, given what it sends to each, uint8 ``[n]`` (collective)."""
        none = [0] * self.group.size
        room, their_room = self._rooms.get(kind, (none, none))
        wire, tag, call = self.group.begin("ids", pieces[0], 1)

        def exchanged(leaving: list[Tensor], arriving: list[int]) -> list[Tensor]:
            sent = [x.numel() for x in leaving]
            self._count(sum(sent) - sent[self.group.rank])
            out = torch.empty(sum(arriving), 1, dtype=torch.uint8)
            flight = wire.all_to_all(out, torch.cat(leaving).view(-1, 1), sent, arriving, tag)
            for message in (*flight.arriving.values(), *flight.others):
                wait(message)
            return list(torch.split(out.view(-1), arriving))

        with call:
            begun = [_message(piece, n) for piece, n in zip(pieces, room, strict=True)]
            first = exchanged(begun, [_LENGTH + n for n in their_room])
            length = [int(message[:_LENGTH].clone().view(torch.int64)) for message in first]
            left = [piece[n:] for piece, n in zip(pieces, room, strict=True)]
            rest = exchanged(left, [max(0, n - m) for n, m in zip(length, their_room, strict=True)])
        self._rooms[kind] = _rooms([piece.numel() for piece in pieces]), _rooms(length)
        return [torch.cat([x[_LENGTH : _LENGTH + n], y]) for x, n, y in zip(first, length, rest, strict=True)]

    def gather(self, row: Sequence[int]) -> Tensor:
        """Every rank's row of numbers, int64 ``[size, len(row)]`` (collective)."""
        mine = torch.tensor([row], dtype=torch.int64)
        self._count(mine.nbytes * (self.group.size - 1))
        return self.group.gather_rows(mine, [1] * self.group.size)

    def gather_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Every rank's rows, by rank (collective)."""
        self._count(rows.nbytes * (self.group.size - 1))
        return self.group.gather_rows(rows, counts)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        timing.count_ids(num_bytes)


def _message(piece: Tensor, room: int) -> Tensor:
    """The first message of some bytes, uint8."""
    message = torch.zeros(_LENGTH + room, dtype=torch.uint8)
    message[:_LENGTH].view(torch.int64)[0] = piece.numel()
    message[_LENGTH:][: piece.numel()] = piece[:room]
    return message


def _rooms(lengths: list[int]) -> list[int]:
    return [n + n // 8 for n in lengths]
