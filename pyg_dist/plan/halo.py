"""The halo layout: which rows and edges a rank owns, and which rows it sends and receives (pure functions).

Each node belongs to one part, each edge to the owner of its target, which keeps its values. A rank's *halo* is the set
of sources that its edges need and other ranks own. Legend: *global id* is the node's number in the input, *local
id* its row on its rank, *slot* a halo row's place in the receive buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend.csr import CSR
from pyg_dist.plan.remote import EXCHANGES, Exchange, RemoteEdges
from pyg_dist.plan.transfer import Places, Transfer, transfer


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
        num_inner: number of inner nodes. Their rows are finished before any message arrives.
        edge_id: global ids of the edges of this rank, int64 ``[e]``: local edges by target, then halo edges by
            target; edges of one target keep their input order. This is the order of edge storage.
        local: rows are local ids, columns local ids; entries are ``edge_id[:local.num_entries]``.
        post: brings the halo's rows themselves, for whatever cannot be summed on the way.
        sums: brings sums with constant weights by the chosen exchange; with ``"post"``, the same object as ``post``.
        halo_id: global id by receive slot of ``post``, int64 ``[h]``, ascending within each owner.
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
    rows_sent: dict[Exchange, int]


def halo_share(
    edge_index: Tensor, parts: Tensor, rank: int, num_ranks: int, exchange: Exchange = "hybrid"
) -> HaloShare:
    """What ``rank`` owns, executes, sends and receives. Not collective; O(E) time, O(own edges + N) extra memory.

    Args:
        edge_index: int64 ``[2, E]``, source and target, any order, duplicates and self loops allowed.
        parts: ``[N]`` integers, the owner of each node.
        rank: whose share.
        num_ranks: number of ranks.
        exchange: what to send for sums, see :meth:`~pyg_dist.plan.remote.RemoteEdges.cover`.

    Example:
        >>> share = halo_share(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1]), rank=0, num_ranks=2)
        >>> share.halo_id, share.sums.send_counts
        (tensor([1]), (0, 1))
    """
    num_nodes, num_edges = parts.numel(), edge_index.size(1)
    source, target = edge_index
    executed = (parts[target] == rank).nonzero().view(-1)

    on_boundary = torch.zeros(num_nodes, dtype=torch.bool)
    on_boundary[target[executed[parts[source[executed]] != rank]]] = True
    owned = (parts == rank).nonzero().view(-1)
    inner = ~on_boundary[owned]
    node_id = torch.cat([owned[inner], owned[~inner]])
    num_local, num_inner = node_id.numel(), int(inner.sum())
    local_id = torch.empty(num_nodes, dtype=torch.int64)
    local_id[node_id] = torch.arange(num_local)

    # Edge storage: local edges before halo edges, each by target.
    row = local_id[target[executed]]
    is_remote = parts[source[executed]] != rank
    order = torch.argsort(row + is_remote * num_local, stable=True)
    edge_id, row = executed[order], row[order]
    here = torch.arange(int((~is_remote).sum()))
    local = CSR.from_edges(row[here], local_id[source[edge_id[here]]], here, num_local, num_local)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))

    remote = RemoteEdges.of(edge_index, parts, num_ranks, rank)
    places = Places(rank, local_id, num_local, num_inner, place[is_remote])
    covers = {kind: remote.cover(kind) for kind in EXCHANGES}
    post = transfer(remote, covers["post"], edge_index, places)
    sums = post if exchange == "post" else transfer(remote, covers[exchange], edge_index, places)
    row_is_sent, sum_is_sent = remote.rows.sender == rank, remote.sums.sender == rank
    return HaloShare(
        rank=rank,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        num_edges=num_edges,
        node_id=node_id,
        num_inner=num_inner,
        edge_id=edge_id,
        local=local,
        post=post,
        sums=sums,
        halo_id=remote.rows.node[remote.rows.receiver == rank],
        rows_sent={
            kind: int((cover.left & row_is_sent).sum() + (cover.right & sum_is_sent).sum())
            for kind, cover in covers.items()
        },
    )
