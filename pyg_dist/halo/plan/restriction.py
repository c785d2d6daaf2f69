"""One rank's share of the subgraph that a sample induces, from its share of the graph, without communication.

Rows stay where the graph's rows are. What crosses ranks is found among :mod:`~pyg_dist.halo.plan.links`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.ids import IdList
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.sample import KeptEdges, Subset
from pyg_dist.halo.plan.cover import Cover, Ends, ExchangeKind, OneWay, masked
from pyg_dist.halo.plan.links import MachineLinks, RemoteLinks
from pyg_dist.halo.plan.share import Halo, HaloShare, LocalRows, halo_of
from pyg_dist.halo.plan.transfer import Places, Slots, Transfer, no_transfer, receive_lists, send_lists, transfer
from pyg_dist.halo.plan.two_level import MachineEdges, Routes

_TABLE = 8
"""Rows stand in a table of all numbers of a batch, not searched for, where a rank has one in so many of them."""


@dataclass(frozen=True, eq=False)
class SampledRows:
    """A rank's nodes of a batch, and where they stand in the graph."""

    row: Tensor  # which rows of the graph these are, ascending, int64 ``[b]``
    listed: Tensor  # which of the subset's nodes each is, int64 ``[b]``
    number: Tensor  # of each in the batch, int64 ``[b]``
    by_number: LocalRows  # them by these numbers
    num_nodes: int  # of the batch, over all ranks

    @staticmethod
    def of(nodes: LocalRows, subset: Subset) -> SampledRows:
        """The rows of a subset, given the rank's nodes of the graph."""
        place = nodes.find(subset.node_id)
        position = host.flatnonzero(place >= 0)
        of_sample = _at(nodes.row, _at(place, position)).long()
        order = torch.from_numpy(np.argsort(of_sample.numpy(), kind="stable"))  # inner and boundary nodes: two runs
        row, listed = _at(of_sample, order), _at(position, order)
        own_row = host.empty(row.numel(), dtype=torch.int32)
        own_row.scatter_(0, order, host.arange(row.numel(), dtype=torch.int32))
        ascending = position if subset.number is None else _at(subset.number, position)
        size = subset.node_id.numel() if subset.num_nodes is None else subset.num_nodes
        row_of = None
        if 0 < size <= _TABLE * row.numel():
            row_of = host.empty(size, dtype=torch.int32).scatter_(0, ascending, own_row)
        return SampledRows(row, listed, _at(ascending, order), LocalRows(ascending, own_row, row_of), size)


@dataclass(frozen=True, eq=False)
class Restriction:
    """A rank's share of a subgraph, and where its edges stand in the graph's."""

    share: HaloShare  # nodes are numbered by their places in the sample
    rows: SampledRows  # its targets
    edge: Tensor  # places of the edges in the graph's edge storage, int64 ``[e]``
    remote_edge: Tensor  # other ranks' edges that are summed here: places in the list of :attr:`RemoteLinks.place`
    remote_ends: Tensor  # global ids of source and target of these edges, int64 ``[2, k]``
    which: Tensor | None = None  # of the edges that the subset names each is, int64 ``[e]``; ``None``: it names none


class _Edges(NamedTuple):
    """The edges of a batch that a rank has to do with: among its own nodes, which these are, and those of two ranks."""

    local: CSR
    local_edge: Tensor
    remote: tuple[OneWay, OneWay] | None  # that arrive, and that leave
    covers: tuple[Cover, Cover] | None = None  # of these
    at_row: Tensor | None = None  # where the nodes of the rows that arrive stand in the subset


def restricted(
    share: HaloShare,
    links: RemoteLinks,
    subset: Subset,
    of_machine: MachineLinks | None = None,
    device: torch.device | None = None,
) -> Restriction:
    """The share of the batch that a subset's nodes induce.

    Not collective: ranks agree on what they exchange without messages. O(B log n + edges of the sampled rows + remote
    edges of the rank) time.

    The ``subset`` is the same on every rank. ``of_machine``: the remote edges of its machine, in two levels. ``device``
    finds which edges are in the batch, from copies that are made once; what is exchanged is planned from these on the
    host.
    """
    device = share.local.device if device is None else device
    rows = SampledRows.of(links.nodes, subset)
    node_id = subset.node_id
    remote = covers = at_row = None
    if share.num_ranks > 1 and (links.row.numel() or of_machine is not None):
        remote, at_row = links.between(node_id, device, share.rank)
        arriving, leaving = (way.cover(share.exchange, links.load, each_step=True) for way in remote)
        covers = arriving, leaving
    local, entry = share.local.to(device).restricted(rows.row, rows.row)
    edges = _Edges(local.on_host, entry, remote, covers, at_row)
    own = LocalRows(_at(node_id, rows.by_number.ascending), rows.by_number.row)
    ways = None if of_machine is None else partial(of_machine.routes, node_id, device)
    return _restriction(share, rows, (own, own), edges, None, ways)


def restricted_to(
    share: HaloShare, kept: KeptEdges, sources: SampledRows, targets: SampledRows, load: Tensor
) -> Restriction:
    """The share of the batch with these edges, from sources to targets of one or of two types.

    Collective where edges cross ranks, but for two levels; O(m) time in the edges that begin or end on the rank.
    ``load``: see :class:`~pyg_dist.halo.plan.cover.RemoteEdges`.
    """
    rank, own = share.rank, (sources.by_number, targets.by_number)
    crossing, inside = kept.crossing, None if kept.crossing is None else kept.crossing.inside
    source, target = (
        rows.local_id(end if inside is None else _at(end, inside))
        for rows, end in zip(own, (kept.source, kept.target), strict=True)
    )
    csr = CSR.from_edges(target, source, None, targets.row.numel(), sources.row.numel())
    local_edge = host.arange(source.numel()) if csr.place is None else csr.place.long()
    remote = covers = ways = None
    if crossing is not None:
        local_edge = _at(crossing.inside, local_edge)
        size = max(sources.num_nodes, targets.num_nodes)
        ends = _at(kept.source, crossing.arriving), _at(kept.target, crossing.arriving)
        arriving = OneWay.of_list(crossing.arriving, *ends, crossing.sender, size, share.num_ranks, rank, leaves=False)
        cover = arriving.batch_cover(share.exchange)
        if crossing.leaving is None or crossing.between_machines is None or share.ranks_per_machine is None:
            leaving, cover_of_leaving = leaving_edges(arriving, cover, crossing.send)
        else:
            leaving = OneWay.of_list(None, *crossing.leaving, size, share.num_ranks, rank, leaves=True)
            cover_of_leaving = leaving.batch_cover(share.exchange)
            begins, ends_of, sender, receiver = crossing.between_machines.unbind(1)
            on_each = share.ranks_per_machine
            ways = MachineEdges.of_list(begins, ends_of, sender, receiver, size, load, on_each, rank).routes
        remote, covers = (arriving, leaving), (cover, cover_of_leaving)
    edges = _Edges(replace(csr, place=None), local_edge, remote, covers)
    return _restriction(share, targets, own, edges, kept, ways)


Send = Callable[..., list[tuple[Tensor, list[int]]]]
""":attr:`~pyg_dist.graph.sample.CrossingEdges.send`"""


def leaving_edges(arriving: OneWay, cover: Cover, send: Send) -> tuple[OneWay, Cover]:
    """The edges that leave a rank, given those that arrive (collective); O(m) time in rows and in edges of sums.

    A rank hears of all its rows that others need, with one bit for those that carry their edges, and of the sums that
    it sends: how many edges each has, and their rows. So the edges that leave are those of sums alone, which have the
    same order on both ranks.
    """
    rows, sums = arriving.rows, host.flatnonzero(cover.right)
    is_summed = ~cover.left.index_select(0, arriving.row)
    row, total = masked(arriving.row, is_summed), masked(arriving.sum, is_summed)
    edges_of = torch.bincount(total, minlength=len(arriving.sums))
    first = host.tensor([0, *accumulate(rows.counts)])
    lists = [
        IdList((2 * rows.node + cover.left).view(-1, 1), rows.counts),
        IdList(
            torch.stack([x.index_select(0, sums) for x in (arriving.sums.node, edges_of)], 1),
            arriving.sums.counts_of(sums),
        ),
        _by_peer(row, first, arriving.sums.counts_of(total)),
    ]
    (marked, row_counts), (counted, sum_counts), (row, edge_counts) = send(*lists)
    is_sent, node = (marked & 1).view(-1).bool(), (marked >> 1).view(-1)
    node_of_sum, edges_of = counted.t().contiguous()
    total = torch.repeat_interleave(host.arange(len(counted), dtype=torch.int32), edges_of)
    shift = host.tensor([0, *accumulate(row_counts)][:-1])
    row = (row.view(-1) + torch.repeat_interleave(shift, host.tensor(edge_counts))).to(torch.int32)
    leaving = OneWay(
        arriving.rank, True, None, row, total, Ends(node, tuple(row_counts)), Ends(node_of_sum, tuple(sum_counts))
    )
    return leaving, Cover(is_sent, host.ones(len(counted), dtype=torch.bool))


def _by_peer(row: Tensor, first: Tensor, counts: list[int]) -> IdList:
    """Numbers of rows among those of each peer."""
    before = torch.repeat_interleave(first[:-1], host.tensor(counts))
    return IdList((row - before).view(-1, 1), counts, is_ascending=False)


def _restriction(
    share: HaloShare,
    rows: SampledRows,
    own: tuple[LocalRows, LocalRows],
    edges: _Edges,
    kept: KeptEdges | None,
    ways: Callable[[ExchangeKind], Routes] | None,
) -> Restriction:
    """The share of ``edges`` to ``rows``.

    ``own`` are sources and targets as the ends of the edges name them; ``ways`` is for two levels.
    """
    sources, targets = own
    num_local, num_inner = rows.row.numel(), int((rows.row < share.num_inner).sum())
    share_of = partial(
        HaloShare,
        rank=share.rank,
        num_ranks=share.num_ranks,
        num_nodes=rows.num_nodes,
        num_edges=-1,  # not known without communication
        node_id=rows.number,
        num_inner=num_inner,
        local=edges.local,
        exchange=share.exchange,
        ranks_per_machine=None if ways is None else share.ranks_per_machine,
    )
    none = host.empty(0, dtype=torch.int64)

    def numbered(edge: Tensor) -> tuple[Tensor, Tensor | None]:
        """Places in edge storage, given those or the places of kept edges, and these."""
        return (edge, None) if kept is None else (_at(kept.place, edge), edge)

    if edges.remote is None or edges.covers is None:
        nothing = no_transfer(share.num_ranks, sources.row.numel(), num_local - num_inner)
        edge, which = numbered(edges.local_edge)
        alone = share_of(
            edge_id=_at(share.edge_id, edge),
            rows=nothing,
            sum_transfer=nothing,
            halo=(none, none.int()),
            rows_sent=dict.fromkeys(("post", share.exchange), 0),
        )
        return Restriction(alone, rows, edge, none, none.view(2, 0), which)

    (arriving, leaving), covers = edges.remote, edges.covers
    assert arriving.edge is not None
    places = Places.of(arriving, targets.local_id, num_local, num_inner, edges.local.num_entries)
    edge, which = numbered(torch.cat([edges.local_edge, places.stored(arriving.edge)]))

    def slots(kind: ExchangeKind) -> tuple[Slots, Slots, Routes | None]:
        of_kind = covers if kind == share.exchange else tuple(way.uniform_cover(kind) for way in (arriving, leaving))
        both, by = zip((arriving, leaving), of_kind, strict=True), None if ways is None else ways(kind)
        received, sent = (Slots.of(*each) if by is None else by.slots(*each) for each in both)
        return received, sent, by

    def lists(received: Slots, sent: Slots, by: Routes | None) -> Transfer:
        return transfer(
            receive_lists(arriving, received, places),
            send_lists(leaving, sent, sources.local_id, sources.row.numel()),
            None if by is None else by.relay_lists(share.rank),
        )

    def halo() -> Halo:
        found = arriving
        if edges.at_row is not None:
            found = replace(arriving, rows=Ends(edges.at_row, arriving.rows.counts))
        return halo_of(found, slots("post")[0])

    chosen = slots(share.exchange)
    sums = lists(*chosen)
    summed = host.flatnonzero(~_at(chosen[1].left, leaving.row))
    result = share_of(
        edge_id=_at(share.edge_id, edge),
        rows=sums if share.exchange == "post" else lambda: lists(*slots("post")),
        sum_transfer=sums,
        halo=halo,
        rows_sent={"post": len(leaving.rows), share.exchange: int(sum(side.sum() for side in covers[1]))},
    )
    ends = torch.stack(
        [_at(kind.node, _at(of, summed)) for kind, of in ((leaving.rows, leaving.row), (leaving.sums, leaving.sum))]
    )
    remote_edge = torch.full_like(summed, -1) if leaving.edge is None else _at(leaving.edge, summed)
    return Restriction(result, rows, edge, remote_edge, ends, which)


def _at(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]``, for which torch takes several times as long."""
    return values.index_select(0, index)
