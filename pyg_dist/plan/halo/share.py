"""The halo layout: which rows and edges a rank owns, and which rows it sends and receives (pure functions).

Each node belongs to one part, each edge to the owner of its target, which keeps its values. A rank's *halo* is the set
of sources that its edges need and other ranks own. Legend: *global id* is the node's number in the input, *local
id* its row on its rank, *slot* a halo row's place in the receive buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyg_dist.backend.ops.memory import release_after
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.plan.halo.remote_edges import EXCHANGES, Exchange, RemoteEdges
from pyg_dist.plan.halo.transfer import Places, Transfer, transfer
from pyg_dist.plan.halo.vertex_cover import Cover


@dataclass(frozen=True)
class HaloShare:
    """One rank's share of a graph in the halo layout, and what it sends.

    Attributes:
        rank: this rank.
        num_ranks: number of ranks P.
        num_nodes: nodes of the whole graph, N.
        num_edges: edges of the whole graph, E.
        node_id: global ids of the local rows, int64 ``[n]``: first the *inner* nodes, all of whose sources are
            local, then the *boundary* nodes, each in ascending order of global id (input order is often local).
        num_inner: local rows before the first boundary node. They are finished before any message arrives.
        edge_id: global ids of the edges of this rank, int64 ``[e]``: local edges by target, then halo edges by target
            and owner of the source, each in input order. This is the order of edge storage.
        local: rows are local ids, columns local ids; entries are ``edge_id[:local.num_entries]``.
        post: brings the halo's rows themselves, for whatever cannot be summed on the way.
        sums: brings sums with constant weights by the chosen exchange; with ``"post"``, the same object as ``post``.
        halo_id: global id by receive slot of ``post``, int64 ``[h]``, ascending within each owner.
        exchange: the chosen exchange.
        rows_sent: rows that this rank sends in one aggregation, by exchange.
    """

    rank: int
    num_ranks: int
    num_nodes: int
    num_edges: int
    node_id: Tensor
    num_inner: int
    edge_id: Tensor
    local: CSR
    post: Transfer
    sums: Transfer
    halo_id: Tensor
    exchange: Exchange
    rows_sent: dict[Exchange, int]

    def selected(self, picked: Tensor) -> HaloShare:
        """The share of some of the edges, over the same rows (not collective; no rank has to ask another).

        The halo's rows are sent as before, those that no edge needs any more included, for sums, too.

        Args:
            picked: places in edge storage, int64 ``[k]``; edge storage of the result is in their order.
        """
        local, incoming = (_picked(csr, picked, self.edge_id.numel()) for csr in (self.local, self.post.incoming))
        post = replace(self.post, incoming=incoming)
        return replace(self, edge_id=self.edge_id[picked], local=local, post=post, sums=post, exchange="post")


def halo_share(
    edge_index: Tensor,
    parts: Tensor,
    rank: int,
    num_ranks: int,
    exchange: Exchange = "hybrid",
    node_id: Tensor | None = None,
) -> HaloShare:
    """What ``rank`` owns, executes, sends and receives. Not collective; O(E) time, O(own edges + N) extra memory.

    Args:
        edge_index: int64 ``[2, E]``, source and target, any order, duplicates and self loops allowed.
        parts: ``[N]`` integers, the owner of each node.
        rank: whose share.
        num_ranks: number of ranks.
        exchange: what to send for sums, see :meth:`~pyg_dist.plan.halo.remote_edges.RemoteEdges.cover`.
        node_id: the order of the rank's rows, where they lie already; boundary nodes may then lie anywhere.

    Example:
        >>> share = halo_share(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1]), rank=0, num_ranks=2)
        >>> share.halo_id, share.sums.send_counts
        (tensor([1]), (0, 1))
    """
    num_nodes, num_edges = parts.numel(), edge_index.size(1)
    source, target = edge_index
    ascending = (parts == rank).nonzero().view(-1)
    is_local = (parts[target] == rank) & (parts[source] == rank)
    local_edge = is_local.nonzero().view(-1)
    remote = RemoteEdges.of(edge_index, parts, num_ranks, rank)

    def inside() -> LocalEdges:
        return LocalEdges(local_edge, *torch.searchsorted(ascending, edge_index[:, local_edge], out_int32=True))

    return share_of(rank, num_nodes, num_edges, ascending, inside, remote, exchange, remote.cover("hybrid"), node_id)


@dataclass(frozen=True)
class LocalEdges:
    """The edges between a rank's own nodes, which are numbered in ascending order of their global ids.

    Attributes:
        edge_id: global ids of the edges; those of one target in input order, int64 ``[l]``.
        source, target: numbers of their ends, int32 ``[l]``.
    """

    edge_id: Tensor
    source: Tensor
    target: Tensor


def share_of(
    rank: int,
    num_nodes: int,
    num_edges: int,
    ascending: Tensor,
    inside: Callable[[], LocalEdges],
    remote: RemoteEdges,
    exchange: Exchange,
    hybrid: Cover,
    node_id: Tensor | None = None,
) -> HaloShare:
    """The share of ``rank`` from the edges that touch its nodes alone. Not collective, O(k log k) time in these.

    Args:
        rank: whose share.
        num_nodes: nodes of the whole graph.
        num_edges: edges of the whole graph.
        ascending: the rank's nodes, in ascending order of their global ids.
        inside: gives the edges within the rank, which are not kept.
        remote: those that begin or end there.
        exchange: what to send for sums.
        hybrid: the cover of ``"hybrid"``.
        node_id: see :func:`halo_share`.
    """
    num_local = ascending.numel()
    arriving = remote.arriving(rank)
    on_boundary = torch.zeros(num_local, dtype=torch.bool)
    on_boundary[torch.searchsorted(ascending, remote.sums.node[: arriving.sums])] = True
    if node_id is None:
        order = torch.cat([(~on_boundary).nonzero().view(-1), on_boundary.nonzero().view(-1)])
        node_id = ascending[order]
    else:
        order = torch.searchsorted(ascending, node_id)
    row_of = torch.empty(num_local, dtype=torch.int32).scatter_(0, order, torch.arange(num_local, dtype=torch.int32))
    boundary = on_boundary[order].nonzero()
    num_inner = int(boundary[0]) if boundary.numel() else num_local
    del on_boundary, order, boundary

    local, local_edge = _laid_out(inside, row_of)
    release_after(local.num_entries)
    places = Places.of(rank, ascending, row_of, num_inner, remote, local.num_entries)
    edge_id = torch.cat([local_edge, places.stored(remote.edge[: arriving.edges])])
    del local_edge
    release_after(edge_id.numel())
    covers = {kind: hybrid if kind == "hybrid" else remote.cover(kind) for kind in EXCHANGES}
    post = transfer(remote, covers["post"], places)
    release_after(edge_id.numel())
    sums = post if exchange == "post" else transfer(remote, covers[exchange], places)
    return HaloShare(
        rank=rank,
        num_ranks=remote.num_ranks,
        num_nodes=num_nodes,
        num_edges=num_edges,
        node_id=node_id,
        num_inner=num_inner,
        edge_id=edge_id,
        local=local,
        post=post,
        sums=sums,
        halo_id=remote.rows.node[: arriving.rows].clone(),
        exchange=exchange,
        rows_sent={
            kind: int(cover.left[arriving.rows :].sum() + cover.right[arriving.sums :].sum())
            for kind, cover in covers.items()
        },
    )


def _laid_out(inside: Callable[[], LocalEdges], row_of: Tensor) -> tuple[CSR, Tensor]:
    """The pattern of local edges by local ids, and their global ids in the order of its entries."""
    edges = inside()
    edge_id, target, source = edges.edge_id, row_of.index_select(0, edges.target), edges.source
    del edges  # each of them takes as much as the pattern
    source = row_of.index_select(0, source)
    csr = CSR.from_edges(target, source, None, row_of.numel(), row_of.numel())
    del source, target
    release_after(csr.num_entries)
    return replace(csr, place=None), edge_id if csr.place is None else edge_id.index_select(0, csr.place)


def _picked(csr: CSR, picked: Tensor, num_edges: int) -> CSR:
    """The entries of some edges, whose values lie in the order of ``picked``."""
    entry = torch.full((num_edges,), -1).scatter_(0, csr.edge.long(), torch.arange(csr.num_entries))[picked]
    place = (entry >= 0).nonzero().view(-1)
    entry = entry[place]
    return CSR.from_edges(csr.row()[entry], csr.col[entry], place, csr.num_rows, csr.num_cols)
