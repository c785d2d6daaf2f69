"""The halo layout: which rows and edges a rank owns, and which rows it sends and receives (pure functions).

Each node belongs to one part; each edge is executed by the owner of its target. A rank's *halo* is the set of
sources that its edges need and other ranks own. Legend: *global id* is the node's number in the input, *local
id* its row on its rank, *slot* a halo row's place in the receive buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend.csr import CSR


@dataclass(frozen=True)
class HaloShare:
    """One rank's share of a graph in the halo layout, with the post exchange's lists.

    Attributes:
        rank: this rank.
        num_ranks: number of ranks P.
        num_nodes: nodes of the whole graph, N.
        num_edges: edges of the whole graph, E.
        node_id: global ids of the local rows, int64 ``[n]``: first the *inner* nodes, all of whose sources are
            local, then the *boundary* nodes, each in ascending order of global id (input order is often local).
        num_inner: number of inner nodes. Their rows are finished before any message arrives.
        edge_id: global ids of the edges executed here, int64 ``[e]``: local edges by target, then halo edges by
            target; edges of one target keep their input order. This is the order of edge storage.
        local: rows are local ids, columns local ids; entries are ``edge_id[:local.num_entries]``.
        halo: rows are boundary nodes (local id minus ``num_inner``), columns slots; the other entries.
        halo_id: global id by slot, int64 ``[h]``, ascending within each owner.
        recv_counts: halo rows by owner, ``[P]``.
        send_index: local ids of the rows to send, int64 ``[s]``, grouped by receiver, each group in ascending
            order of global id (so both sides agree without talking).
        send_counts: rows to send by receiver, ``[P]``.
    """

    rank: int
    num_ranks: int
    num_nodes: int
    num_edges: int
    node_id: Tensor
    num_inner: int
    edge_id: Tensor
    local: CSR
    halo: CSR
    halo_id: Tensor
    recv_counts: tuple[int, ...]
    send_index: Tensor
    send_counts: tuple[int, ...]


def halo_share(edge_index: Tensor, parts: Tensor, rank: int, num_ranks: int) -> HaloShare:
    """What ``rank`` owns, executes, sends and receives. Not collective; O(E) time, O(own edges + N) extra memory.

    Args:
        edge_index: int64 ``[2, E]``, source and target, any order, duplicates and self loops allowed.
        parts: ``[N]`` integers, the owner of each node.
        rank: whose share.
        num_ranks: number of ranks.

    Example:
        >>> share = halo_share(torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 1]), rank=0, num_ranks=2)
        >>> share.halo_id, share.send_counts
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
    remote = parts[source[executed]] != rank
    order = torch.argsort(row + remote * num_local, stable=True)
    edge_id, row, remote = executed[order], row[order], remote[order]
    here, there = (~remote).nonzero().view(-1), remote.nonzero().view(-1)
    local = CSR.from_edges(row[here], local_id[source[edge_id[here]]], here, num_local, num_local)

    halo_source = source[edge_id[there]]
    halo_key = parts[halo_source].to(torch.int64) * num_nodes + halo_source
    halo_id_by_owner, slot = torch.unique(halo_key, sorted=True, return_inverse=True)
    halo = CSR.from_edges(row[there] - num_inner, slot, there, num_local - num_inner, halo_id_by_owner.numel())

    outgoing = ((parts[source] == rank) & (parts[target] != rank)).nonzero().view(-1)
    send_key = torch.unique(parts[target[outgoing]].to(torch.int64) * num_nodes + source[outgoing], sorted=True)
    stride = max(num_nodes, 1)
    return HaloShare(
        rank=rank,
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        num_edges=num_edges,
        node_id=node_id,
        num_inner=num_inner,
        edge_id=edge_id,
        local=local,
        halo=halo,
        halo_id=halo_id_by_owner % stride,
        recv_counts=tuple(torch.bincount(halo_id_by_owner // stride, minlength=num_ranks).tolist()),
        send_index=local_id[send_key % stride],
        send_counts=tuple(torch.bincount(send_key // stride, minlength=num_ranks).tolist()),
    )
