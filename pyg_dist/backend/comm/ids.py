"""Lists of ids between ranks: ascending ones as differences, in as few bytes as each takes (LEB128).

Nothing here sums, so a thread of its own may use it while the main thread trains
(:meth:`~pyg_dist.backend.comm.group.Group.apart`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import timing
from pyg_dist.backend.comm.connection import wait
from pyg_dist.backend.comm.group import Group

Array = np.ndarray[Any, Any]

_BITS = 7  # of a number in a byte; the eighth says that another byte follows


class IdLists:
    """Sends lists of ids, and counts their bytes.

    Args:
        group: the ranks.

    Attributes:
        num_bytes: what this rank has sent to others so far.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.num_bytes = group, 0

    def exchange(self, rows: Tensor, counts: Sequence[int], is_ascending: bool = True) -> tuple[Tensor, list[int]]:
        """Send each rank its rows (collective).

        Args:
            rows: ids, none negative, int64 ``[n, columns]``, by receiver.
            counts: rows by receiver.
            is_ascending: whether the first column ascends in what goes to each rank.

        Returns:
            The rows that arrive, ``[m, columns]``, by sender, and how many there are by sender.
        """
        size, columns = self.group.size, rows.shape[1]
        if size == 1:
            return rows, list(counts)
        bounds = np.concatenate([[0], np.cumsum(counts)])
        number = rows.numpy()
        if is_ascending:
            number = number.copy()
            number[1:, 0] -= rows.numpy()[:-1, 0]
            first = bounds[:-1][np.diff(bounds) > 0]
            number[first, 0] = rows.numpy()[first, 0]
        content, ends = _encoded(number.reshape(-1))
        num_bytes = np.diff(ends[bounds * columns])
        arriving = self._sent(torch.from_numpy(num_bytes).view(-1, 1), [1] * size, [1] * size).view(-1).tolist()
        received = self._sent(torch.from_numpy(content).view(-1, 1), num_bytes.tolist(), arriving).view(-1).numpy()
        values, ends = _decoded(received)
        at = np.searchsorted(ends, np.cumsum([0, *arriving])) // columns
        values = values.reshape(-1, columns)
        for low, high in itertools.pairwise(at) if is_ascending else ():
            np.cumsum(values[low:high, 0], out=values[low:high, 0])
        return torch.from_numpy(values), np.diff(at).tolist()

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


def _encoded(value: Array) -> tuple[Array, Array]:
    """The bytes of numbers, and where each one's begin, with the end of the last."""
    length = np.ones(value.size, dtype=np.int64)
    rest = value >> _BITS
    while rest.any():
        length += rest > 0
        rest >>= _BITS
    ends = np.concatenate([[0], np.cumsum(length)])
    content = np.empty(ends[-1], dtype=np.uint8)
    place, rest = ends[:-1], value
    while place.size:
        goes_on = rest >= 1 << _BITS
        content[place] = (rest & 127) | (goes_on.view(np.uint8) << _BITS)
        place, rest = place[goes_on] + 1, rest[goes_on] >> _BITS
    return content, ends


def _decoded(content: Array) -> tuple[Array, Array]:
    """The numbers, and where each one's bytes begin, with the end of the last."""
    ends = np.concatenate([[0], np.flatnonzero(content < 1 << _BITS) + 1])
    value = np.zeros(ends.size - 1, dtype=np.int64)
    number, place, shift = np.arange(value.size), ends[:-1], 0
    while number.size:
        byte = content[place].astype(np.int64)
        value[number] |= (byte & 127) << shift
        goes_on = byte >= 1 << _BITS
        number, place, shift = number[goes_on], place[goes_on] + 1, shift + _BITS
    return value, ends
