"""The nodes of a batch that a rank has: found hop by hop, and numbered among those of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.session.agreement import group_of_thread
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.loader.sampling import ascending

# A table of all codes is faster than searches where there are at most so many codes for a search.
_TABLE = 8


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
        part = IdLists(group_of_thread(graph.node_sharding.group.calls.ranks))
        everyone = part if count == 1 else IdLists(group_of_thread(None))
        return SamplingRanks(part, everyone, index, count, graph.needs_whole_subsets)

    @staticmethod
    def alone() -> SamplingRanks:
        """One process."""
        lists = IdLists(Group())
        return SamplingRanks(lists, lists)


class OwnNodes:
    """This rank's nodes of a batch. They stand by codes; each code belongs to one rank.

    Args:
        ranks: those that sample.
        span: an upper bound of the codes, exclusive.
        code, number: of this rank's seeds, int64 ``[s]``.

    Attributes:
        hops: codes by the hop that reached them; ascending but for those of the seeds.
        code: all of them, ascending, int64 ``[b]``.
        numbers: of these in the batch, int64 ``[b]``; once they are known (:meth:`number`).
        by_number: codes and numbers by ascending number, then.
    """

    def __init__(self, ranks: SamplingRanks, span: int, code: Tensor, number: Tensor) -> None:
        self.ranks, self.span, self.hops = ranks, span, [code]
        self._seed_number = number
        self.code = code.sort().values
        self.numbers = torch.empty(0, dtype=torch.int64)
        self.by_number = self.numbers, self.numbers
        self._asked = code[:0]  # of other ranks' nodes, rank and code in one number

    def __len__(self) -> int:
        return self.code.numel()

    def find(self, code: Tensor) -> Tensor:
        """The number of each, or -1."""
        if self.span <= _TABLE * code.numel():
            return torch.full((self.span,), -1).index_copy_(0, self.code, self.numbers)[code]
        at = ops.find_sorted(self.code, code)
        return self.numbers[at].masked_fill_(at < 0, -1) if len(self) else at

    def reach(self, code: Tensor, owner: Tensor) -> None:
        """Tell the owners of some nodes that a hop has reached them (collective)."""
        lists, rank, span = self.ranks.part, self.ranks.part.group.rank, self.span
        if lists.group.size == 1:
            found = ascending_unique(code, span)
        else:
            known = ascending_unique(owner * span + code, lists.group.size * span)
            is_own = known // span == rank
            found, others = known[is_own] - rank * span, known[~is_own]
            others = others[ops.find_sorted(self._asked, others) < 0]
            self._asked = torch.cat([self._asked, others]).sort().values
            counts = torch.bincount(others // span, minlength=lists.group.size).tolist()
            arrived, _ = lists.exchange((others % span).view(-1, 1), counts)
            found = ascending_unique(torch.cat([found, arrived.view(-1)]), span)
        new = found[ops.find_sorted(self.code, found) < 0]
        self.hops.append(new)
        self.code = ascending(torch.cat([self.code, new]), span)

    def number(self, num_seeds: list[int], num_edges: list[int], fails: bool) -> tuple[list[int], list[int], int]:
        """Number the nodes: by hop, data group and code (collective).

        The codes of a hop go in equal ranges to the ranks, which sort them and send back the places.

        Args:
            num_seeds: by data group.
            num_edges: of this rank by hop.
            fails: whether this rank has found an error.

        Returns:
            The batch's nodes and edges by hop, and how many ranks have found an error.
        """
        ranks, lists = self.ranks, self.ranks.part
        num_hops, size, span = len(self.hops) - 1, lists.group.size, self.span
        sent = torch.cat([self.code[:0], *(code + hop * span for hop, code in enumerate(self.hops[1:]))])
        to_rank = sent % span // -(-span // size) if size > 1 else torch.zeros_like(sent)
        order = to_rank.argsort(stable=True) if size > 1 else torch.arange(sent.numel())
        arrived, counts = lists.exchange(sent[order].view(-1, 1), torch.bincount(to_rank, minlength=size).tolist())
        ordered, place = arrived.view(-1), torch.arange(arrived.numel())
        if size > 1:
            ordered, place = ordered.sort()
        bounds = torch.searchsorted(ordered, torch.arange(num_hops + 1) * span)
        here = bounds.diff().tolist()
        table = ranks.everyone.gather([ranks.index, int(fails), *num_edges, *here])
        group, failures, edges, nodes = torch.split(table, [1, 1, num_hops, num_hops], dim=1)
        group = group.view(-1)
        totals = nodes.sum(0)
        before = nodes[group < ranks.index].sum(0) + nodes[group == ranks.index][: lists.group.rank].sum(0)
        first = sum(num_seeds) + torch.cat([totals.new_zeros(1), totals.cumsum(0)[:-1]])[:num_hops] + before
        number = torch.arange(ordered.numel()) + torch.repeat_interleave(first - bounds[:-1], bounds.diff())
        back = torch.empty_like(number)
        back[place] = number
        numbers, _ = lists.exchange(back.view(-1, 1), counts)
        mine = torch.empty_like(sent)
        mine[order] = numbers.view(-1)
        self.by_number = torch.cat(self.hops), torch.cat([self._seed_number, mine])
        place = ops.find_sorted(self.code, self.by_number[0])
        self.numbers = torch.empty_like(self.code).index_copy_(0, place, self.by_number[1])
        return [sum(num_seeds), *totals.tolist()], edges.sum(0).tolist(), int(failures.sum())


def ascending_unique(codes: Tensor, size: int) -> Tensor:
    """Those below ``size``, each once, int64."""
    ordered = ascending(codes, size)
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    torch.ne(ordered[1:], ordered[:-1], out=is_first[1:])
    return ordered[is_first]
