"""The nodes of a batch that a rank knows: found hop by hop, and numbered among those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.session.agreement import group_of_thread
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.loader.columns import Columns


@dataclass(frozen=True, eq=False)
class SamplingRanks:
    """The ranks that sample together, over messages that a thread of its own may send."""

    part: IdLists  # those of a data group, which have its nodes
    everyone: IdLists  # those of all data groups
    index: int = 0  # the number of this data group
    count: int = 1  # data groups
    gathers: bool = False  # whether each rank has to know the whole subset of its data group

    @staticmethod
    def of(graph: DistributedGraph) -> SamplingRanks:
        """Those that share a graph; made alike on every rank (not collective)."""
        index, count = graph.data_group
        shared = SamplingRanks.sharing(graph.node_sharding.group)
        everyone = shared.part if count == 1 else IdLists(group_of_thread(None))
        return SamplingRanks(shared.part, everyone, index, count, graph.needs_whole_subsets)

    @staticmethod
    def sharing(group: Group) -> SamplingRanks:
        """Those of a group, which has all nodes; made alike on every rank (not collective)."""
        part = IdLists(group_of_thread(group.calls.ranks))
        return SamplingRanks(part, part)

    @staticmethod
    def alone() -> SamplingRanks:
        """One process."""
        lists = IdLists(Group())
        return SamplingRanks(lists, lists)


class KnownNodes:
    """This rank's nodes of a batch, and the sources of their edges. They stand by codes; each belongs to one rank.

    Args:
        ranks: those that sample.
        span: an upper bound of the codes among the ranks, exclusive.
        code, number: of this rank's seeds, int64 ``[s]``; codes among the ranks.
        first: the first code of each type of nodes, which have numbers of their own.
        columns: which other codes the nodes have on this rank; ``None``: the same.

    Attributes:
        code: on this rank, in the order in which it learns of them, int64 ``[k]``. Their places here stand for them.
        owner: the rank that has each, int64 ``[k]``.
        hops: places of this rank's nodes of the batch by the hop that reached them, by ascending code among the ranks;
            first its seeds.
        number: of each node in the batch, or -1, int64 ``[k]``; once they are numbered.
    """

    def __init__(
        self,
        ranks: SamplingRanks,
        span: int,
        code: Tensor,
        number: Tensor,
        first: Sequence[int] = (0,),
        columns: Columns | None = None,
    ) -> None:
        self._ranks, self._span, self._seed_number, self._first = ranks, span, number, first
        self._columns = columns
        self._lists, self._rank = ranks.part, ranks.part.group.rank
        self.code = code if columns is None else columns.here(code)
        self.owner = torch.full_like(code, self._rank)
        self.hops, self.number = [torch.arange(code.numel())], number
        self._codes_of_hops: list[Tensor] = []  # among the ranks; without the seeds'
        self._asked: list[_ByRank] = []  # places of other ranks' nodes, as they were told of them, by hop
        self._told: list[_ByRank] = []  # places of nodes of which other ranks told
        self._place_of: Tensor | None = None  # by code on this rank, where there is a table of them
        if columns is not None and not columns.has_trees:
            self._place_of = columns.in_edges.take_table()
            self._place_of[self.code] = torch.arange(code.numel(), dtype=torch.int32)

    @property
    def stand_by_numbers(self) -> bool:
        """Whether places are numbers in the batch: one rank has all nodes, in their order."""
        is_alone = self._lists.group.size == 1 and self._ranks.count == 1
        return is_alone and self._columns is not None and self._columns.in_edges.node_id is None

    def common(self, place: Tensor) -> Tensor:
        """Codes among the ranks."""
        code = self.code.index_select(0, place)
        return code if self._columns is None else self._columns.common(code)

    def reach(self, code: Tensor, owner_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The places of nodes that a hop reaches: :meth:`meet` (collective)."""
        place, new = self.meet(code, owner_of)
        if self.stand_by_numbers:
            self.hops.append(new)
            return place
        common = self.common(new)
        order = _ascending(common)
        self.hops.append(new.index_select(0, order))
        self._codes_of_hops.append(common.index_select(0, order))
        return place

    def meet(self, code: Tensor, owner_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Tell the owners of the nodes that were not known of them (collective).

        Args:
            code: on this rank, int64 or int32 ``[m]``.
            owner_of: the ranks of some of them, given where these stand in ``code``.

        Returns:
            The place of each, and the places of this rank's own nodes that it did not know, those that others told of
            included.
        """
        size, before = self._lists.group.size, self.code.numel()
        place = self._add(code, owner_of)
        new = torch.arange(before, self.code.numel())
        if size == 1:
            return place, new
        is_own = self.owner[before:] == self._rank
        own, other = new[is_own], new[~is_own]
        owner, common = self.owner.index_select(0, other), self.common(other)
        order = _ascending(owner * self._span + common)
        counts = torch.bincount(owner, minlength=size).tolist()
        arrived, from_rank = self._lists.exchange(
            common.index_select(0, order).view(-1, 1), counts, kind=f"hop {len(self.hops)}"
        )
        told = arrived.view(-1) if self._columns is None else self._columns.here(arrived.view(-1))
        before = self.code.numel()
        self._asked.append(_ByRank(other.index_select(0, order), counts))
        self._told.append(_ByRank(self._add(told, lambda first: torch.full_like(first, self._rank)), from_rank))
        return place, torch.cat([own, torch.arange(before, self.code.numel())])

    def _add(self, code: Tensor, owner_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The places of codes on this rank; those that were not known come behind the others, ascending."""
        first, place = ops.distinct(self.code, code, self._place_of)
        self.code = torch.cat([self.code, code.index_select(0, first)])
        self.owner = torch.cat([self.owner, owner_of(first)])
        return place

    def _give_table_back(self) -> None:
        if self._place_of is not None and self._columns is not None:
            self._columns.in_edges.give_table(self._place_of.index_fill_(0, self.code, -1))
            self._place_of = None

    def assign_numbers(self, num_seeds: list[int], num_edges: list[int]) -> tuple[list[list[int]], list[int]]:
        """Number the nodes of each type: by hop, data group and code; ranks learn those that they know (collective).

        The codes of a hop go in equal ranges to the ranks, which sort them and send back the places.

        Args:
            num_seeds: of all data groups, by type.
            num_edges: of this rank, by hop or whatever else.

        Returns:
            The batch's nodes by type and hop, and its edges.
        """
        self._give_table_back()
        if self.stand_by_numbers:
            counts = [hop.numel() for hop in self.hops]
            self.number = torch.arange(self.code.numel())
            self.number[sum(counts) :] = -1
            return [counts], num_edges
        ranks, lists = self._ranks, self._lists
        num_hops, num_types, size, span = len(self.hops) - 1, len(self._first), lists.group.size, self._span
        ends = torch.arange(1, size) * -(-span // size)
        hops = []
        for hop, code in enumerate(self._codes_of_hops):
            places = [0, *torch.searchsorted(code, ends).tolist(), code.numel()]
            hops.append(_ByRank(code + hop * span, [high - low for low, high in pairwise(places)]))
        sent = _ByRank.joined(hops, self.code)
        arrived, counts = lists.exchange(sent.rows.view(-1, 1), sent.counts, kind="codes")
        place = _ascending(arrived.view(-1))
        ordered = arrived.view(-1).index_select(0, place)
        begins = (torch.arange(num_hops).view(-1, 1) * span + torch.tensor(self._first)).view(-1)
        bounds = torch.cat([torch.searchsorted(ordered, begins), torch.tensor([ordered.numel()])])
        table = ranks.everyone.gather([ranks.index, *num_edges, *bounds.diff().tolist()])
        group, edges, nodes = torch.split(table, [1, len(num_edges), num_hops * num_types], dim=1)
        group = group.view(-1)
        before = nodes[group < ranks.index].sum(0) + nodes[group == ranks.index][: lists.group.rank].sum(0)
        totals = torch.cat([torch.tensor([num_seeds]), nodes.sum(0).view(num_hops, num_types)])
        first = totals.cumsum(0)[:-1].view(-1) + before
        number = torch.arange(ordered.numel()) + torch.repeat_interleave(first - bounds[:-1], bounds.diff())
        back = torch.empty_like(number).index_copy_(0, place, number)
        numbers, _ = lists.exchange(back.view(-1, 1), counts, num_types == 1, kind="numbers")
        number = torch.cat([numbers.view(-1)[:0], *_ByRank(numbers.view(-1), sent.counts).parted(hops)])
        self.number = torch.full_like(self.code, -1)
        self.number.index_copy_(0, torch.cat(self.hops), torch.cat([self._seed_number, number]))
        if size > 1:
            self._answer()
        return totals.t().tolist(), edges.sum(0).tolist()

    def _answer(self) -> None:
        """Send the ranks that told of nodes the numbers of these (collective)."""
        asked, told = _ByRank.joined(self._asked, self.code), _ByRank.joined(self._told, self.code)
        number = self.number.index_select(0, told.rows)
        answers, _ = self._lists.exchange(number.view(-1, 1) + 1, told.counts, is_ascending=False, kind="answers")
        self.number.index_copy_(0, asked.rows, answers.view(-1) - 1)


class _ByRank(NamedTuple):
    """Rows, those of a rank together, and how many each rank has."""

    rows: Tensor
    counts: list[int]

    @staticmethod
    def joined(lists: list[_ByRank], like: Tensor) -> _ByRank:
        """All of several lists, those of a rank one list after another."""
        pieces = [torch.split(rows, counts) for rows, counts in lists]
        rows = torch.cat([like[:0], *(piece for of_rank in zip(*pieces, strict=True) for piece in of_rank)])
        return _ByRank(rows, [sum(counts) for counts in zip(*(counts for _, counts in lists), strict=True)])

    def parted(self, lists: list[_ByRank]) -> list[Tensor]:
        """What stands for the rows of lists that were joined, by list."""
        sizes = [count for of_rank in zip(*(counts for _, counts in lists), strict=True) for count in of_rank]
        pieces = torch.split(self.rows, sizes)
        return [torch.cat(pieces[k :: len(lists)]) for k in range(len(lists))]


def _ascending(values: Tensor) -> Tensor:
    """The order of values that are a few ascending runs, which NumPy's stable sort merges."""
    return torch.from_numpy(np.argsort(values.numpy(), kind="stable"))
