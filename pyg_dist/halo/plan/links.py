"""Remote edges of a rank, or of a machine, with both ends: those of any sample are found among them.

Both ranks of a pair have the same edges in the same order, with both of their ends, so both find the same edges of a
sample, the same minimum cover of them, and the same slots.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.on_device import on_device
from pyg_dist.halo.plan.cover import Candidates, Ends, ExchangeKind, OneWay, RemoteEdges
from pyg_dist.halo.plan.share import HaloShare, LocalRows
from pyg_dist.halo.plan.two_level import MachineEdges, Routes


@dataclass(frozen=True, eq=False)
class MachineLinks:
    """The edges between a rank's machine and others, as :class:`RemoteLinks` with machines in the place of ranks."""

    whole: MachineEdges  # ascending by sum
    rowptr: Tensor  # where each sum's edges begin, int64 ``[len(sums) + 1]``

    @staticmethod
    def of(
        edge: Tensor, ends: tuple[Tensor, Tensor], ranks: tuple[Tensor, Tensor], share: HaloShare, load: Tensor
    ) -> MachineLinks:
        """The links of this rank's machine, from edges that all begin or end on it. Not collective; O(m log m) time.

        ``ends`` are sources and targets, ``ranks`` senders and receivers, ``load`` in-edges of the nodes of each rank,
        ``[P]``.
        """
        assert share.ranks_per_machine is not None
        order = torch.argsort(edge)
        source, target, sender, receiver = (column[order] for column in (*ends, *ranks))
        on_each, rank = share.ranks_per_machine, share.rank
        whole = MachineEdges.of_list(source, target, sender, receiver, share.num_nodes, load, on_each, rank)
        sums = host.arange(len(whole.edges.sums) + 1, dtype=torch.int32)
        return MachineLinks(whole, torch.searchsorted(whole.edges.sum, sums))

    def routes(self, node_id: Tensor, device: torch.device, exchange: ExchangeKind) -> Routes:
        """The ways of what crosses between nodes of an ascending list."""
        whole, given = self.whole, self.whole.edges
        pattern = self.rowptr, given.row
        _, of_row, of_sum, row, sums_of, _ = edges_between(given.rows.node, given.sums.node, *pattern, node_id, device)
        rows, sums = some_of(given.rows, of_row), some_of(given.sums, of_sum)
        edges = RemoteEdges(given.num_ranks, row, row, sums_of, rows, sums, given.load)
        row_owner, sum_owner = whole.row_owner[of_row], whole.sum_owner[of_sum]
        return replace(whole, edges=edges, row_owner=row_owner, sum_owner=sum_owner).routes(exchange)


def edges_between(
    of_rows: Tensor, of_sums: Tensor, rowptr: Tensor, row: Tensor, node_id: Tensor, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The edges with both ends in a list of nodes, found on ``device``, which is waited for; results lie on the host.

    The edges are a pattern, sums by rows; ``of_rows`` and ``of_sums`` are the nodes of its columns and rows, and
    ``node_id`` is the ascending list.

    Returns:
        The places in the list of the needed rows' nodes; the rows and the sums that are needed; the row and the sum of
        each edge found, as numbers among those; and which edges these are.
    """
    rowptr, row, node_id, of_rows, of_sums = (
        on_device(known, device) for known in (rowptr, row, node_id, of_rows, of_sums)
    )
    at_row = ops.find_sorted(node_id, of_rows)
    of_row = (at_row >= 0).nonzero().view(-1)
    of_sum = (ops.find_sorted(node_id, of_sums) >= 0).nonzero().view(-1)
    rowptr, row, entry, *_ = ops.restrict_csr(rowptr, row, of_sum, of_row, len(of_rows))
    sums_of, of_sum = _used(torch.repeat_interleave(torch.arange(of_sum.numel(), device=device), rowptr.diff()), of_sum)
    row, of_row = _used(row.long(), of_row)
    found = at_row.index_select(0, of_row), of_row, of_sum, row, sums_of, entry
    return tuple(x.cpu() for x in found)  # type: ignore[return-value]


def _used(number: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """Number the candidates that some edge needs: the new number of each edge's candidate, and these candidates."""
    used = torch.zeros(candidates.numel(), dtype=torch.bool, device=number.device)
    used[number] = True
    place = torch.cumsum(used, 0, dtype=torch.int32) - 1
    return place[number], candidates[used]


def some_of(candidates: Candidates, chosen: Tensor) -> Candidates:
    """The candidates at the ``chosen`` places."""
    return Candidates(candidates.sender[chosen], candidates.receiver[chosen], candidates.node[chosen])


@dataclass(frozen=True, eq=False)
class RemoteLinks:
    """The edges between a rank and others, and the rows of its nodes.

    The edges are a pattern, sums by rows, in the order that both ranks of a pair have
    (:class:`~pyg_dist.halo.plan.cover.OneWay`): those that end here, then those that begin here.
    """

    rows: Ends  # that could be sent; numbers by peer for each way, ``[2 P]``
    sums: Ends  # likewise
    rowptr: Tensor  # int64 ``[len(sums) + 1]``
    row: Tensor  # int32 ``[m]``
    # ``[m]`` integers: of an edge that ends here, its place in the rank's edge storage; of one that begins here, in the
    # list of edges that begin here
    place: Tensor
    load: Tensor  # in-edges of the nodes of each rank, ``[P]``
    nodes: LocalRows  # the rank's nodes

    @staticmethod
    def of(share: HaloShare, incoming: Tensor, outgoing: Tensor, sender: Tensor, receiver: Tensor, load: Tensor) -> (
        RemoteLinks
    ):  # fmt: skip
        """The links of a rank, from its remote edges. Not collective; O(m log m) time.

        ``incoming`` has global id, source, target and place in edge storage of each edge that ends here, ``outgoing``
        global id, source and target of each that begins here, int64; ``sender`` and ``receiver`` are the ranks at their
        other ends.
        """
        own = torch.full_like
        edge = torch.cat([incoming[:, 0], outgoing[:, 0]])
        order = torch.argsort(edge)
        arriving, leaving = OneWay.both(
            torch.cat([incoming[:, 3], host.arange(outgoing.shape[0])])[order],
            torch.cat([incoming[:, 1], outgoing[:, 1]])[order],
            torch.cat([incoming[:, 2], outgoing[:, 2]])[order],
            torch.cat([sender, own(receiver, share.rank)])[order],
            torch.cat([own(sender, share.rank), receiver])[order],
            share.num_nodes,
            share.num_ranks,
            share.rank,
        )
        assert arriving.edge is not None
        assert leaving.edge is not None
        rows, sums = (
            Ends(torch.cat([first.node, last.node]), first.counts + last.counts)
            for first, last in ((arriving.rows, leaving.rows), (arriving.sums, leaving.sums))
        )
        row = torch.cat([arriving.row, leaving.row + len(arriving.rows)])
        sums_of = torch.cat([arriving.sum, leaving.sum + len(arriving.sums)])
        rowptr = torch.searchsorted(sums_of, host.arange(len(sums) + 1, dtype=torch.int32))
        place = host.in_few_bits(torch.cat([arriving.edge, leaving.edge]))
        return RemoteLinks(rows, sums, rowptr, row, place, load, LocalRows.of(share.node_id))

    def between(self, node_id: Tensor, device: torch.device, rank: int) -> tuple[tuple[OneWay, OneWay], Tensor]:
        """The edges with both ends in an ascending list, and where the nodes of rows that arrive stand in it."""
        nodes = self.rows.node, self.sums.node
        at_row, of_row, of_sum, row, sums_of, entry = edges_between(*nodes, self.rowptr, self.row, node_id, device)
        row_counts, sum_counts = self.rows.counts_of(of_row), self.sums.counts_of(of_sum)
        num_ranks, edge = self.load.numel(), self.place[entry].long()
        num_rows, num_sums = sum(row_counts[:num_ranks]), sum(sum_counts[:num_ranks])  # that arrive
        num_edges = int(torch.searchsorted(sums_of, host.tensor(num_sums, dtype=torch.int32)))

        def one_way(leaves: bool) -> OneWay:
            edges, rows, sums = (slice(n, None) if leaves else slice(n) for n in (num_edges, num_rows, num_sums))
            of_way = slice(num_ranks, None) if leaves else slice(num_ranks)
            return OneWay(
                rank, leaves, edge[edges], row[edges] - num_rows * leaves, sums_of[edges] - num_sums * leaves,
                Ends(self.rows.node[of_row[rows]], tuple(row_counts[of_way])),
                Ends(self.sums.node[of_sum[sums]], tuple(sum_counts[of_way])),
            )  # fmt: skip

        return (one_way(leaves=False), one_way(leaves=True)), at_row[:num_rows]
