"""The edges between a rank's machine and others: what the ways between machines are found from in a mini-batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.halo.plan.cover import Candidates, ExchangeKind, RemoteEdges
from pyg_dist.halo.plan.share import HaloShare
from pyg_dist.halo.plan.two_level import Routes, num_machines


@dataclass(frozen=True, eq=False)
class MachineLinks:
    """The edges between a rank's machine and others, as :class:`RemoteLinks` with machines in the place of ranks."""

    edges: RemoteEdges  # their rows and sums; ascending by sum
    rowptr: Tensor  # where each sum's edges begin, int64 ``[len(sums) + 1]``
    row_owner: Tensor  # the ranks of the rows' nodes, int64
    sum_owner: Tensor  # of the sums' nodes
    ranks_per_machine: int  # consecutive ranks share a machine
    num_ranks: int  # P

    @staticmethod
    def of(
        edge: Tensor, ends: tuple[Tensor, Tensor], ranks: tuple[Tensor, Tensor], share: HaloShare, load: Tensor
    ) -> MachineLinks:
        """Of edges that all begin or end on the machine of ``share``. Not collective; O(m log m) time.

        Args:
            edge: global ids, int64 ``[m]``.
            ends: source and target.
            ranks: sender and receiver.
            share: of one of the machine's ranks.
            load: in-edges of the nodes of each rank, ``[P]``.
        """
        assert share.ranks_per_machine is not None
        order = torch.argsort(edge)
        source, target, sender, receiver = (column[order] for column in (*ends, *ranks))
        found = machine_edges(
            source, target, sender, receiver, share.num_nodes, share.ranks_per_machine, load, share.rank
        )
        row_owner, sum_owner = (torch.empty(len(kind), dtype=torch.int64) for kind in (found.rows, found.sums))
        row_owner[found.row.long()], sum_owner[found.sum.long()] = sender[found.edge], receiver[found.edge]
        return MachineLinks(
            found, torch.searchsorted(found.sum, torch.arange(len(found.sums) + 1, dtype=torch.int32)),
            row_owner, sum_owner, share.ranks_per_machine, share.num_ranks,
        )  # fmt: skip

    def ways(self, node_id: Tensor, exchange: ExchangeKind) -> Routes:
        """Of what crosses between nodes of an ascending list."""
        _, of_row, of_sum, row, sums_of, _ = edges_between(
            self.edges.rows, self.edges.sums, self.rowptr, self.edges.row, node_id
        )
        rows, sums = some_of(self.edges.rows, of_row), some_of(self.edges.sums, of_sum)
        edges = RemoteEdges(self.edges.num_ranks, row, row, sums_of, rows, sums, self.edges.load)
        owners = self.row_owner[of_row], self.sum_owner[of_sum]
        return Routes.of(edges, exchange, *owners, self.ranks_per_machine, self.num_ranks)


def machine_edges(
    source: Tensor, target: Tensor, sender: Tensor, receiver: Tensor, num_nodes: int, ranks_per_machine: int,
    load: Tensor, rank: int,
) -> RemoteEdges:  # fmt: skip
    """Edges in input order between the machine of ``rank`` and others, known with the ranks of their ends."""
    by_machine = torch.zeros(num_machines(load.numel(), ranks_per_machine), dtype=load.dtype)
    by_machine.index_add_(0, torch.arange(load.numel()) // ranks_per_machine, load)
    sender, receiver = (end // ranks_per_machine for end in (sender, receiver))
    return RemoteEdges.of_list(
        torch.arange(source.numel()), source, target, sender, receiver, num_nodes, by_machine, rank // ranks_per_machine
    )


def edges_between(
    rows: Candidates, sums: Candidates, rowptr: Tensor, row: Tensor, node_id: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The edges with both ends in an ascending list.

    Where the nodes of all rows stand in it, which rows and sums some edge needs, which of these each edge has, and
    which edges these are.
    """
    at_row = ops.find_sorted(node_id, rows.node)
    of_row = (at_row >= 0).nonzero().view(-1)
    of_sum = (ops.find_sorted(node_id, sums.node) >= 0).nonzero().view(-1)
    rowptr, row, entry, *_ = ops.restrict_csr(rowptr, row, of_sum, of_row, len(rows))
    sums_of, of_sum = _used(torch.repeat_interleave(torch.arange(of_sum.numel()), rowptr.diff()), of_sum)
    row, of_row = _used(row.long(), of_row)
    return at_row, of_row, of_sum, row, sums_of, entry


def _used(number: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates that some edge needs, and their numbers among these."""
    used = torch.zeros(candidates.numel(), dtype=torch.bool)
    used[number] = True
    place = torch.cumsum(used, 0, dtype=torch.int32) - 1
    return place[number], candidates[used]


def some_of(candidates: Candidates, chosen: Tensor) -> Candidates:
    """The chosen ones."""
    return Candidates(candidates.sender[chosen], candidates.receiver[chosen], candidates.node[chosen])
