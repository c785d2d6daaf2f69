"""Each rank's numbers: read off its own share, or counted for all ranks at once from the whole graph."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.halo.plan.remote_edges import EXCHANGES, Candidates, ExchangeKind, RemoteEdges
from pyg_dist.halo.plan.share import HaloShare
from pyg_dist.halo.plan.vertex_cover import Cover


@dataclass(frozen=True)
class ShareSizes:
    """One rank's numbers.

    Attributes:
        nodes: nodes owned.
        inner: of these, nodes without remote sources.
        edges: in-edges of these nodes.
        halo_edges: of these, edges with a remote source.
        work: rows that are read and added in one aggregation (entries of all matrices of the product).
        rows_sent: rows sent in one aggregation by the chosen exchange.
        rows_received: rows received in one aggregation by the chosen exchange.
        messages: messages sent in one aggregation.
        post: rows sent in one aggregation, were the exchange post.
        pre: the same for pre.
        hybrid: the same for hybrid.
    """

    nodes: int
    inner: int
    edges: int
    halo_edges: int
    work: int
    rows_sent: int
    rows_received: int
    messages: int
    post: int
    pre: int
    hybrid: int

    @staticmethod
    def of(share: HaloShare) -> ShareSizes:
        """Read them off a share."""
        return ShareSizes(
            nodes=share.node_id.numel(),
            inner=share.num_inner,
            edges=share.edge_id.numel(),
            halo_edges=share.row_transfer.incoming.num_entries,
            work=share.local.num_entries
            + share.sum_transfer.outgoing.num_entries
            + share.sum_transfer.incoming.num_entries,
            rows_sent=sum(share.sum_transfer.send_counts),
            rows_received=sum(share.sum_transfer.recv_counts),
            messages=sum(count > 0 for count in share.sum_transfer.send_counts),
            **share.rows_sent,
        )


def all_sizes(
    edge_index: Tensor, parts: Tensor, num_ranks: int, exchange: ExchangeKind = "hybrid"
) -> tuple[tuple[ShareSizes, ...], Tensor]:
    """The sizes of every rank's share, and the rows that go from each rank to each. Not collective, O(E log E) time.

    Nothing is laid out: 512 ranks cost as much as two.

    Shapes:
        - edge_index: int64 ``[2, E]``
        - parts: ``[N]`` integers
        - output: P sizes; int64 ``[P, P]``, sender by receiver
    """
    remote = RemoteEdges.of(edge_index, parts, num_ranks)

    def count(ranks: Tensor) -> Tensor:
        return torch.bincount(ranks, minlength=num_ranks)

    covers = {kind: remote.cover(kind) for kind in EXCHANGES}
    cover = covers[exchange]
    chosen = rows_between(remote, cover)
    is_post = cover.left[remote.row]
    halo_edges = count(remote.rows.receiver[remote.row])
    multiplied = count(remote.rows.receiver[remote.row[is_post]]) + count(remote.rows.sender[remote.row[~is_post]])
    rows_moved = count(remote.rows.sender[cover.left]) + count(remote.sums.receiver[cover.right])
    nodes = count(parts)
    columns: dict[str, Tensor] = {
        "nodes": nodes,
        "inner": nodes - count(parts[_distinct_nodes(remote.sums, parts.numel())]),
        "edges": remote.load,
        "halo_edges": halo_edges,
        "work": remote.load - halo_edges + multiplied + rows_moved,
        "rows_sent": chosen.sum(1),
        "rows_received": chosen.sum(0),
        "messages": (chosen > 0).sum(1),
        **{kind: count(remote.rows.sender[c.left]) + count(remote.sums.sender[c.right]) for kind, c in covers.items()},
    }
    by_rank = zip(*(column.tolist() for column in columns.values()), strict=True)
    return tuple(ShareSizes(**dict(zip(columns, values, strict=True))) for values in by_rank), chosen


def rows_between(remote: RemoteEdges, cover: Cover) -> Tensor:
    """Rows and sums that a cover sends, int64 ``[P, P]``, sender by receiver."""
    num_ranks = remote.num_ranks
    pairs = [
        kind.sender[chosen] * num_ranks + kind.receiver[chosen]
        for kind, chosen in ((remote.rows, cover.left), (remote.sums, cover.right))
    ]
    return torch.bincount(torch.cat(pairs), minlength=num_ranks**2).view(num_ranks, num_ranks)


def _distinct_nodes(candidates: Candidates, num_nodes: int) -> Tensor:
    is_there = torch.zeros(num_nodes, dtype=torch.bool)
    is_there[candidates.node] = True
    return is_there.nonzero().view(-1)
