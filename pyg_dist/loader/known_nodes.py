"""The nodes of a batch that a rank knows, found hop by hop, and their numbers in the batch."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import Arrived, Call, IdList, IdLists
from pyg_dist.backend.session.agreement import group_of_thread
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.graph.sample import CrossingEdges, LeavingEdges
from pyg_dist.loader.columns import Columns


@dataclass(frozen=True, eq=False)
class SamplingRanks:
    """The ranks that sample together, with groups that the sampling thread has for itself."""

    part: IdLists  # the ranks of a data group
    everyone: IdLists  # the ranks of all data groups
    index: int = 0  # the number of this data group
    count: int = 1  # data groups
    gathers: bool = False  # whether each rank has to know the whole subset of its data group
    machine: IdLists | None = None  # the ranks of this machine, where they share rows that cross machines

    @staticmethod
    def of(graph: DistributedGraph) -> SamplingRanks:
        """The ranks of a graph; to be made alike on every rank (not collective)."""
        index, count = graph.data_group
        shared = SamplingRanks.sharing(graph.node_sharding.group, graph.ranks_per_machine)
        everyone = shared.part if count == 1 else IdLists(group_of_thread(None))
        return SamplingRanks(shared.part, everyone, index, count, graph.needs_whole_subsets, shared.machine)

    @staticmethod
    def sharing(group: Group, ranks_per_machine: int | None = None) -> SamplingRanks:
        """The ranks of a group, which has all nodes; to be made alike on every rank (not collective)."""
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
    """Edges to this rank's nodes, ``[m]`` each."""

    source: Tensor  # places of their sources among the known nodes, int32 or int64
    target: Tensor  # numbers of their targets in the batch, int64; they mostly ascend
    stored: Tensor  # places in the graph's edge storage, int64; those of one target together, in the graph's order

    def some(self, which: Tensor) -> Edges:
        """A selection of them."""
        return Edges(*(x.index_select(0, which) for x in self))


_SPARSE = 64
"""Clearing one entry of a table takes as long as clearing this many in a row."""


class KnownNodes:
    """This rank's nodes of a batch, and the sources of their edges.

    Nodes are found by their codes (:class:`~pyg_dist.loader.columns.Columns`). A node's *place* is its column; in a
    disjoint batch, its number in the order in which this rank learns of nodes.

    Args:
        ranks: the ranks that sample.
        columns: the nodes that this rank may meet.
        trees: an upper bound of the batch's trees.
        seeds: of the data group: codes between ranks, distinct, and numbers in the batch, int64 ``[s]``.
        code, number: this rank's codes of its seeds, those of a type together, and their numbers, int64.
        sizes: seeds of this rank by type.

    Attributes:
        hops: codes of this rank's nodes by hop and type, ascending, but for the seeds, which come first, as given.
        keys: their codes between ranks.
        numbers: their numbers in the batch, once they are numbered.
    """

    def __init__(
        self,
        ranks: SamplingRanks,
        columns: Columns,
        trees: int,
        seeds: tuple[Tensor, Tensor],
        code: Tensor,
        number: Tensor,
        sizes: Sequence[int],
    ) -> None:
        self._ranks, self._lists, self._rank = ranks, ranks.part, ranks.part.group.rank
        self.columns, self.trees, self._seeds = columns, trees, seeds
        self._find_numbers: Callable[[Tensor], Tensor] | None = None
        self.hops, self.numbers = [code.split(list(sizes))], [number.split(list(sizes))]
        self.keys = [columns.common(code, trees).split(list(sizes))]
        self._size = code.numel()  # known nodes
        self._number = number  # of the node at each place, or -1
        self._is_table = trees == 1  # whether numbers are in a table by column
        self._known = [code[:0] if self._is_table else code]  # codes of all known nodes; of others' nodes with a table
        if self._is_table:
            self._number = columns.take_table()
            self._number[code] = number.int()

    def reach(self, code: Tensor) -> Generator[Call, Arrived, Tensor]:
        """Add a hop that reaches the nodes ``code``, int64 or int32 ``[m]``; returns their places (collective).

        Owners are told of nodes that this rank did not know.
        """
        types = self.columns.types
        new, place = self._add(code)
        if self._lists.group.size > 1:
            num_own, *of_others = self.columns.by_rank(new, self.trees)
            asked = self.columns.abroad(new[num_own:], self.trees).view(-1, 1)
            counts = [*of_others[: self._rank], 0, *of_others[self._rank :]]
            ((arrived, _),) = yield Call(self._lists, [IdList(asked, counts)], f"hop {len(self.hops)}")
            own, others, found = new[:num_own], new[num_own:], arrived.view(-1)
            if self._is_table:
                new = ops.add_places(self._number, found, self._size, own)
                self._known.append(others)
            else:
                both = torch.cat([own, self._add(found)[0]])
                new = torch.from_numpy(np.sort(both.numpy(), kind="stable"))  # merges two sorted runs
        bounds = torch.searchsorted(new, types[1:] * self.trees)
        self.hops.append(new.tensor_split(bounds))
        self.keys.append(self.columns.common(new, self.trees).tensor_split(bounds))
        return place

    def _add(self, code: Tensor) -> tuple[Tensor, Tensor]:
        """Add codes; returns those that were not known, ascending, and the places of all."""
        if self._is_table:
            new, place = ops.add_places(self._number, code, self._size), code
        else:
            first, place = ops.distinct(torch.cat(self._known), code)
            new = code.index_select(0, first)
            self._known.append(new)
        self._size += new.numel()
        return new, place

    def give_table_back(self) -> None:
        """Free the table; no nodes are found afterwards."""
        if self._is_table:
            table, is_sparse = self._number, _SPARSE * self._size < self._number.numel()
            known = torch.cat([*self._own, *self._known]) if is_sparse else None
            self.columns.give_table(table.fill_(-1) if known is None else table.index_fill_(0, known, -1))

    def assign_numbers(
        self, num_seeds: list[int], num_edges: list[int]
    ) -> Generator[Call, Arrived, tuple[list[list[int]], list[int]]]:
        """Number the nodes that this rank knows, of each type: by hop, data group and code (collective).

        For that every rank of a data group learns the codes of all its nodes: O(B) time. ``num_seeds``: of all data
        groups, by type; ``num_edges``: some counts of this rank. Returns the batch's nodes by type and hop, and the
        sums of the counts over all ranks.
        """
        if self._is_alone:
            counts = [hop.numel() for (hop,) in self.hops]
            number = host.arange(self._size)
            self.numbers = [(of_hop,) for of_hop in number.split(counts)]
            self._number = self._number if self._is_table else number
            return [counts], num_edges
        num_hops, num_types = len(self.hops) - 1, self.columns.types.numel()
        sizes = [of_type.numel() for hop in self.hops for of_type in hop]
        keys = [of_type for hop in self.keys for of_type in hop]
        own, told = torch.cat(keys), host.tensor([[0, *num_edges, *sizes[num_types:]]])
        reached = own[sum(sizes[:num_types]) :].view(-1, 1)
        (told, _), (reached, _) = yield Call(self._lists, [IdList(told), IdList(reached)], "codes")
        _, edges, nodes = told.split([1, len(num_edges), num_hops * num_types], dim=1)
        edges_of_groups, nodes_of_groups = self._of_groups(edges.sum(0), nodes.sum(0))
        of_hops = nodes_of_groups.view(self._ranks.count, num_hops, num_types)
        totals = torch.cat([host.tensor([num_seeds]), of_hops.sum(0)])
        first = totals.cumsum(0)[:-1] + of_hops[: self._ranks.index].sum(0)
        self._find_numbers = partial(ops.find_numbers, reached.view(-1), nodes.flatten(), first.flatten(), *self._seeds)
        known = torch.cat(self._known)
        number = self._find_numbers(torch.cat([self.columns.common(known, self.trees), own]))
        number_of_known, number_of_own = number.split([known.numel(), own.numel()])
        if self._is_table:
            self._number.scatter_(0, torch.cat([known, *self._own]), number.int())
        else:
            self._number = number_of_known
        of_types = number_of_own.split(sizes)
        self.numbers = [of_types[n : n + num_types] for n in range(0, len(of_types), num_types)]
        return totals.t().tolist(), edges_of_groups.sum(0).tolist()

    @property
    def _own(self) -> list[Tensor]:
        """Codes of this rank's nodes."""
        return [of_type for hop in self.hops for of_type in hop]

    @property
    def _is_alone(self) -> bool:
        """Whether one rank has all nodes, of one type, and so learns of them in the order of their numbers."""
        return self._lists.group.size == self._ranks.count == self.columns.types.numel() == 1

    def around(self, code: Tensor) -> Tensor:
        """The places of some nodes, once the batch is numbered; nodes outside of the batch get the number -1."""
        new, place = self._add(code)
        number = torch.full_like(new, -1)
        if self._find_numbers is not None:
            number = self._find_numbers(self.columns.common(new, self.trees))
        if self._is_table:
            self._number.scatter_(0, new, number.int())
            self._known.append(new)
        else:
            self._number = torch.cat([self._number, number])
        return place

    def numbers_at(self, place: Tensor) -> Tensor:
        """The numbers of the nodes at some places, or -1, int64."""
        return self._number.index_select(0, place).long()

    def _of_groups(self, edges: Tensor, nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Counts of edges and nodes of each data group, given those of this one (collective)."""
        ranks = self._ranks
        if ranks.count == 1:
            return edges.view(1, -1), nodes.view(1, -1)
        table = ranks.everyone.gather([ranks.index, *edges.tolist(), *nodes.tolist()])
        group, *_ = table.unbind(1)
        one_of_each = torch.stack([(group == index).nonzero()[0, 0] for index in range(ranks.count)])
        found = torch.split(table.index_select(0, one_of_each), [1, edges.numel(), nodes.numel()], dim=1)
        return found[1], found[2]

    def crossing(self, edges: Sequence[Edges]) -> list[CrossingEdges | None]:
        """For each relation, which of this rank's edges begin on which rank; ``None``: there is one rank.

        To be called once the nodes are numbered; collective where ranks share machines.
        """
        size, rank, machine = self._lists.group.size, self._rank, self._ranks.machine
        if size == 1:
            return [None] * len(edges)
        found, ends = list[CrossingEdges](), self.columns.ends
        for number, of_relation in enumerate(edges):
            column = of_relation.source
            if not self._is_table:
                column = torch.div(torch.cat(self._known).index_select(0, column), self.trees, rounding_mode="floor")
            is_inside = column < self.columns.num_own
            inside, arriving = host.flatnonzero(is_inside), host.flatnonzero(~is_inside)
            counts = host.tensor([arriving.numel()])
            if size > 2:
                begin = torch.bucketize(column.index_select(0, arriving), ends.to(column.dtype), right=True).int()
                bound, _, order = ops.csr_from_edges(begin, begin, None, size, size)
                arriving = arriving if order is None else arriving.index_select(0, order)
                counts = bound.diff()[1:]
            counts = torch.cat([counts[:rank], host.tensor([0]), counts[rank:]])
            sender = torch.repeat_interleave(counts, output_size=arriving.numel())
            send = partial(self._lists.exchange, kind=f"crossing {number}")
            found.append(CrossingEdges(inside, arriving, sender, send))
        if machine is None:
            return [*found]
        leaving = [self.leaving(*each) for each in zip(edges, found, strict=True)]
        return self._shared_with_machine(machine, edges, found, leaving)

    def leaving(self, edges: Edges, crossing: CrossingEdges) -> LeavingEdges:
        """The edges from this rank's nodes to other ranks', which the targets' owners send (collective)."""
        ends = self.numbers_at(edges.source), edges.target
        rows = torch.stack([end.index_select(0, crossing.arriving) for end in ends], 1)
        counts = torch.bincount(crossing.sender, minlength=self._lists.group.size).tolist()
        ((rows, of_rank),) = self._lists.exchange(IdList(rows, counts, is_ascending=False), kind="leaving")
        receiver = torch.repeat_interleave(host.tensor(of_rank), output_size=len(rows))
        source, target = rows.t().contiguous()
        return LeavingEdges(source, target, receiver)

    def _shared_with_machine(
        self,
        machine: IdLists,
        edges: Sequence[Edges],
        crossing: Sequence[CrossingEdges],
        leaving: Sequence[LeavingEdges],
    ) -> list[CrossingEdges | None]:
        """The same, with all edges between this machine and others, which its ranks send each other (collective)."""
        first, lists = self._rank - machine.group.rank, []
        for (source, target, _), found, (begins, finishes, receiver) in zip(edges, crossing, leaving, strict=True):
            source, target = (end.index_select(0, found.arriving) for end in (source, target))
            ends = self.numbers_at(source), target
            into = torch.stack([*ends, found.sender, torch.full_like(found.sender, self._rank)], 1)
            out_of = torch.stack([begins, finishes, torch.full_like(receiver, self._rank), receiver], 1)
            across = [(x < first) | (x >= first + machine.group.size) for x in (found.sender, receiver)]
            lists.append(IdList(torch.cat([into[across[0]], out_of[across[1]]]), is_ascending=False))
        shared = machine.exchange(*lists, kind=f"edges of a machine, {len(lists)}")
        return [
            replace(found, leaving=out_of, between_machines=rows)
            for found, out_of, (rows, _) in zip(crossing, leaving, shared, strict=True)
        ]
