"""One rank's side of the traffic of an aggregation: what it multiplies before sending and after receiving.

Any mix of post and pre edges is one product of three: ``y = local x + incoming P outgoing x``, where ``outgoing`` makes
the send buffer (a row as it is: one entry; a partial sum: one entry per edge), the exchange P moves rows between ranks,
and ``incoming`` adds the receive buffer to the targets (a row: one entry per edge; a partial sum: one entry). The
transposed product swaps the two and needs as many rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend.ops.row_format import SUM_KEY
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.plan.halo.remote_edges import Candidates, RemoteEdges
from pyg_dist.plan.halo.vertex_cover import Cover

UNIT = -1
"""In place of an edge: an entry whose value is one, whatever the edges' weights are."""


@dataclass(frozen=True)
class Transfer:
    """The lists of one rank. A buffer is grouped by peer; for each peer, rows come before sums, by node.

    Attributes:
        outgoing: ``[s, n]``: send slots by local ids. ``edge`` counts received weights (below); :data:`UNIT` in rows.
        incoming: ``[b, h]``: boundary nodes (local id minus ``num_inner``) by receive slots. ``edge`` counts edge
            storage; :data:`UNIT` for sums.
        send_counts: slots by receiver, ``[P]``.
        recv_counts: slots by sender, ``[P]``.
        weights_to_send: int64, places in edge storage of the values that other ranks multiply by, grouped by these: the
            edges into this rank that are summed at their source.
        weight_send_counts: ``weights_to_send`` by receiver, ``[P]``.
        weight_recv_counts: values that this rank multiplies by, by sender, ``[P]``.
        outgoing_key: int64 ``[s]``, what stands for each slot where its values are rounded at random: the global id of
            a row's node; a sum, of which every rank may make another, adds its maker's multiple of
            :data:`~pyg_dist.backend.ops.row_format.SUM_KEY`.
        incoming_key: int64 ``[h]``, the same for the way back, on which the gradients of rows are sums.
    """

    outgoing: CSR
    incoming: CSR
    send_counts: tuple[int, ...]
    recv_counts: tuple[int, ...]
    weights_to_send: Tensor
    weight_send_counts: tuple[int, ...]
    weight_recv_counts: tuple[int, ...]
    outgoing_key: Tensor
    incoming_key: Tensor


@dataclass(frozen=True)
class Places:
    """Where a rank keeps its nodes and edges.

    Attributes:
        rank: the rank.
        node_id: global ids of the rank's nodes, ascending, int64 ``[n]``.
        row: local id of each of them, int32 ``[n]``.
        num_inner: nodes before the boundary.
        remote_edge: place in edge storage of the rank's edges with a remote source, in the order of the remote edges.
    """

    rank: int
    node_id: Tensor
    row: Tensor
    num_inner: int
    remote_edge: Tensor

    @property
    def num_local(self) -> int:
        """Nodes of the rank."""
        return self.node_id.numel()

    def local_id(self, node: Tensor) -> Tensor:
        """The local ids of some of the rank's nodes."""
        return self.row[torch.searchsorted(self.node_id, node)]


def transfer(remote: RemoteEdges, cover: Cover, places: Places) -> Transfer:
    """The lists of the rank whose remote edges ``remote`` are. Both sides of a pair agree without talking.

    Not collective; O(m log m) time and memory in the remote edges m of the rank.
    """
    if remote.edge.numel() == 0:
        return no_transfer(remote.num_ranks, places.num_local, places.num_local - places.num_inner)
    rank, num_ranks = places.rank, remote.num_ranks
    rows, sums = remote.rows, remote.sums
    ends = ((rows, rows.sender), (sums, sums.receiver))
    is_post = cover.left[remote.row]
    starts_here = (rows.sender == rank)[remote.row]

    row_here, sum_here = (_local_ids(kind, rank_of == rank, places) for kind, rank_of in ends)
    row_slot, sum_slot, send_counts = _slots(
        num_ranks, cover.left & (rows.sender == rank), rows.receiver, cover.right & (sums.sender == rank), sums.receiver
    )
    sent, summed = (row_slot >= 0).nonzero().view(-1), (starts_here & ~is_post).nonzero().view(-1)
    order, weight_recv_counts = _by_peer(sums.receiver[remote.sum[summed]], num_ranks)
    outgoing = CSR.from_edges(
        torch.cat([row_slot[sent], sum_slot[remote.sum[summed]]]),
        torch.cat([row_here[sent], row_here[remote.row[summed]]]),
        torch.cat([torch.full_like(sent, UNIT), _inverse(order)]),
        sum(send_counts),
        places.num_local,
    )

    summed_here = SUM_KEY * (rank + 1)
    outgoing_key = _keys(row_slot, rows.node, sum_slot, sums.node + summed_here)

    row_slot, sum_slot, recv_counts = _slots(
        num_ranks, cover.left & (rows.receiver == rank), rows.sender, cover.right & (sums.receiver == rank), sums.sender
    )
    is_post, remote_in = is_post[~starts_here], (~starts_here).nonzero().view(-1)
    carried, summed = remote_in[is_post], remote_in[~is_post]
    arriving = (sum_slot >= 0).nonzero().view(-1)
    incoming = CSR.from_edges(
        torch.cat([sum_here[remote.sum[carried]], sum_here[arriving]]) - places.num_inner,
        torch.cat([row_slot[remote.row[carried]], sum_slot[arriving]]),
        torch.cat([places.remote_edge[is_post], torch.full_like(arriving, UNIT)]),
        places.num_local - places.num_inner,
        sum(recv_counts),
    )
    order, weight_send_counts = _by_peer(sums.sender[remote.sum[summed]], num_ranks)
    weights_to_send = places.remote_edge[~is_post][order]
    incoming_key = _keys(row_slot, rows.node + summed_here, sum_slot, sums.node)
    return Transfer(
        outgoing,
        incoming,
        send_counts,
        recv_counts,
        weights_to_send,
        weight_send_counts,
        weight_recv_counts,
        outgoing_key,
        incoming_key,
    )


def no_transfer(num_ranks: int, num_local: int, num_boundary: int) -> Transfer:
    """The lists of a rank without remote edges."""
    none, peers = torch.empty(0, dtype=torch.int64), (0,) * num_ranks
    rowptr, col = torch.zeros(num_boundary + 1, dtype=torch.int64), none.int()
    outgoing, incoming = CSR(rowptr[:1], col, None, num_local), CSR(rowptr, col, None, 0)
    return Transfer(outgoing, incoming, peers, peers, none, peers, peers, none, none)


def _slots(
    num_ranks: int, row_is_here: Tensor, row_peer: Tensor, sum_is_here: Tensor, sum_peer: Tensor
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """The slot of each row and of each sum in one buffer of this rank (-1: not in it), int32, and the slots by peer."""
    row, total = row_is_here.nonzero().view(-1), sum_is_here.nonzero().view(-1)
    order, counts = _by_peer(torch.cat([row_peer[row], sum_peer[total]]), num_ranks)
    row_slot, sum_slot = (torch.full_like(peer, -1, dtype=torch.int32) for peer in (row_peer, sum_peer))
    slot = _inverse(order).to(torch.int32)
    row_slot[row], sum_slot[total] = slot[: row.numel()], slot[row.numel() :]
    return row_slot, sum_slot, counts


def _keys(row_slot: Tensor, row_key: Tensor, sum_slot: Tensor, sum_key: Tensor) -> Tensor:
    """The keys by slot."""
    slot, key = torch.cat([row_slot, sum_slot]), torch.cat([row_key, sum_key])
    used = slot >= 0
    return torch.empty_like(key[used]).scatter_(0, slot[used].long(), key[used])


def _local_ids(candidates: Candidates, is_here: Tensor, places: Places) -> Tensor:
    """The local ids of those whose node is here (-1: elsewhere), int32."""
    found = torch.full_like(candidates.node, -1, dtype=torch.int32)
    found[is_here] = places.local_id(candidates.node[is_here]).to(torch.int32)
    return found


def _by_peer(peer: Tensor, num_ranks: int) -> tuple[Tensor, tuple[int, ...]]:
    """A stable order by peer, and the counts."""
    return torch.argsort(peer, stable=True), tuple(torch.bincount(peer, minlength=num_ranks).tolist())


def _inverse(order: Tensor) -> Tensor:
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
