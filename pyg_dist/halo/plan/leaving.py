"""What a rank sends for the edges of a batch: the ranks on which these end choose, and tell it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.ids import IdList
from pyg_dist.halo.plan.cover import Cover, Ends, OneWay, masked

Send = Callable[..., list[tuple[Tensor, list[int]]]]
""":attr:`~pyg_dist.graph.sample.CrossingEdges.send`"""


def told(arriving: OneWay, cover: Cover, send: Send) -> tuple[OneWay, Cover]:
    """What leaves a rank, given what arrives there (collective); O(m) time in the rows and in the edges of sums.

    Of the rows all are told, with one bit for those that carry their edges, and of the sums those that are sent: with
    how many edges each has, and the rows of these. So the edges that leave are those of sums alone, which have the same
    order on both ranks.
    """
    rows, sums = arriving.rows, cover.right.nonzero().view(-1)
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
