"""Every rank's nodes, edges, work and traffic, by counting alone; their table; ranks that share a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.halo.plan.cover import EXCHANGES, Candidates, Cover, ExchangeKind, RemoteEdges
from pyg_dist.halo.plan.share import HaloShare
from pyg_dist.halo.plan.two_level import MachineEdges
from pyg_dist.pricing.base import aligned, imbalance

_PASSES = 8
"""Over all parts, at most: with many parts the last ones gain next to nothing, and each takes O(P^2) time."""


@dataclass(frozen=True)
class ShareSizes:
    """One rank's numbers."""

    nodes: int  # nodes owned
    inner: int  # of these, nodes without remote sources
    edges: int  # in-edges of these nodes
    halo_edges: int  # of these, edges with a remote source
    work: int  # rows that are read and added in one aggregation (entries of all matrices of the product)
    rows_sent: int  # rows sent in one aggregation by the chosen exchange
    rows_received: int  # rows received in one aggregation by the chosen exchange
    messages: int  # messages sent in one aggregation
    link_messages: int  # of these, those of two levels that cross machines; in one level 0
    post: int  # rows sent in one aggregation, were the exchange post
    pre: int  # the same for pre
    hybrid: int  # the same for hybrid

    @staticmethod
    def of(share: HaloShare) -> ShareSizes:
        """Read them off a share."""
        sums = share.sum_transfer
        return ShareSizes(
            nodes=share.node_id.numel(),
            inner=share.num_inner,
            edges=share.edge_id.numel(),
            halo_edges=share.row_transfer.incoming.num_entries,
            work=share.local.num_entries + sums.outgoing.num_entries + sums.incoming.num_entries + sums.num_passed,
            rows_sent=sum(map(sum, sums.sent)),
            rows_received=sum(map(sum, sums.received)),
            messages=sum(count > 0 for counts in sums.sent for count in counts),
            link_messages=sum(count > 0 for counts in sums.sent[1:3] for count in counts),
            **share.rows_sent,
        )


_MOST_LINES = 32
"""With more ranks, a table has half as many: those with most to do."""

_COLUMNS = ("nodes", "inner", "edges", "halo_edges", "work", "rows_sent", "rows_received", "messages")


def size_table(sizes: Sequence[ShareSizes]) -> list[str]:
    """A line for each rank, or for those with most to do; the sums; and the largest over the mean."""
    by_column = {name: [getattr(s, name) for s in sizes] for name in _COLUMNS}
    shown, header = list(range(len(sizes))), ["rank", *(name.replace("_", " ") for name in _COLUMNS)]
    if len(sizes) > _MOST_LINES:
        loads = [by_column[name] for name in ("work", "rows_sent", "rows_received")]
        shown.sort(key=lambda rank: max(load[rank] / max(sum(load), 1) for load in loads), reverse=True)
        del shown[_MOST_LINES // 2 :]
    lines = [[str(rank), *(f"{values[rank]:,}" for values in by_column.values())] for rank in shown]
    if len(shown) < len(sizes):
        lines.append([f"+{len(sizes) - len(shown)}", *("..." for _ in _COLUMNS)])
        header[0] = "worst"
    lines.append(["all", *(f"{sum(values):,}" for values in by_column.values())])
    lines.append(["max/mean", *(f"{imbalance(values):.2f}" for values in by_column.values())])
    return aligned([header, *lines])


@dataclass(frozen=True)
class BlockNumbers:
    """Numbers of each block, sender by receiver, int64 ``[P, P]``; zero on the diagonal but for ``edges``."""

    edges: Tensor  # edges from one rank to another
    rows: Tensor  # their distinct sources
    sums: Tensor  # their distinct targets
    post_edges: Tensor  # edges that ``hybrid`` carries by rows
    post_rows: Tensor  # rows that it sends
    pre_sums: Tensor  # sums that it sends
    nodes: Tensor  # nodes of each rank, ``[P]``
    boundary: Tensor  # of these, nodes with a source on another rank, ``[P]``

    @staticmethod
    def of(remote: RemoteEdges, owner: Tensor) -> BlockNumbers:
        """The numbers of a graph whose targets have these owners, ``[N]`` integers. Not collective, O(E log E) time."""
        num_ranks, hybrid = remote.num_ranks, remote.cover("hybrid")
        rows, sums = (_pairs(kind, num_ranks) for kind in (remote.rows, remote.sums))

        def count(pairs: Tensor) -> Tensor:
            return torch.bincount(pairs, minlength=num_ranks**2).view(num_ranks, num_ranks)

        crossing = count(rows[remote.row])
        has_remote = host.zeros(owner.numel(), dtype=torch.bool)
        has_remote[remote.sums.node] = True
        return BlockNumbers(
            edges=crossing + (remote.load - crossing.sum(0)).diag(),
            rows=count(rows),
            sums=count(sums),
            post_edges=count(rows[remote.row[hybrid.left[remote.row]]]),
            post_rows=count(rows[hybrid.left]),
            pre_sums=count(sums[hybrid.right]),
            nodes=torch.bincount(owner, minlength=num_ranks),
            boundary=torch.bincount(owner[has_remote], minlength=num_ranks),
        )

    def sent(self, exchange: ExchangeKind) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, sums, and edges carried by rows, ``[P, P]`` each."""
        crossing = self.edges - self.edges.diag().diag()
        none = crossing * 0
        return {
            "post": (self.rows, none, crossing),
            "pre": (none, self.sums, none),
            "hybrid": (self.post_rows, self.pre_sums, self.post_edges),
        }[exchange]

    def sizes(
        self, exchange: ExchangeKind, machines: MachineEdges | None = None
    ) -> tuple[tuple[ShareSizes, ...], Tensor]:
        """Every rank's sizes, and the rows that go from each rank to each, int64 ``[P, P]``. O(P^2) time.

        ``machines``: the edges between machines, in two levels; None: ranks send to one another wherever they are.
        """
        rows, sums, by_row = self.sent(exchange)
        crossing = self.edges - self.edges.diag().diag()
        load, halo_edges, num_ranks = self.edges.sum(0), crossing.sum(0), len(crossing)
        if machines is None:
            hops, passed, covered = [], load * 0, crossing
        else:
            machine, between = machine_of_rank(num_ranks, machines.ranks_per_machine), machines.routes(exchange)
            rows, sums, by_row, covered = (x * (machine[:, None] == machine) for x in (rows, sums, by_row, crossing))
            hops = [hop.rows(num_ranks) for hop in between.kinds]
            passed = machines.multiplied(exchange) + torch.bincount(between.owner, minlength=num_ranks) + hops[2].sum(0)
        levels = [rows + sums, *hops]
        messages = [(level > 0).sum(1) for level in levels]
        chosen = sum(levels, start=crossing * 0)
        multiplied = by_row.sum(0) + (covered - by_row).sum(1) + passed
        columns: dict[str, Tensor] = {
            "nodes": self.nodes,
            "inner": self.nodes - self.boundary,
            "edges": load,
            "halo_edges": halo_edges,
            "work": load - halo_edges + multiplied + rows.sum(1) + sums.sum(0),
            "rows_sent": chosen.sum(1),
            "rows_received": chosen.sum(0),
            "messages": sum(messages, start=load * 0),
            "link_messages": sum(messages[1:3], start=load * 0),
            **{kind: sum(self.sent(kind)[:2], start=crossing * 0).sum(1) for kind in EXCHANGES},
        }
        by_rank = zip(*(column.tolist() for column in columns.values()), strict=True)
        return tuple(ShareSizes(**dict(zip(columns, values, strict=True))) for values in by_rank), chosen


def rows_between(remote: RemoteEdges, cover: Cover) -> Tensor:
    """Rows and sums that a cover sends, int64 ``[P, P]``, sender by receiver."""
    num_ranks = remote.num_ranks
    rows, sums = (_pairs(kind, num_ranks) for kind in (remote.rows, remote.sums))
    sent = torch.cat([rows[cover.left], sums[cover.right]])
    return torch.bincount(sent, minlength=num_ranks**2).view(num_ranks, num_ranks)


def _pairs(candidates: Candidates, num_ranks: int) -> Tensor:
    return candidates.sender * num_ranks + candidates.receiver


def renumbered(
    edge_index: Tensor, parts: Tensor, num_ranks: int, ranks_per_node: int, exchange: ExchangeKind
) -> Tensor:
    """The same parts, renumbered by :func:`rank_of_part` of the rows that ``exchange`` sends. O(E log E) time.

    Deterministic, not collective. How many rows go from one part to another does not depend on their numbers.
    """
    if num_ranks <= ranks_per_node or ranks_per_node == 1:
        return parts
    remote = RemoteEdges.of(edge_index, parts, num_ranks)
    rank = rank_of_part(rows_between(remote, remote.cover(exchange)), ranks_per_node)
    return rank.to(parts.dtype)[parts.long()]


def machine_of_rank(num_ranks: int, ranks_per_node: int) -> Tensor:
    """Ranks lie on machines in order, ``ranks_per_node`` on each and the rest on the last: int64 ``[P]``."""
    return host.arange(num_ranks) // ranks_per_node


def rows_across(rows: Tensor, ranks_per_node: int) -> int:
    """How many of the rows ``[P, P]``, sender by receiver, leave their machine."""
    return _cut(rows, machine_of_rank(rows.shape[0], ranks_per_node))


def rank_of_part(rows: Tensor, ranks_per_node: int) -> Tensor:
    """A rank for every part such that few rows go between machines: never more than with the parts' own order.

    Approximate: groups are grown greedily, then parts change places while that helps (Kernighan and Lin's exchange, one
    pair at a time); the parts' own order is improved likewise, and the better of the two is taken. METIS would not give
    every machine exactly its number of parts. Deterministic, O(P^2) time a pass. Shapes: int64 ``[P, P] -> [P]``.
    """
    machine = _grouped(rows, machine_of_rank(rows.shape[0], ranks_per_node))
    return torch.argsort(torch.argsort(machine, stable=True))


def merged_parts(rows: Tensor, num_ranks: int) -> Tensor:
    """A rank for every part where there are fewer ranks than parts: parts with much traffic on one rank.

    Approximate and deterministic, as :func:`rank_of_part`. Numbers of parts by rank differ by one at most.
    """
    num_parts = rows.shape[0]
    return _grouped(rows, host.arange(num_parts) * num_ranks // num_parts)


def _grouped(rows: Tensor, given: Tensor) -> Tensor:
    """Groups of parts, as large as ``given``'s, between which few rows go."""
    traffic = (rows + rows.T).fill_diagonal_(0)
    starts = (given, _grown(traffic, given))
    return min((_improved(traffic, start) for start in starts), key=lambda group: _cut(traffic, group))


def _cut(rows: Tensor, group: Tensor) -> int:
    return int(rows[group[:, None] != group].sum())


def _grown(traffic: Tensor, group: Tensor) -> Tensor:
    """Groups as large as the given ones: each begins with the busiest part left, and takes in its busiest partners."""
    found, free, with_free = torch.empty_like(group), torch.ones_like(group, dtype=torch.bool), traffic.sum(1)
    for number, size in enumerate(torch.bincount(group).tolist()):
        attraction = with_free.clone()
        for count in range(size):
            part = int(torch.where(free, attraction, -1).argmax())
            found[part], free[part] = number, False
            with_free -= traffic[part]
            attraction = traffic[part] + (attraction if count else 0)
    return found


def _improved(traffic: Tensor, group: Tensor) -> Tensor:
    """``group`` after exchanges of two parts, the best one for each part in turn, until none helps or time is up."""
    group = group.clone()
    parts = traffic.any(1).nonzero().view(-1).tolist()  # an exchange helps one that has traffic
    towards = traffic.new_zeros(group.numel(), int(group.max()) + 1).index_add_(1, group, traffic)  # rows
    last = 0
    for turn, a in enumerate(parts * _PASSES):
        if turn - last >= len(parts):
            break
        at_home = towards.gather(1, group[:, None]).view(-1)
        gain = towards[a, group] - at_home[a] + towards[:, group[a]] - at_home - 2 * traffic[a]
        b = int(gain.argmax())
        if gain[b] <= 0:
            continue
        last = turn
        moved = traffic[:, b] - traffic[:, a]
        towards[:, group[a]] += moved
        towards[:, group[b]] -= moved
        group[[a, b]] = group[[b, a]]
    return group
