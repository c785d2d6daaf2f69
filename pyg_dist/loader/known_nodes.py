"""The nodes of a batch that a rank knows: found hop by hop, and numbered among those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
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
        asked = IdList(common.index_select(0, order).view(-1, 1), counts)
        ((arrived, from_rank),) = self._lists.exchange(asked, kind=f"hop {len(self.hops)}")
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
            is_sparse = _SPARSE * self.code.numel() < self._place_of.numel()
            table = self._place_of.index_fill_(0, self.code, -1) if is_sparse else self._place_of.fill_(-1)
            self._columns.in_edges.give_table(table)
            self._place_of = None

    def assign_numbers(self, num_seeds: list[int], num_edges: list[int]) -> tuple[list[list[int]], list[int]]:
        """Number this rank's nodes, of each type: by hop, data group and code (collective).

        Every rank of a data group learns the codes of its nodes for that, and merges them: O(B) time.

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
        num_hops, num_types, span = len(self.hops) - 1, len(self._first), self._span
        mine = torch.cat(
            [torch.tensor(num_edges), *(code + hop * span for hop, code in enumerate(self._codes_of_hops))]
        )
        ((rows, counts),) = self._lists.exchange(IdList(mine.view(-1, 1)), kind="codes")
        of_ranks = torch.split(rows.view(-1), counts)
        edges = torch.stack([of_rank[: len(num_edges)] for of_rank in of_ranks]).sum(0)
        codes = torch.cat([of_rank[len(num_edges) :] for of_rank in of_ranks])
        order = _ascending(codes)
        begins = (torch.arange(num_hops).view(-1, 1) * span + torch.tensor(self._first)).view(-1)
        bounds = torch.searchsorted(codes.index_select(0, order), begins)
        nodes = torch.cat([bounds, torch.tensor([codes.numel()])]).diff()
        edges_of_groups, nodes_of_groups = self._of_groups(edges, nodes)
        before = nodes_of_groups[: self._ranks.index].sum(0)
        totals = torch.cat([torch.tensor([num_seeds]), nodes_of_groups.sum(0).view(num_hops, num_types)])
        first = totals.cumsum(0)[:-1].view(-1) + before
        ordered = torch.arange(codes.numel()) + torch.repeat_interleave(first - bounds, nodes)
        number = torch.empty_like(codes).index_copy_(0, order, ordered)
        begin = sum(counts[: self._rank]) - self._rank * len(num_edges)
        number = number[begin : begin + mine.numel() - len(num_edges)]
        self.number = torch.full_like(self.code, -1)
        self.number.index_copy_(0, torch.cat(self.hops), torch.cat([self._seed_number, number]))
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

    def tell(
        self, source: Tensor, target: Tensor, of_relation: Sequence[int], numbers: bool = False
    ) -> list[CrossingEdges | None]:
        """Tell the owners of sources of this rank's edges from them, once its nodes are numbered (collective).

        Args:
            source: places of these, int64 ``[m]``.
            target: places of their other ends, int64 ``[m]``, which mostly ascend, as hops are drawn.
            of_relation: how many edges each relation has, one relation after another.
            numbers: whether to learn the numbers of other ranks' nodes, in the same message.

        Returns:
            For each relation, who has what ends, by the numbers of the batch; ``None``: there is one rank.
        """
        size, num_relations = self._lists.group.size, len(of_relation)
        if size == 1 or not of_relation:
            return [None] * num_relations
        asked, told = (_ByRank.joined(lists, self.code) for lists in (self._asked, self._told))
        owner = self.owner.index_select(0, source)
        inside, arriving = ((owner == self._rank) == is_here for is_here in (True, False))
        inside, arriving = inside.nonzero().view(-1), arriving.nonzero().view(-1)
        sender = owner.index_select(0, arriving)
        if size > 2:
            order = torch.from_numpy(np.argsort(sender.to(torch.int16).numpy(), kind="stable"))  # 16 bits: by digits
            arriving, sender = (x.index_select(0, order) for x in (arriving, sender))
        # A source goes by its place among those of which this rank has told its owner.
        place_of = torch.empty_like(self.code)
        place_of[asked.rows] = torch.cat([torch.arange(count) for count in asked.counts])
        place = place_of.index_select(0, source.index_select(0, arriving))
        relation = torch.repeat_interleave(torch.arange(num_relations), torch.tensor(of_relation))
        if num_relations > 1:
            place = place * num_relations + relation.index_select(0, arriving)
        rows = torch.stack([self.number.index_select(0, target.index_select(0, arriving)), place], 1)
        lists = [IdList(rows, torch.bincount(sender, minlength=size).tolist())]
        if numbers:
            answer = self.number.index_select(0, told.rows).view(-1, 1) + 1
            lists.append(IdList(answer, told.counts, is_ascending=False))
        (edges, counts), *answers = self._lists.exchange(*lists, kind=f"edges, {len(lists)}")
        for answer, _ in answers:
            self.number.index_copy_(0, asked.rows, answer.view(-1) - 1)
        receiver = torch.repeat_interleave(torch.arange(size), torch.tensor(counts))
        first = torch.tensor([0, *told.counts]).cumsum(0).index_select(0, receiver)
        place = edges[:, 1] if num_relations == 1 else edges[:, 1] // num_relations
        node = told.rows.index_select(0, first + place)
        leaving = torch.stack([self.number.index_select(0, node), edges[:, 0], receiver], 1)
        of_arriving, of_leaving = relation.index_select(0, arriving), edges[:, 1] % num_relations
        shared: list[Tensor | None] = [None] * num_relations
        if self._ranks.machine is not None:
            begin = self.number.index_select(0, source.index_select(0, arriving))
            into = torch.stack([begin, rows[:, 0], sender, of_arriving], 1)
            out_of = torch.cat([leaving, of_leaving.view(-1, 1)], 1)
            shared = self._share_with_machine(self._ranks.machine, into, out_of, num_relations)
        if num_relations == 1:
            return [CrossingEdges(inside, arriving, sender, leaving, *shared)]
        found = list[CrossingEdges | None]()
        for number, first_edge in enumerate(accumulate(of_relation[:-1], initial=0)):
            here, there = relation.index_select(0, inside) == number, of_arriving == number
            ends_here, ends_there = inside[here] - first_edge, arriving[there] - first_edge
            out_of = leaving[of_leaving == number]
            found.append(CrossingEdges(ends_here, ends_there, sender[there], out_of, shared[number]))
        return found

    def _share_with_machine(
        self, machine: IdLists, into: Tensor, out_of: Tensor, num_relations: int
    ) -> list[Tensor | None]:
        """The edges between this machine and others: each of its ranks tells the others of its own (collective).

        ``into`` and ``out_of``: source, target, the other rank, and relation, int64 ``[k, 4]``. The result is by
        relation, see :class:`~pyg_dist.graph.sample.CrossingEdges`.
        """
        first, mine = self._rank - machine.group.rank, []
        for edges, is_leaving in ((into, False), (out_of, True)):
            source, target, other, relation = edges.unbind(1)
            own = torch.full_like(other, self._rank)
            ranks = (own, other) if is_leaving else (other, own)
            is_across = (other < first) | (other >= first + machine.group.size)
            mine.append(torch.stack([source, target, *ranks, relation], 1)[is_across])
        ((rows, _),) = machine.exchange(IdList(torch.cat(mine), is_ascending=False), kind="edges of a machine")
        return [rows[rows[:, 4] == number, :4] for number in range(num_relations)]


class _ByRank(NamedTuple):
    """Places of nodes, those of a rank together, and how many each rank has."""

    rows: Tensor
    counts: list[int]

    @staticmethod
    def joined(lists: list[_ByRank], like: Tensor) -> _ByRank:
        """All of several lists, those of a rank one list after another."""
        pieces = [torch.split(rows, counts) for rows, counts in lists]
        rows = torch.cat([like[:0], *(piece for of_rank in zip(*pieces, strict=True) for piece in of_rank)])
        return _ByRank(rows, [sum(counts) for counts in zip(*(counts for _, counts in lists), strict=True)])


def _ascending(values: Tensor) -> Tensor:
    """The order of values that are a few ascending runs, which NumPy's stable sort merges."""
    return torch.from_numpy(np.argsort(values.numpy(), kind="stable"))
