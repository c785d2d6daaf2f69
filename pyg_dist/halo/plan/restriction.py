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
        listed: which of the subset's nodes the rows are, int64 ``[b]``.
        kept_key: the edges' keys in the subset, int64 ``[e]``; ``None``: it names no edges.
    """

    share: HaloShare
    row: Tensor
    edge: Tensor
    remote_edge: Tensor
    remote_ends: Tensor
    listed: Tensor
    kept_key: Tensor | None = None


def restricted(
    share: HaloShare, links: RemoteLinks, subset: Subset, stored: tuple[Tensor, Tensor] | None = None
) -> Restriction:
    """The share of the batch with a subset's nodes and edges.

    Not collective: ranks agree on what they exchange without messages. O(B log n + edges of the sampled rows + remote
    edges of the rank) time; where the subset names its edges, in these.

    Args:
        share: the rank's share of the graph.
        links: its remote edges.
        subset: the nodes: the same on every rank, or with edges that are named, this rank's.
        stored: the rank's edges by ascending id, and their places in edge storage; for a subset that names its edges.
    """
    node_id, kept = subset.node_id, subset.kept
    place = links.find(node_id)
    position = (place >= 0).nonzero().view(-1)
    of_sample = _at(links.local_id, _at(place, position)).long()
    order = torch.from_numpy(np.argsort(of_sample.numpy(), kind="stable"))  # inner and boundary nodes: two runs
    row, listed = _at(of_sample, order), _at(position, order)
    number = listed if subset.number is None else _at(subset.number, listed)
    num_local, num_inner = row.numel(), int((row < share.num_inner).sum())
    own_row = torch.empty(num_local, dtype=torch.int32)  # by ascending number
    own_row.scatter_(0, order, torch.arange(num_local, dtype=torch.int32))
    if kept is None:
        local, local_edge = share.local.restricted(row, row)
        remote, halo_id = links.between(node_id) if links.row.numel() else (None, None)
        own_number = _at(node_id, position)
    else:
        own_number = position if subset.number is None else _at(subset.number, position)
        local, local_edge, remote = _kept_edges(kept, own_number, own_row, subset.size, share.rank, links.load)
        halo_id = remote.rows.node

    def local_id(node: Tensor) -> Tensor:
        return _at(own_row, torch.searchsorted(own_number, node, out_int32=True))

    share_of = partial(
        HaloShare,
        rank=share.rank,
        num_ranks=share.num_ranks,
        num_nodes=node_id.numel() if kept is None else subset.size,
        num_edges=-1,  # not known without communication
        node_id=number,
        num_inner=num_inner,
        local=local,
        exchange=share.exchange,
    )
    kinds = [kind for kind in EXCHANGES if kind in ("post", share.exchange)]

    def numbered(edge: Tensor) -> tuple[Tensor, Tensor | None]:
        """Places in edge storage, given those or the places of kept edges, and the keys of these."""
        if kept is None or stored is None:
            return edge, None
        ids, place = stored
        return _at(place, torch.searchsorted(ids, _at(kept.edge_id, edge))), _at(kept.key, edge)

    if remote is None or share.num_ranks == 1:
        none = torch.empty(0, dtype=torch.int64)
        nothing = no_transfer(share.num_ranks, num_local, num_local - num_inner)
        edge, kept_key = numbered(local_edge)
        alone = share_of(
            edge_id=_at(share.edge_id, edge),
            row_transfer=nothing,
            sum_transfer=nothing,
            halo_id=none,
            rows_sent=dict.fromkeys(kinds, 0),
        )
        return Restriction(alone, row, edge, none, none.view(2, 0), listed, kept_key)

    assert halo_id is not None
    here, (arriving, leaving) = remote.arriving(share.rank), OneWay.both(remote, share.rank)
    assert arriving.edge is not None
    places = Places.of(arriving, local_id, num_local, num_inner, local.num_entries)
    edge, kept_key = numbered(torch.cat([local_edge, places.stored(arriving.edge)]))

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
    return Restriction(result, row, edge, remote.edge[summed], ends, listed, kept_key)


def _kept_edges(
    kept: KeptEdges, own_number: Tensor, own_row: Tensor, num_nodes: int, rank: int, load: Tensor
) -> tuple[CSR, Tensor, RemoteEdges]:
    """The rank's edges between its own nodes, which of the kept ones they are, and the edges between it and others.

    Args:
        kept: the edges that the rank has to do with.
        own_number: numbers of the rank's nodes in the batch, ascending, int64 ``[b]``.
        own_row: the local id of each, int32 ``[b]``.
        num_nodes: of the batch.
        rank: the rank.
        load: see :class:`~pyg_dist.halo.plan.cover.RemoteEdges`.
    """
    inside, arriving = (kept.sender == rank).nonzero().view(-1), (kept.sender != rank).nonzero().view(-1)
    target, source = (
        _at(own_row, torch.searchsorted(own_number, _at(end, inside))) for end in (kept.target, kept.source)
    )
    csr = CSR.from_edges(target, source, None, own_row.numel(), own_row.numel())
    local = CSR(csr.rowptr, csr.col, None, own_row.numel())
    number = inside if csr.place is None else _at(inside, csr.place)
    source, target, receiver = kept.leaving.unbind(1)
    remote = RemoteEdges.of_list(
        torch.cat([arriving, torch.full_like(source, -1)]),
        torch.cat([_at(kept.source, arriving), source]),
        torch.cat([_at(kept.target, arriving), target]),
        torch.cat([_at(kept.sender, arriving), torch.full_like(source, rank)]),
        torch.cat([torch.full_like(arriving, rank), receiver]),
        num_nodes,
        load,
        rank,
    )
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
