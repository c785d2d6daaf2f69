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


class IdLists:
    """Sends lists of ids, and counts their bytes.

    ``num_bytes``: what this rank has sent to others so far.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.num_bytes = group, 0

    def exchange(self, rows: Tensor, counts: Sequence[int], is_ascending: bool = True) -> tuple[Tensor, list[int]]:
        """Send each rank its rows (collective).

        ``rows`` are ids, none negative, int64 ``[n, columns]``, by receiver; ``is_ascending``: whether the first column
        ascends in what goes to each rank.

        Returns:
            The rows that arrive, ``[m, columns]``, by sender, and how many there are by sender.
        """
        size = self.group.size
        if size == 1:
            return rows, list(counts)
        content, num_bytes = ops.encode_ids(rows, torch.tensor(counts), is_ascending)
        arriving = self._sent(num_bytes.view(-1, 1), [1] * size, [1] * size).view(-1)
        received = self._sent(content.view(-1, 1), num_bytes.tolist(), arriving.tolist()).view(-1)
        arrived, of_sender = ops.decode_ids(received, arriving, rows.shape[1], is_ascending)
        return arrived, of_sender.tolist()

    def gather(self, row: Sequence[int]) -> Tensor:
        """Every rank's row of numbers, int64 ``[size, len(row)]`` (collective)."""
        mine = torch.tensor([row], dtype=torch.int64)
        self._count(mine.nbytes * (self.group.size - 1))
        return self.group.gather_rows(mine, [1] * self.group.size)

    def gather_rows(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Every rank's rows, by rank (collective)."""
        self._count(rows.nbytes * (self.group.size - 1))
        return self.group.gather_rows(rows, counts)

    def _sent(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        out = rows.new_empty(sum(received), 1)
        self._count((sum(sent) - sent[self.group.rank]) * rows.element_size())
        wire, tag, call = self.group.begin("ids", rows, 1)
        with call:
            flight = wire.all_to_all(out, rows, sent, received, tag)
            for message in (*flight.arriving.values(), *flight.others):
                wait(message)
        return out

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        timing.count_ids(num_bytes)
