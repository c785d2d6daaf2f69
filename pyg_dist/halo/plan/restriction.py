"""One rank's share of the subgraph that a sample induces, from its share of the graph, without communication.

Rows stay where the graph's rows are. A rank keeps its edges from and to other ranks with both of their ends
(:class:`RemoteLinks`), so that both ranks of a pair find the same edges, the same minimum cover of them, and the same
slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.sample import KeptEdges, Subset
from pyg_dist.halo.plan.cover import EXCHANGES, Candidates, OneWay, RemoteEdges
from pyg_dist.halo.plan.share import HaloShare
from pyg_dist.halo.plan.transfer import Places, no_transfer, receive_lists, send_lists, transfer


@dataclass(frozen=True, eq=False)
class RemoteLinks:
    """What a rank knows of the edges between itself and others, and of where its nodes are.

    Attributes:
        rows, sums: that could be sent.
        rowptr, row: the edges, sums by rows, in the order that both ranks of a pair have
            (:class:`~pyg_dist.halo.plan.cover.RemoteEdges`): int64 ``[len(sums) + 1]``, int32 ``[m]``.
        place: ``[m]`` integers. Of an edge that ends here, its place in the rank's edge storage; of one that begins
            here, in the list of edges that begin here.
        load: in-edges of the nodes of each rank, ``[P]``.
        node_id: global ids of the rank's nodes, ascending, int64 ``[n]``.
        local_id: of each of them, integers ``[n]``.
    """

    rows: Candidates
    sums: Candidates
    rowptr: Tensor
    row: Tensor
    place: Tensor
    load: Tensor
    node_id: Tensor
    local_id: Tensor

    @staticmethod
    def of(share: HaloShare, incoming: Tensor, outgoing: Tensor, sender: Tensor, receiver: Tensor, load: Tensor) -> (
        RemoteLinks
    ):  # fmt: skip
        """Not collective; O(m log m) time.

        ``incoming`` are global id, source, target and place in edge storage of each edge that ends here, ``outgoing``
        global id, source and target of each that begins here, int64; ``sender`` and ``receiver`` their other ranks.
        """
        own = torch.full_like
        edge = torch.cat([incoming[:, 0], outgoing[:, 0]])
        order = torch.argsort(edge)
        found = RemoteEdges.of_list(
            torch.cat([incoming[:, 3], torch.arange(outgoing.shape[0])])[order],
            torch.cat([incoming[:, 1], outgoing[:, 1]])[order],
            torch.cat([incoming[:, 2], outgoing[:, 2]])[order],
            torch.cat([sender, own(receiver, share.rank)])[order],
            torch.cat([own(sender, share.rank), receiver])[order],
            share.num_nodes,
            load,
            share.rank,
        )
        rowptr = torch.searchsorted(found.sum, torch.arange(len(found.sums) + 1, dtype=torch.int32))
        is_ascending = bool((share.node_id.diff() > 0).all())
        node_id, row = (share.node_id, torch.arange(share.node_id.numel())) if is_ascending else share.node_id.sort()
        return RemoteLinks(
            found.rows, found.sums, rowptr, found.row, _small(found.edge), load, node_id, _small(row)
        )  # fmt: skip

    @cached_property
    def _first(self) -> int | None:
        """The first node, where they are a run of ids, as those of one rank."""
        first, last = (int(self.node_id[k]) if self.node_id.numel() else -k for k in (0, -1))
        return first if last - first + 1 == self.node_id.numel() else None

    def find(self, node_id: Tensor) -> Tensor:
        """Where each of some nodes stands in :attr:`node_id`, or -1."""
        if self._first is None:
            return ops.find_sorted(self.node_id, node_id)
        place = node_id - self._first
        return place.masked_fill_((place < 0) | (place >= self.node_id.numel()), -1)

    def between(self, node_id: Tensor) -> tuple[RemoteEdges, Tensor]:
        """The edges with both ends in an ascending list, and where the nodes of their rows stand in it."""
        at_row = ops.find_sorted(node_id, self.rows.node)
        of_row = (at_row >= 0).nonzero().view(-1)
        of_sum = (ops.find_sorted(node_id, self.sums.node) >= 0).nonzero().view(-1)
        rowptr, row, entry, *_ = ops.restrict_csr(self.rowptr, self.row, of_sum, of_row, len(self.rows))
        sums_of, of_sum = _used(torch.repeat_interleave(torch.arange(of_sum.numel()), rowptr.diff()), of_sum)
        row, of_row = _used(row.long(), of_row)
        rows, sums = _some(self.rows, of_row), _some(self.sums, of_sum)
        edges = RemoteEdges(self.load.numel(), self.place[entry].long(), row, sums_of, rows, sums, self.load)
        return edges, at_row[of_row]


@dataclass(frozen=True, eq=False)
class Restriction:
    """A rank's share of an induced subgraph, and where it stands in the graph's.

    Attributes:
        share: the share; nodes are numbered by their places in the sample.
        row: which rows of the graph these are, ascending, int64 ``[b]``.
        edge: places of the edges in the graph's edge storage, int64 ``[e]``.
        remote_edge: the edges of other ranks that are summed here: places in :attr:`RemoteLinks.place`'s list.
        remote_ends: global ids of source and target of these edges, int64 ``[2, k]``.
        kept: which of the edges that the subset names each edge is, int64 ``[e]``; ``None``: it names none.
    """

    share: HaloShare
    row: Tensor
    edge: Tensor
    remote_edge: Tensor
    remote_ends: Tensor
    kept: Tensor | None = None


def restricted(
    share: HaloShare, links: RemoteLinks, subset: Subset, stored: tuple[Tensor, Tensor] | None = None
) -> Restriction:
    """The share of the batch with a subset's nodes and edges.

    Not collective: ranks agree on what they exchange without messages. O(B log n + edges of the sampled rows + remote
    edges of the rank) time; where the subset names its edges, in these.

    Args:
        share: the rank's share of the graph.
        links: its remote edges.
        subset: the nodes, the same on every rank.
        stored: the rank's edges by ascending id, and their places in edge storage; for a subset that names its edges.
    """
    node_id, kept = subset.node_id, subset.kept
    place = links.find(node_id)
    position = (place >= 0).nonzero().view(-1)
    of_sample = _at(links.local_id, _at(place, position)).long()
    order = torch.from_numpy(np.argsort(of_sample.numpy(), kind="stable"))  # inner and boundary nodes: two runs
    row, number = _at(of_sample, order), _at(position, order)
    num_local, num_inner = row.numel(), int((row < share.num_inner).sum())
    if kept is None:
        local, local_edge = share.local.restricted(row, row)
        remote, halo_id = links.between(node_id) if links.row.numel() else (None, None)
        own_id, own_row = _at(node_id, position), torch.empty(num_local, dtype=torch.int32)
        own_row.scatter_(0, order, torch.arange(num_local, dtype=torch.int32))
    else:
        own_id, own_row = torch.arange(node_id.numel()), torch.full((node_id.numel(),), -1, dtype=torch.int32)
        own_row[number] = torch.arange(num_local, dtype=torch.int32)
        local, local_edge, remote = _kept_edges(kept, own_row, share.rank, links.load)
        halo_id = remote.rows.node

    def local_id(node: Tensor) -> Tensor:
        return _at(own_row, node if kept is not None else torch.searchsorted(own_id, node, out_int32=True))

    share_of = partial(
        HaloShare,
        rank=share.rank,
        num_ranks=share.num_ranks,
        num_nodes=node_id.numel(),
        num_edges=-1,  # not known without communication
        node_id=number,
        num_inner=num_inner,
        local=local,
        exchange=share.exchange,
    )
    kinds = [kind for kind in EXCHANGES if kind in ("post", share.exchange)]

    def numbered(edge: Tensor) -> tuple[Tensor, Tensor | None]:
        """Places in edge storage, given those or the numbers of kept edges, and these."""
        if kept is None or stored is None:
            return edge, None
        ids, place = stored
        return _at(place, torch.searchsorted(ids, _at(kept.edge_id, edge))), edge

    if remote is None or share.num_ranks == 1:
        none = torch.empty(0, dtype=torch.int64)
        nothing = no_transfer(share.num_ranks, num_local, num_local - num_inner)
        edge, number_of = numbered(local_edge)
        alone = share_of(
            edge_id=_at(share.edge_id, edge),
            row_transfer=nothing,
            sum_transfer=nothing,
            halo_id=none,
            rows_sent=dict.fromkeys(kinds, 0),
        )
        return Restriction(alone, row, edge, none, none.view(2, 0), number_of)

    assert halo_id is not None
    here, (arriving, leaving) = remote.arriving(share.rank), OneWay.both(remote, share.rank)
    assert arriving.edge is not None
    places = Places.of(arriving, local_id, num_local, num_inner, local.num_entries)
    edge, number_of = numbered(torch.cat([local_edge, places.stored(arriving.edge)]))

    covers = {kind: remote.cover(kind).split(here.rows, here.sums) for kind in kinds}
    lists = {
        kind: transfer(receive_lists(arriving, first, places), send_lists(leaving, second, local_id, num_local))
        for kind, (first, second) in covers.items()
    }
    summed = here.edges + (~covers[share.exchange][1].left[leaving.row]).nonzero().view(-1)
    result = share_of(
        edge_id=_at(share.edge_id, edge),
        row_transfer=lists["post"],
        sum_transfer=lists[share.exchange],
        halo_id=halo_id[: here.rows],
        rows_sent={kind: int(sent.left.sum() + sent.right.sum()) for kind, (_, sent) in covers.items()},
    )
    ends = torch.stack([remote.rows.node[remote.row[summed]], remote.sums.node[remote.sum[summed]]])
    return Restriction(result, row, edge, remote.edge[summed], ends, number_of)


def _kept_edges(kept: KeptEdges, own_row: Tensor, rank: int, load: Tensor) -> tuple[CSR, Tensor, RemoteEdges]:
    """The rank's edges between its own nodes, the numbers of these among all, and the edges between it and others.

    Args:
        kept: the edges of the batch.
        own_row: the local id of each of the batch's nodes, int32 ``[B]``.
        rank: the rank.
        load: see :class:`~pyg_dist.halo.plan.cover.RemoteEdges`.
    """
    sender, receiver = (_at(kept.owner, ends) for ends in (kept.source, kept.target))
    begins, ends = sender == rank, receiver == rank
    inside, crossing = ((begins & ends).nonzero().view(-1), (begins != ends).nonzero().view(-1))
    num_local = int((own_row >= 0).sum())
    target, source = (_at(own_row, _at(end, inside)) for end in (kept.target, kept.source))
    csr = CSR.from_edges(target, source, None, num_local, num_local)
    local = CSR(csr.rowptr, csr.col, None, num_local)
    number = inside if csr.place is None else _at(inside, csr.place)
    remote = RemoteEdges.of_list(
        crossing, _at(kept.source, crossing), _at(kept.target, crossing),
        _at(sender, crossing), _at(receiver, crossing), kept.owner.numel(), load, rank,
    )  # fmt: skip
    return local, number, remote


def _at(values: Tensor, index: Tensor) -> Tensor:
    """``values[index]``, for which torch takes several times as long."""
    return values.index_select(0, index)


def _used(number: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """The candidates that some edge needs, and their numbers among these."""
    used = torch.zeros(candidates.numel(), dtype=torch.bool)
    used[number] = True
    place = torch.cumsum(used, 0, dtype=torch.int32) - 1
    return place[number], candidates[used]


def _some(candidates: Candidates, chosen: Tensor) -> Candidates:
    return Candidates(candidates.sender[chosen], candidates.receiver[chosen], candidates.node[chosen])


def _small(numbers: Tensor) -> Tensor:
    """In 32 bits where they fit."""
    fits = numbers.numel() == 0 or int(numbers.max()) <= torch.iinfo(torch.int32).max
    return numbers.to(torch.int32) if fits else numbers
