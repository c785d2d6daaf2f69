"""Remote edges, their source on one rank and their target on another, as a bipartite graph of what could be sent.

An edge j -> i from rank p to rank q is carried by row x_j, sent from p to q (*post*: q aggregates), or by the partial
sum for i that p computes and sends to q (*pre*). One row x_j serves all edges of j into q, one sum all edges from p
into i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.halo.plan.vertex_cover import Cover, minimum_vertex_cover

ExchangeKind = Literal["post", "pre", "hybrid"]
EXCHANGES: tuple[ExchangeKind, ...] = ("post", "pre", "hybrid")


@dataclass(frozen=True)
class Candidates:
    """Rows that could be sent, in the order (sender, receiver, node); of one rank, those that arrive first.

    Attributes:
        sender, receiver: ranks, int32 ``[k]``.
        node: global ids, int64 ``[k]``.
    """

    sender: Tensor
    receiver: Tensor
    node: Tensor

    def __len__(self) -> int:
        return self.node.numel()


class Arriving(NamedTuple):
    """How many remote edges, rows and sums of a rank end there; they are before those that begin there."""

    edges: int
    rows: int
    sums: int


@dataclass(frozen=True)
class RemoteEdges:
    """See the module. By ascending ``sum``, in input order for each: both ranks of a pair have them in the same order.

    Attributes:
        num_ranks: number of ranks P.
        edge: global ids of the edges, int64 ``[m]``.
        row: which row of ``rows`` could carry each edge, int32 ``[m]``.
        sum: which sum of ``sums`` could carry each edge, int32 ``[m]``.
        rows: the rows; their node is a source.
        sums: the partial sums; their node is a target.
        load: in-edges of the nodes of each rank, ``[P]``.
    """

    num_ranks: int
    edge: Tensor
    row: Tensor
    sum: Tensor
    rows: Candidates
    sums: Candidates
    load: Tensor

    @staticmethod
    def of(edge_index: Tensor, parts: Tensor, num_ranks: int, rank: int | None = None) -> RemoteEdges:
        """Those of the whole graph, or those that begin or end on ``rank``. Not collective, O(E log E) time.

        Shapes:
            - edge_index: int64 ``[2, E]``
            - parts: ``[N]`` integers
        """
        sender, receiver = parts[edge_index[0]], parts[edge_index[1]]
        load = torch.bincount(receiver, minlength=num_ranks)
        is_remote = sender != receiver
        if rank is not None:
            is_remote &= (sender == rank) | (receiver == rank)
        edge = is_remote.nonzero().view(-1)
        source, target = edge_index[0, edge], edge_index[1, edge]
        return RemoteEdges.of_list(edge, source, target, sender[edge], receiver[edge], parts.numel(), load, rank)

    @staticmethod
    def of_list(
        edge: Tensor,
        source: Tensor,
        target: Tensor,
        sender: Tensor,
        receiver: Tensor,
        num_nodes: int,
        load: Tensor,
        rank: int | None = None,
    ) -> RemoteEdges:
        """Of edges that are known with the owners of both ends. Not collective, O(m log m) time.

        Args:
            edge: see the class, here in input order.
            source: of each edge.
            target: of each edge.
            sender: the owner of its source.
            receiver: the owner of its target.
            num_nodes: nodes of the whole graph.
            load: see the class.
            rank: where all of them begin or end.
        """
        num_ranks = load.numel()
        if rank is None:
            pair = sender.long() * num_ranks + receiver
        else:
            pair = torch.where(sender == rank, num_ranks + receiver.long(), sender.long())
        row, rows = _candidates(pair, source, num_nodes, num_ranks, rank)
        sums_of, sums = _candidates(pair, target, num_nodes, num_ranks, rank)
        start, row, place = ops.csr_from_edges(sums_of, row, None, len(sums), len(rows))
        number = torch.arange(len(sums), dtype=torch.int32)
        sums_of = torch.repeat_interleave(number, start.diff(), output_size=row.numel())
        return RemoteEdges(num_ranks, edge if place is None else edge[place], row, sums_of, rows, sums, load)

    def arriving(self, rank: int) -> Arriving:
        """How many end on ``rank``, where all of them begin or end: they are the first ones."""
        rows, sums = (int((kind.receiver == rank).sum()) for kind in (self.rows, self.sums))
        edges = int(torch.searchsorted(self.sum, torch.tensor(sums, dtype=torch.int32)))
        return Arriving(edges, rows, sums)

    def cover(self, exchange: ExchangeKind) -> Cover:
        """Which rows (left) and sums (right) are sent. An edge whose row is sent is a post edge, else a pre edge.

        ``hybrid`` sends as few as can be (SuperGCN, Alg. 1). How many go from p to q is the same in every minimum
        cover, and so the traffic of each rank, sent and received. What remains to choose (see
        :func:`~pyg_dist.halo.plan.vertex_cover.minimum_vertex_cover`) is which of the two ranks multiplies: the one
        whose nodes have fewer in-edges. Both sides of a pair find the same cover, and so does who looks at all pairs
        together.
        """
        if exchange != "hybrid":
            is_post = exchange == "post"
            return Cover(
                torch.full((len(self.rows),), is_post, dtype=torch.bool),
                torch.full((len(self.sums),), not is_post, dtype=torch.bool),
            )
        receiver_multiplies = self.load[self.rows.receiver] <= self.load[self.rows.sender]
        return minimum_vertex_cover(self.row, self.sum, len(self.rows), len(self.sums), receiver_multiplies)


def _candidates(
    pair: Tensor, node: Tensor, num_nodes: int, num_ranks: int, rank: int | None
) -> tuple[Tensor, Candidates]:
    """Number the distinct (pair of ranks, node): the number of each edge, and what the numbers stand for."""
    keys, number = torch.unique(pair * num_nodes + node, sorted=True, return_inverse=True)
    stride = max(num_nodes, 1)
    pair_of = (keys // stride).to(torch.int32)
    sender, receiver = pair_of // num_ranks, pair_of % num_ranks
    if rank is not None:
        leaves, peer = sender == 1, receiver
        sender, receiver = torch.where(leaves, rank, peer), torch.where(leaves, peer, rank)
    return number, Candidates(sender, receiver, keys % stride)
