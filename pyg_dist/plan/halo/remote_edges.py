"""Remote edges, their source on one rank and their target on another, as a bipartite graph of what could be sent.

An edge j -> i from rank p to rank q is carried by row x_j, sent from p to q (*post*: q aggregates), or by the partial
sum for i that p computes and sends to q (*pre*). One row x_j serves all edges of j into q, one sum all edges from p
into i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from pyg_dist.plan.halo.vertex_cover import Cover, minimum_vertex_cover

Exchange = Literal["post", "pre", "hybrid"]
EXCHANGES: tuple[Exchange, ...] = ("post", "pre", "hybrid")


@dataclass(frozen=True)
class Candidates:
    """Rows that could be sent, in the order (sender, receiver, node).

    Attributes:
        sender, receiver, node: int64 ``[k]``.
    """

    sender: Tensor
    receiver: Tensor
    node: Tensor

    def __len__(self) -> int:
        return self.node.numel()


@dataclass(frozen=True)
class RemoteEdges:
    """See the module.

    Attributes:
        num_ranks: number of ranks P.
        edge: global ids of the edges, ascending, int64 ``[m]``.
        row: which row of ``rows`` could carry each edge, integers ``[m]``.
        sum: which sum of ``sums`` could carry each edge, integers ``[m]``.
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
        return RemoteEdges.of_list(edge, source, target, sender[edge], receiver[edge], parts.numel(), load)

    @staticmethod
    def of_list(
        edge: Tensor, source: Tensor, target: Tensor, sender: Tensor, receiver: Tensor, num_nodes: int, load: Tensor
    ) -> RemoteEdges:
        """Of edges that are known with the owners of both ends. Not collective, O(m log m) time.

        Args:
            edge: see the class.
            source: of each edge.
            target: of each edge.
            sender: the owner of its source.
            receiver: the owner of its target.
            num_nodes: nodes of the whole graph.
            load: see the class.
        """
        num_ranks = load.numel()
        pair = sender.long() * num_ranks + receiver
        row, rows = _candidates(pair, source, num_nodes, num_ranks)
        sums_of, sums = _candidates(pair, target, num_nodes, num_ranks)
        return RemoteEdges(num_ranks, edge, row, sums_of, rows, sums, load)

    def known_cover(self, is_post: Tensor) -> Cover:
        """The cover of which it is known which edges are post edges, bool ``[m]``: no matching is needed."""
        left = torch.zeros(len(self.rows), dtype=torch.bool)
        right = torch.zeros(len(self.sums), dtype=torch.bool)
        left[self.row[is_post]] = True
        right[self.sum[~is_post]] = True
        return Cover(left, right)

    def cover(self, exchange: Exchange) -> Cover:
        """Which rows (left) and sums (right) are sent. An edge whose row is sent is a post edge, else a pre edge.

        ``hybrid`` sends as few as can be (SuperGCN, Alg. 1). How many go from p to q is the same in every minimum
        cover, and so the traffic of each rank, sent and received. What remains to choose (see
        :func:`~pyg_dist.plan.halo.vertex_cover.minimum_vertex_cover`) is which of the two ranks multiplies: the one
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


def _candidates(pair: Tensor, node: Tensor, num_nodes: int, num_ranks: int) -> tuple[Tensor, Candidates]:
    """Number the distinct (pair of ranks, node): the number of each edge, and what the numbers stand for."""
    keys, number = torch.unique(pair * num_nodes + node, sorted=True, return_inverse=True)
    stride = max(num_nodes, 1)
    pair_of = keys // stride
    return number, Candidates(pair_of // num_ranks, pair_of % num_ranks, keys % stride)
