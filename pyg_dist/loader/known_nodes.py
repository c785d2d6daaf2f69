"""The nodes of a batch that a rank knows: found hop by hop, and numbered among those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdList, IdLists
from pyg_dist.backend.session.agreement import group_of_thread
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.graph.sample import CrossingEdges, LeavingEdges
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


class Edges(NamedTuple):
    """Edges to this rank's nodes, ``[m]`` each.

    Attributes:
        source: places of their sources among the known nodes, int32 or int64.
        target: numbers of their targets in the batch, int64; they mostly ascend.
        stored: where each is in the graph's edge storage, int64; those of one target together, in the graph's order.
    """

    source: Tensor
    target: Tensor
    stored: Tensor

    def some(self, which: Tensor) -> Edges:
        """Those at some places."""
        return Edges(*(x.index_select(0, which) for x in self))


_SPARSE = 64
"""A table with fewer entries than one in so many is cleared entry by entry: one takes as long as that many in a row."""


class KnownNodes:
    """This rank's nodes of a batch, and the sources of their edges, which belong to one rank each.

    They are found by their codes, and are known by their places: in the order in which this rank learns of them.

    Args:
        ranks: those that sample.
        columns: the nodes that a rank may meet.
        trees: an upper bound of the batch's trees.
        code, number: of this rank's seeds, int64 ``[s]``, those of a type together; codes on this rank.
        sizes: how many seeds each type has.

    Attributes:
        hops: codes of this rank's nodes of the batch by the hop that reached them and by type, ascending; but its
            seeds, which come first, as they are given.
        numbers: theirs in the batch, once they have some.
        number: of each place in the batch, or -1, int64 ``[k]``; likewise.
    """

    def __init__(
        self, ranks: SamplingRanks, columns: Columns, trees: int, code: Tensor, number: Tensor, sizes: Sequence[int]
    ) -> None:
        self._ranks, self._lists, self._rank = ranks, ranks.part, ranks.part.group.rank
        self.columns, self.trees = columns, trees
        self.hops, self.numbers = [code.split(list(sizes))], [number.split(list(sizes))]
        self._codes, self._size = [code], code.numel()  # by place
        # Other ranks' nodes, as they were told of them: the rank, the first place, how many it knew before, how many.
        self._asked: list[tuple[int, int, int, int]] = []
        self._num_asked = [0] * self._lists.group.size
        self._told: list[_ByRank] = []  # places of nodes of which other ranks told, by hop
        self._place_of: Tensor | None = None  # by column, where a node is there once
        if trees == 1:
            self._place_of = columns.take_table()
            self._place_of[code] = torch.arange(self._size, dtype=torch.int32)

    @property
    def stand_by_numbers(self) -> bool:
        """Whether places are numbers in the batch: one rank has all nodes, in their order, of one type."""
        is_alone = self._lists.group.size == 1 and self._ranks.count == 1
        return is_alone and self.columns.types.numel() == 1

    def reach(self, code: Tensor) -> Tensor:
        """Add a hop, which reaches some nodes: :meth:`meet`; their places (collective)."""
        (new, place), types = self.meet(code), self.columns.types
        if types.numel() == 1:
            self.hops.append((new,))
        else:
            self.hops.append(new.tensor_split(torch.searchsorted(new, types[1:] * self.trees)))
        return place

    def meet(self, code: Tensor) -> tuple[Tensor, Tensor]:
        """Tell the owners of the nodes that were not known of them (collective).

        Args:
            code: on this rank, int64 or int32 ``[m]``.

        Returns:
            The codes of this rank's own nodes that it did not know, those that others told of included, ascending; and
            the places of the given ones, int32 or int64.
        """
        first = self._size
        new, place = self._add(code)
        if self._lists.group.size == 1:
            return new, place
        num_own, *of_others = self.columns.by_rank(new, self.trees)
        counts = [*of_others[: self._rank], 0, *of_others[self._rank :]]
        first += num_own
        for rank, count in enumerate(counts):
            self._asked.append((rank, first, self._num_asked[rank], count))
            self._num_asked[rank] += count
            first += count
        asked = self.columns.abroad(new[num_own:], self.trees).view(-1, 1)
        ((arrived, from_rank),) = self._lists.exchange(IdList(asked, counts), kind=f"hop {len(self.hops)}")
        others, told = self._add(arrived.view(-1))
        self._told.append(_ByRank(told, from_rank))
        own = torch.cat([new[:num_own], others])
        return torch.from_numpy(np.sort(own.numpy(), kind="stable")), place  # two runs, which it merges

    def _add(self, code: Tensor) -> tuple[Tensor, Tensor]:
        """The codes that were not known, ascending: their places are behind the others; and the places of all."""
        if self._place_of is not None:
            new = ops.add_places(self._place_of, code, self._size)
            place = self._place_of.index_select(0, code)
        else:
            first, place = ops.distinct(torch.cat(self._codes), code)
            new = code.index_select(0, first)
        self._codes.append(new)
        self._size += new.numel()
        return new, place

    def find(self, code: Tensor) -> Tensor:
        """The places of nodes that are known, int32 or int64, given their codes, int32 or int64 ``[m]``."""
        if self._place_of is not None:
            return self._place_of.index_select(0, code)
        return ops.distinct(torch.cat(self._codes), code)[1]

    def give_table_back(self) -> None:
        """End: nothing is found afterwards."""
        if self._place_of is not None:
            is_sparse = _SPARSE * self._size < self._place_of.numel()
            codes = torch.cat(self._codes)
            self.columns.give_table(self._place_of.index_fill_(0, codes, -1) if is_sparse else self._place_of.fill_(-1))
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
        if self.stand_by_numbers:
            counts = [hop.numel() for (hop,) in self.hops]
            self.number = torch.arange(self._size)
            self.number[sum(counts) :] = -1
            self.numbers = [(of_hop,) for of_hop in self.number[: sum(counts)].split(counts)]
            return [counts], num_edges
        num_hops, num_types, span = len(self.hops) - 1, len(first), self.columns.num_ids * self.trees
        hops = [torch.cat(hop) for hop in self.hops]
        own = torch.cat([hops[0][:0], *(self.columns.common(x, self.trees) + n * span for n, x in enumerate(hops[1:]))])
        (edges_of_ranks, _), (codes, counts) = self._lists.exchange(
            IdList(torch.tensor([[0, *num_edges]])), IdList(own.view(-1, 1), keeps_own=False), kind="codes"
        )
        begins = (torch.arange(num_hops).view(-1, 1) * span + torch.tensor(first) * self.trees).view(-1)
        sizes, own_bound = torch.tensor(counts), torch.searchsorted(own, begins)
        bound = ops.count_less(begins, codes.view(-1), sizes) + own_bound
        own_bound, bound = (
            torch.cat([x, torch.tensor([n])])
            for x, n in ((own_bound, own.numel()), (bound, own.numel() + codes.numel()))
        )
        edges_of_groups, nodes_of_groups = self._of_groups(edges_of_ranks[:, 1:].sum(0), bound.diff())
        totals = torch.cat([torch.tensor([num_seeds]), nodes_of_groups.sum(0).view(num_hops, num_types)])
        begin = totals.cumsum(0)[:-1].view(-1) + nodes_of_groups[: self._ranks.index].sum(0) - bound[:-1]
        number = ops.count_less(own, codes.view(-1), sizes).add_(torch.arange(own.numel()))
        number += torch.repeat_interleave(begin, own_bound.diff(), output_size=own.numel())
        sizes_of_hops = [of_type.numel() for hop in self.hops[1:] for of_type in hop]
        of_types = number.split(sizes_of_hops)
        self.numbers += [of_types[n * num_types : (n + 1) * num_types] for n in range(num_hops)]
        self.number = torch.full((self._size,), -1)
        self.number.index_copy_(0, self.find(torch.cat(hops)).long(), torch.cat([*self.numbers[0], number]))
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

    def learn_numbers(self) -> None:
        """Learn the numbers of other ranks' nodes, once each rank has numbered its own (collective)."""
        if self._lists.group.size == 1:
            return
        told = _ByRank.joined([_ByRank(torch.empty(0, dtype=torch.int32), [0] * self._lists.group.size), *self._told])
        numbers = self.number.index_select(0, told.places).view(-1, 1) + 1
        ((answer, of_rank),) = self._lists.exchange(IdList(numbers, told.counts, is_ascending=False), kind="numbers")
        answers = (answer.view(-1) - 1).split(of_rank)
        for rank, place, slot, count in self._asked:
            self.number[place : place + count] = answers[rank][slot : slot + count]

    def crossing(self, edges: Sequence[Edges]) -> list[CrossingEdges | None]:
        """For each relation, which of this rank's edges begin where; ``None``: there is one rank.

        Once the nodes are numbered; collective where ranks share machines.
        """
        size, rank, machine = self._lists.group.size, self._rank, self._ranks.machine
        if size == 1:
            return [None] * len(edges)
        label = torch.zeros(self._size, dtype=torch.int32)  # of each place: 0, or a number of another rank
        for peer, place, _, count in self._asked:
            label[place : place + count] = peer + (peer < rank)
        found = list[CrossingEdges]()
        for number, of_relation in enumerate(edges):
            begin = label.index_select(0, of_relation.source)
            inside, arriving = (torch.from_numpy(np.flatnonzero(x.numpy())) for x in (begin == 0, begin != 0))
            begin = begin.index_select(0, arriving)
            bound, _, order = ops.csr_from_edges(begin, begin, None, size, size)
            arriving = arriving if order is None else arriving.index_select(0, order)
            counts = bound.diff()
            counts = torch.cat([counts[1 : rank + 1], counts[:1], counts[rank + 1 :]])
            sender = torch.repeat_interleave(counts, output_size=arriving.numel())
            send = partial(self._lists.exchange, kind=f"crossing {number}")
            found.append(CrossingEdges(inside, arriving, sender, send))
        if machine is None:
            return [*found]
        leaving = [self.leaving(*each) for each in zip(edges, found, strict=True)]
        return self._shared_with_machine(machine, edges, found, leaving)

    def leaving(self, edges: Edges, crossing: CrossingEdges) -> LeavingEdges:
        """The edges from this rank's nodes to others': their owners tell of theirs (collective)."""
        ends = self.number.index_select(0, edges.source), edges.target
        rows = torch.stack([end.index_select(0, crossing.arriving) for end in ends], 1)
        counts = torch.bincount(crossing.sender, minlength=self._lists.group.size).tolist()
        ((rows, of_rank),) = self._lists.exchange(IdList(rows, counts, is_ascending=False), kind="leaving")
        receiver = torch.repeat_interleave(torch.tensor(of_rank), output_size=len(rows))
        source, target = rows.t().contiguous()
        return LeavingEdges(source, target, receiver)

    def _shared_with_machine(
        self,
        machine: IdLists,
        edges: Sequence[Edges],
        crossing: Sequence[CrossingEdges],
        leaving: Sequence[LeavingEdges],
    ) -> list[CrossingEdges | None]:
        """With those between this machine and others, of which each of its ranks tells the others (collective)."""
        first, lists = self._rank - machine.group.rank, []
        for (source, target, _), found, (begins, finishes, receiver) in zip(edges, crossing, leaving, strict=True):
            source, target = (end.index_select(0, found.arriving) for end in (source, target))
            ends = self.number.index_select(0, source), target
            into = torch.stack([*ends, found.sender, torch.full_like(found.sender, self._rank)], 1)
            out_of = torch.stack([begins, finishes, torch.full_like(receiver, self._rank), receiver], 1)
            across = [(x < first) | (x >= first + machine.group.size) for x in (found.sender, receiver)]
            lists.append(IdList(torch.cat([into[across[0]], out_of[across[1]]]), is_ascending=False))
        shared = machine.exchange(*lists, kind=f"edges of a machine, {len(lists)}")
        return [
            replace(found, leaving=out_of, between_machines=rows)
            for found, out_of, (rows, _) in zip(crossing, leaving, shared, strict=True)
        ]


class _ByRank(NamedTuple):
    """Places of nodes, those of a rank together, and how many each rank has."""

    places: Tensor
    counts: list[int]

    @staticmethod
    def joined(lists: list[_ByRank]) -> _ByRank:
        """All of several lists, those of a rank one list after another."""
        pieces = [places.split(counts) for places, counts in lists]
        places = torch.cat([piece for of_rank in zip(*pieces, strict=True) for piece in of_rank])
        return _ByRank(places, [sum(counts) for counts in zip(*(counts for _, counts in lists), strict=True)])
