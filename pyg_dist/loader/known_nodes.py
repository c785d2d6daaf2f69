"""The nodes of a batch that a rank knows: found hop by hop, and numbered among those of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.session.agreement import group_of_thread
from pyg_dist.graph.protocol import DistributedGraph


@dataclass(frozen=True, eq=False)
class SamplingRanks:
    """The ranks that sample together, over messages that a thread of its own may send.

    Attributes:
        part: those of a data group, which have its nodes.
        everyone: those of all data groups.
        index: the number of this data group.
        count: data groups.
        gathers: whether each rank has to know the whole subset of its data group.
    """

    part: IdLists
    everyone: IdLists
    index: int = 0
    count: int = 1
    gathers: bool = False

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
        span: an upper bound of the codes, exclusive.
        code, number: of this rank's seeds, int64 ``[s]``.
        first: the first code of each type of nodes, which have numbers of their own.

    Attributes:
        code: in the order in which the rank learns of them, int64 ``[k]``. Their places here stand for them.
        owner: the rank that has each, int64 ``[k]``.
        hops: places of this rank's nodes of the batch by the hop that reached them, by ascending code; first its seeds.
        number: of each node in the batch, or -1, int64 ``[k]``; once they are numbered.
    """

    def __init__(
        self, ranks: SamplingRanks, span: int, code: Tensor, number: Tensor, first: Sequence[int] = (0,)
    ) -> None:
        self._ranks, self._span, self._seed_number, self._first = ranks, span, number, first
        self._lists, self._rank = ranks.part, ranks.part.group.rank
        self.code, self.owner = code, torch.full_like(code, self._rank)
        self.hops, self.number = [torch.arange(code.numel())], number
        self._asked: list[Tensor] = []  # places of other ranks' nodes, as they were told of them
        self._told: list[tuple[Tensor, Tensor]] = []  # places of nodes of which another rank told, and that rank

    def reach(self, code: Tensor, owner_of: Callable[[Tensor], Tensor]) -> Tensor:
        """The places of nodes that a hop reaches: :meth:`meet` (collective)."""
        place, new = self.meet(code, owner_of)
        self.hops.append(new[self.code.index_select(0, new).argsort()])
        return place

    def meet(self, code: Tensor, owner_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Tell the owners of the nodes that were not known of them (collective).

        Args:
            code: int64 ``[m]``.
            owner_of: the ranks of some of them, given where these stand in ``code``.

        Returns:
            The place of each, and the places of this rank's own nodes that it did not know, those that others told of
            included.
        """
        size, rank, before = self._lists.group.size, self._rank, self.code.numel()
        first, place = ops.distinct(self.code, code)
        self._add(code.index_select(0, first), owner_of(first))
        new = torch.arange(before, self.code.numel())
        if size == 1:
            return place, new
        owner = self.owner[before:]
        own, other = new[owner == rank], new[owner != rank]
        other = other[(self.owner[other] * self._span + self.code[other]).argsort()]
        counts = torch.bincount(self.owner[other], minlength=size).tolist()
        arrived, from_rank = self._lists.exchange(self.code[other].view(-1, 1), counts)
        first, told = ops.distinct(self.code, arrived.view(-1))
        before = self.code.numel()
        self._add(arrived.view(-1)[first], torch.full_like(first, rank))
        self._asked.append(other)
        self._told.append((told, torch.repeat_interleave(torch.arange(size), torch.tensor(from_rank))))
        return place, torch.cat([own, torch.arange(before, self.code.numel())])

    def _add(self, code: Tensor, owner: Tensor) -> None:
        self.code, self.owner = torch.cat([self.code, code]), torch.cat([self.owner, owner])

    def assign_numbers(self, num_seeds: list[int], num_edges: list[int]) -> tuple[list[list[int]], list[int]]:
        """Number the nodes of each type: by hop, data group and code; ranks learn those that they know (collective).

        The codes of a hop go in equal ranges to the ranks, which sort them and send back the places.

        Args:
            num_seeds: of all data groups, by type.
            num_edges: of this rank, by hop or whatever else.

        Returns:
            The batch's nodes by type and hop, and its edges.
        """
        ranks, lists = self._ranks, self._lists
        num_hops, num_types, size, span = len(self.hops) - 1, len(self._first), lists.group.size, self._span
        hops = (self.code.index_select(0, new) + hop * span for hop, new in enumerate(self.hops[1:]))
        ordered = sent = torch.cat([self.code[:0], *hops])
        if size > 1:
            to_rank = sent % span // -(-span // size)
            order = to_rank.argsort(stable=True)
            arrived, counts = lists.exchange(sent[order].view(-1, 1), torch.bincount(to_rank, minlength=size).tolist())
            ordered, place = arrived.view(-1).sort()
        begins = (torch.arange(num_hops).view(-1, 1) * span + torch.tensor(self._first)).view(-1)
        bounds = torch.cat([torch.searchsorted(ordered, begins), torch.tensor([ordered.numel()])])
        table = ranks.everyone.gather([ranks.index, *num_edges, *bounds.diff().tolist()])
        group, edges, nodes = torch.split(table, [1, len(num_edges), num_hops * num_types], dim=1)
        group = group.view(-1)
        before = nodes[group < ranks.index].sum(0) + nodes[group == ranks.index][: lists.group.rank].sum(0)
        totals = torch.cat([torch.tensor([num_seeds]), nodes.sum(0).view(num_hops, num_types)])
        first = totals.cumsum(0)[:-1].view(-1) + before
        number = torch.arange(ordered.numel()) + torch.repeat_interleave(first - bounds[:-1], bounds.diff())
        if size > 1:
            back = torch.empty_like(number).index_copy_(0, place, number)
            numbers, _ = lists.exchange(back.view(-1, 1), counts, num_types == 1)
            number = torch.empty_like(sent).index_copy_(0, order, numbers.view(-1))
        self.number = torch.full_like(self.code, -1)
        self.number.index_copy_(0, torch.cat(self.hops), torch.cat([self._seed_number, number]))
        if size > 1:
            self._answer()
        return totals.t().tolist(), edges.sum(0).tolist()

    def _answer(self) -> None:
        """Send the ranks that told of nodes the numbers of these (collective)."""
        size, asked = self._lists.group.size, torch.cat(self._asked)
        asked = asked[self.owner[asked].argsort(stable=True)]
        told, asker = (torch.cat(pieces) for pieces in zip(*self._told, strict=True))
        told = told[asker.argsort(stable=True)]
        counts = torch.bincount(asker, minlength=size).tolist()
        answers, _ = self._lists.exchange(self.number[told].view(-1, 1) + 1, counts, is_ascending=False)
        self.number[asked] = answers.view(-1) - 1
