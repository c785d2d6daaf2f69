"""*Columns*: a rank's own numbering of the nodes that it may meet in batches, used in its edges and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.comm.ids import IdList, IdLists


@dataclass(frozen=True, eq=False)
class Columns:
    """First the rank's own nodes by ascending id, then the other sources of its edges by rank and ascending id.

    Ids count through all types of nodes. In a disjoint batch each tree has nodes of its own: a node of a tree has the
    *code* ``column * trees + tree`` on its rank, and ``id * trees + tree`` between ranks.
    """

    size: int  # s
    ends: Tensor  # where the columns of this rank end, then those of each other one, int64 ``[ranks]``
    types: Tensor  # the first of this rank's columns of each type of nodes, int64 ``[types]``
    node_id: Tensor | None = None  # int64 ``[s]``; ``None``: one rank has all, and they are the columns' numbers
    row: Tensor | None = None  # of this rank's nodes, among those of a type, int64 ``[n]``; ``None``: they are columns
    elsewhere: Tensor | None = None  # the columns of other ranks' nodes on their ranks, int64 ``[s - n]``
    _tables: list[Tensor] = field(default_factory=list)  # free ones of :meth:`take_table`

    @staticmethod
    def of(
        own: Sequence[Tensor], others: Sequence[tuple[Tensor, Tensor]], num_ids: int, lists: IdLists
    ) -> tuple[Columns, list[Tensor], list[Tensor]]:
        """The columns of a rank; the columns of its rows, by type, int32; and those of each list, int32 (collective).

        ``own``: ids of the rank's nodes in the order of their rows, by type, int64. ``others``: lists of ids and ranks
        of nodes that other ranks have, int64 ``[m]`` each. ``num_ids``: of the nodes of all ranks.
        """
        size, rank = lists.group.size, lists.group.rank
        ascending, row = zip(*(ids.sort() for ids in own), strict=True)
        first = list(accumulate((ids.numel() for ids in own), initial=0))
        of_rows = [order.argsort().to(torch.int32) + begin for order, begin in zip(row, first, strict=False)]
        num_own, node_id = first[-1], torch.cat(ascending)
        types, rows = host.tensor(first[:-1]), torch.cat(row)
        is_all = torch.equal(rows, host.arange(num_own))
        if size == 1:
            whole = Columns(num_own, host.tensor([num_own]), types, None, None if is_all else rows)
            return whole, of_rows, [ids[:0].int() for ids, _ in others]
        key = torch.cat([ids[:0] for ids, _ in others] + [owner.long() * num_ids + ids for ids, owner in others])
        new, place = ops.distinct(key[:0], key)
        key = key.index_select(0, new)
        owner = torch.div(key, num_ids, rounding_mode="floor")
        counts = torch.bincount(owner, minlength=size)
        ids = key - owner * num_ids
        ((asked, from_rank),) = lists.exchange(IdList(ids.view(-1, 1), counts.tolist()), kind="ids of columns")
        answer = ops.find_sorted(node_id, asked.view(-1)).view(-1, 1)
        ((elsewhere, _),) = lists.exchange(IdList(answer, from_rank), kind="columns")
        by_rank = [num_own, *counts[:rank].tolist(), *counts[rank + 1 :].tolist()]
        columns = Columns(
            num_own + ids.numel(), host.tensor(by_rank).cumsum(0), types, torch.cat([node_id, ids]),
            None if is_all else rows, elsewhere.view(-1),
        )  # fmt: skip
        of_lists = torch.split((place + num_own).to(torch.int32), [ids.numel() for ids, _ in others])
        return columns, of_rows, list(of_lists)

    @property
    def num_own(self) -> int:
        """The number of this rank's nodes."""
        return int(self.ends[0])

    def find(self, node_id: Tensor) -> Tensor:
        """The columns of nodes, given their ids; -1 for those of other ranks."""
        return node_id if self.node_id is None else ops.find_sorted(self.node_id[: self.num_own], node_id)

    def row_of(self, column: Tensor) -> Tensor:
        """The rows of this rank's nodes, among those of their types."""
        return column if self.row is None else self.row.index_select(0, column)

    def common(self, code: Tensor, trees: int) -> Tensor:
        """Codes between ranks, given this rank's."""
        if self.node_id is None:
            return code
        if trees == 1:
            return self.node_id.index_select(0, code)
        tree, column = split(code, trees)
        return self.node_id.index_select(0, column) * trees + tree

    def abroad(self, code: Tensor, trees: int) -> Tensor:
        """The owners' codes of nodes of other ranks, given this rank's codes."""
        assert self.elsewhere is not None
        if trees == 1:
            return self.elsewhere.index_select(0, code - self.num_own)
        tree, column = split(code, trees)
        return self.elsewhere.index_select(0, column - self.num_own) * trees + tree

    def by_rank(self, code: Tensor, trees: int) -> list[int]:
        """How many of some ascending codes are of this rank's nodes, then of each other rank's."""
        ends: list[int] = torch.searchsorted(code, self.ends * trees).tolist()
        return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]

    def take_table(self) -> Tensor:
        """A table with -1 for each column, int32; :meth:`give_table` takes it back, restored, for the next batch."""
        return self._tables.pop() if self._tables else host.full((self.size,), -1, dtype=torch.int32)

    def give_table(self, table: Tensor) -> None:
        """See :meth:`take_table`."""
        self._tables.append(table)


def split(code: Tensor, trees: int) -> tuple[Tensor, Tensor]:
    """Trees and columns, or ids, of codes."""
    column = torch.div(code, trees, rounding_mode="floor")
    return code - column * trees, column
