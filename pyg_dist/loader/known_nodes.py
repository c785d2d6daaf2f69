"""The nodes of a batch that a rank knows: found hop by hop, and numbered among those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdList, IdLists
from pyg_dist.backend.session.agreement import group_of_thread
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.graph.sample import CrossingEdges
from pyg_dist.loader.columns import Columns


@dataclass(frozen=True, eq=False)
class SamplingRanks:
    """The ranks that sample together, over messages that a thread of its own may send."""

    part: IdLists  # those of a data group, which have its nodes
    everyone: IdLists  # those of all data groups
    index: int = 0  # the number of this data group
    count: int = 1  # data groups
    gathers: bool = False  # whether each rank has to know the whole subset of its data group
    machine: IdLists | None = None  # those of this one's machine, where they share what crosses to others

    @staticmethod
    def of(graph: DistributedGraph) -> SamplingRanks:
        """Those that share a graph; made alike on every rank (not collective)."""
        index, count = graph.data_group
        shared = SamplingRanks.sharing(graph.node_sharding.group, graph.ranks_per_machine)
        everyone = shared.part if count == 1 else IdLists(group_of_thread(None))
        return SamplingRanks(shared.part, everyone, index, count, graph.needs_whole_subsets, shared.machine)

    @staticmethod
    def sharing(group: Group, ranks_per_machine: int | None = None) -> SamplingRanks:
        """Those of a group, which has all nodes; made alike on every rank (not collective)."""
        ranks, machine = group.calls.ranks, None
        part = IdLists(group_of_thread(ranks))
        if ranks_per_machine is not None:
            first = group.rank - group.rank % ranks_per_machine
            machine = IdLists(group_of_thread(ranks[first : first + ranks_per_machine]))
        return SamplingRanks(part, part, machine=machine)

    @staticmethod
    def alone() -> SamplingRanks:
        """One process."""
        lists = IdLists(Group())
        return SamplingRanks(lists, lists)


_SPARSE = 64
"""A table with fewer entries than one in so many is cleared entry by entry: one takes as long as that many in a row."""


class KnownNodes:
    """This rank's nodes of a batch, and the sources of their edges, which belong to one rank each.

    Args:
        ranks: those that sample.
        columns: the nodes that a rank may meet.
        trees: an upper bound of the batch's trees.
        code, number: of this rank's seeds, int64 ``[s]``, those of a type together; codes on this rank.
        sizes: how many seeds each type has.

    Attributes:
        code: on this rank, in the order in which it learns of them, int64 ``[k]``. Their places here stand for them.
        hops: places of this rank's nodes of the batch by the hop that reached them and by type, by ascending code; but
            its seeds, which come first, as they are given.
        number: of each node in the batch, or -1, int64 ``[k]``; once they are numbered.
    """

    def __init__(
        self, ranks: SamplingRanks, columns: Columns, trees: int, code: Tensor, number: Tensor, sizes: Sequence[int]
    ) -> None:
        self._ranks, self._lists, self._rank = ranks, ranks.part, ranks.part.group.rank
        self.columns, self.trees = columns, trees
        self.code, self.number = code, number
        self.hops = [torch.arange(code.numel()).split(list(sizes))]
        self._asked: list[_Run] = []  # other ranks' nodes, as they were told of them
        self._told: list[_ByRank] = []  # places of nodes of which other ranks told, by hop
        self._num_asked = [0] * self._lists.group.size
        self._place_of: Tensor | None = None  # by column, where a node is there once
        if trees == 1:
            self._place_of = columns.take_table()
            self._place_of[self.code] = torch.arange(code.numel(), dtype=torch.int32)

    @property
    def stand_by_numbers(self) -> bool:
        """Whether places are numbers in the batch: one rank has all nodes, in their order, of one type."""
        is_alone = self._lists.group.size == 1 and self._ranks.count == 1
        return is_alone and self.columns.types.numel() == 1

    def common(self, place: Tensor) -> Tensor:
        """Codes among the ranks."""
        return self.columns.common(self.code.index_select(0, place), self.trees)

    def reach(self, code: Tensor) -> Tensor:
        """The places of nodes that a hop reaches: :meth:`meet` (collective)."""
        (place, new), types = self.meet(code), self.columns.types
        if types.numel() == 1:
            self.hops.append((new,))
        else:
            ends = torch.searchsorted(self.code.index_select(0, new), types[1:] * self.trees)
            self.hops.append(torch.tensor_split(new, ends))
        return place

    def meet(self, code: Tensor) -> tuple[Tensor, Tensor]:
        """Tell the owners of the nodes that were not known of them (collective).

        Args:
            code: on this rank, int64 or int32 ``[m]``.

        Returns:
            The place of each, and the places of this rank's own nodes that it did not know, those that others told of
            included, by ascending code.
        """
        before = self.code.numel()
        place = self._add(code)
        new, size = self.code[before:], self._lists.group.size
        if size == 1:
            return place, torch.arange(before, before + new.numel())
        num_own, *of_others = self.columns.by_rank(new, self.trees)
        counts = [*of_others[: self._rank], 0, *of_others[self._rank :]]
        begin = before + num_own
        for rank, count in enumerate(counts):
            self._asked.append(_Run(rank, begin, self._num_asked[rank], count))
            self._num_asked[rank] += count
            begin += count
        asked = self.columns.abroad(new[num_own:], self.trees).view(-1, 1)
        ((arrived, from_rank),) = self._lists.exchange(IdList(asked, counts), kind=f"hop {len(self.hops)}")
        behind = self.code.numel()
        self._told.append(_ByRank(self._add(arrived.view(-1)), from_rank))
        own = torch.cat([torch.arange(before, before + num_own), torch.arange(behind, self.code.numel())])
        return place, own.index_select(0, _ascending(self.code.index_select(0, own)))

    def _add(self, code: Tensor) -> Tensor:
        """The places of codes; those that were not known come behind the others, ascending."""
        first, place = ops.distinct(self.code, code, self._place_of)
        self.code = torch.cat([self.code, code.index_select(0, first)])
        return place

    def _give_table_back(self) -> None:
        if self._place_of is not None:
            is_sparse = _SPARSE * self.code.numel() < self._place_of.numel()
            table = self._place_of.index_fill_(0, self.code, -1) if is_sparse else self._place_of.fill_(-1)
            self.columns.give_table(table)
            self._place_of = None

    def assign_numbers(
        self, num_seeds: list[int], first: Sequence[int], num_edges: list[int]
    ) -> tuple[list[list[int]], list[int]]:
        """Number this rank's nodes, of each type: by hop, data group and code (collective).

        Every rank of a data group learns the codes of its nodes for that: O(B) time.

        Args:
            num_seeds: of all data groups, by type.
            first: the first id of each type.
            num_edges: of this rank, by hop or whatever else.

        Returns:
            The batch's nodes by type and hop, and its edges.
        """
        self._give_table_back()
        if self.stand_by_numbers:
            counts = [hop.numel() for (hop,) in self.hops]
            self.number = torch.arange(self.code.numel())
            self.number[sum(counts) :] = -1
            return [counts], num_edges
        num_hops, num_types, span = len(self.hops) - 1, len(first), self.columns.num_ids * self.trees
        hops = [torch.cat(hop) for hop in self.hops]
        own = torch.cat([self.code[:0], *(self.common(hop) + n * span for n, hop in enumerate(hops[1:]))])
        (edges_of_ranks, _), (codes, counts) = self._lists.exchange(
            IdList(torch.tensor([[0, *num_edges]])), IdList(own.view(-1, 1)), kind="codes"
        )
        begins = (torch.arange(num_hops).view(-1, 1) * span + torch.tensor(first) * self.trees).view(-1)
        sizes = torch.tensor(counts)
        bound = torch.cat([ops.count_less(begins, codes.view(-1), sizes), sizes.sum(0, keepdim=True)])
        own_bound = torch.cat([torch.searchsorted(own, begins), torch.tensor([own.numel()])])
        edges_of_groups, nodes_of_groups = self._of_groups(edges_of_ranks[:, 1:].sum(0), bound.diff())
        totals = torch.cat([torch.tensor([num_seeds]), nodes_of_groups.sum(0).view(num_hops, num_types)])
        begin = totals.cumsum(0)[:-1].view(-1) + nodes_of_groups[: self._ranks.index].sum(0) - bound[:-1]
        number = ops.count_less(own, codes.view(-1), sizes)
        number += torch.repeat_interleave(begin, own_bound.diff(), output_size=own.numel())
        seeds, self.number = self.number, torch.full_like(self.code, -1)
        self.number.index_copy_(0, torch.cat(hops), torch.cat([seeds, number]))
        return totals.t().tolist(), edges_of_groups.sum(0).tolist()

    def _of_groups(self, edges: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers of edges and nodes of each data group, given those of this one (collective)."""
        ranks = self._ranks
        if ranks.count == 1:
            return edges.view(1, -1), nodes.view(1, -1)
        table = ranks.everyone.gather([ranks.index, *edges.tolist(), *nodes.tolist()])
        group, *_ = table.unbind(1)
        one_of_each = torch.stack([(group == index).nonzero()[0, 0] for index in range(ranks.count)])
        found = torch.split(table.index_select(0, one_of_each), [1, edges.numel(), nodes.numel()], dim=1)
        return found[1], found[2]

    def tell(self, edges: Sequence[tuple[Tensor, Tensor, Tensor]], numbers: bool = False) -> list[CrossingEdges | None]:
        """Tell the owners of sources of this rank's edges from them, once its nodes are numbered (collective).

        Args:
            edges: of each relation, places of sources and of targets, int64 ``[m]``, first. Targets mostly ascend.
            numbers: whether to learn the numbers of other ranks' nodes, in the same message.

        Returns:
            For each relation, who has what ends, by the numbers of the batch; ``None``: there is one rank.
        """
        size, rank, number = self._lists.group.size, self._rank, self.number
        if size == 1 or not edges:
            return [None] * len(edges)
        told = _ByRank.joined([_ByRank(self.code[:0], [0] * size), *self._told])
        # A source goes by its place among those of which this rank has told its owner.
        owner, slot = (torch.full_like(self.code, x, dtype=torch.int32) for x in (rank, 0))
        for run in self._asked:
            owner[run.begin : run.begin + run.size] = run.rank
            torch.arange(run.first, run.first + run.size, out=slot[run.begin : run.begin + run.size])
        here: list[tuple[Tensor, Tensor, Tensor]] = []
        lists: list[IdList] = []
        for source, target, _ in edges:
            keys = owner.index_select(0, source), slot.index_select(0, source)
            starts, place, order = ops.csr_from_edges(*keys, None, size, max(1, self.code.numel()))
            order = torch.arange(source.numel()) if order is None else order.long()
            begin, end = starts[rank : rank + 2].tolist()
            arriving, place = (torch.cat([x[:begin], x[end:]]) for x in (order, place))
            counts = starts.diff().index_fill(0, torch.tensor(rank), 0)
            ends = number.index_select(0, target.index_select(0, arriving)).view(-1, 1)
            here.append((order[begin:end], arriving, torch.repeat_interleave(counts, output_size=arriving.numel())))
            lists.append(IdList(ends, counts.tolist()))
            lists.append(IdList(place.long().view(-1, 1), counts.tolist(), is_ascending=False))
        if numbers:
            answer = number.index_select(0, told.rows).view(-1, 1) + 1
            lists.append(IdList(answer, told.counts, is_ascending=False))
        arrived = self._lists.exchange(*lists, kind=f"edges, {len(lists)}")
        if numbers:
            answer, of_rank = arrived.pop()
            of_ranks = torch.split(answer.view(-1) - 1, of_rank)
            for run in self._asked:
                number[run.begin : run.begin + run.size] = of_ranks[run.rank][run.first : run.first + run.size]
        found, first = list[CrossingEdges](), torch.tensor([0, *told.counts]).cumsum(0)
        for of_relation, (ends, from_rank), (place, _) in zip(here, arrived[::2], arrived[1::2], strict=True):
            receiver = torch.repeat_interleave(torch.tensor(from_rank))
            node = told.rows.index_select(0, first.index_select(0, receiver) + place.view(-1))
            leaving = number.index_select(0, node), ends.view(-1), receiver
            found.append(CrossingEdges(*of_relation, leaving))
        return self._shared_with_machine(edges, found)

    def _shared_with_machine(
        self, edges: Sequence[tuple[Tensor, Tensor, Tensor]], crossing: Sequence[CrossingEdges]
    ) -> list[CrossingEdges | None]:
        """With those between this machine and others, of which each of its ranks tells the others (collective)."""
        machine = self._ranks.machine
        if machine is None:
            return [*crossing]
        first, lists = self._rank - machine.group.rank, []
        for (source, target, _), found in zip(edges, crossing, strict=True):
            ends = (self.number.index_select(0, end.index_select(0, found.arriving)) for end in (source, target))
            begins, finishes, receiver = found.leaving
            into = torch.stack([*ends, found.sender, torch.full_like(found.sender, self._rank)], 1)
            out_of = torch.stack([begins, finishes, torch.full_like(receiver, self._rank), receiver], 1)
            across = [(x < first) | (x >= first + machine.group.size) for x in (found.sender, receiver)]
            lists.append(IdList(torch.cat([into[across[0]], out_of[across[1]]]), is_ascending=False))
        shared = machine.exchange(*lists, kind=f"edges of a machine, {len(lists)}")
        return [replace(found, between_machines=rows) for found, (rows, _) in zip(crossing, shared, strict=True)]


class _Run(NamedTuple):
    """Consecutive places of a rank's nodes, and how many it was told of before."""

    rank: int
    begin: int
    first: int
    size: int


class _ByRank(NamedTuple):
    """Places of nodes, those of a rank together, and how many each rank has."""

    rows: Tensor
    counts: list[int]

    @staticmethod
    def joined(lists: list[_ByRank]) -> _ByRank:
        """All of several lists, those of a rank one list after another."""
        pieces = [torch.split(rows, counts) for rows, counts in lists]
        rows = torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])
        return _ByRank(rows, [sum(counts) for counts in zip(*(counts for _, counts in lists), strict=True)])


def _ascending(values: Tensor) -> Tensor:
    """The order of values that are a few ascending runs, which NumPy's stable sort merges."""
    return torch.from_numpy(np.argsort(values.numpy(), kind="stable"))
