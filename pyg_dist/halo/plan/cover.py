"""Remote edges, their source on one rank and their target on another, and the fewest rows that carry them.

An edge j -> i from rank p to rank q is carried by row x_j, sent from p to q (*post*: q aggregates), or by the partial
sum for i that p computes and sends to q (*pre*). One row x_j serves all edges of j into q, one sum all edges from p
into i. So what is sent is a vertex cover of a bipartite graph: rows that could be sent on the left, partial sums on the
right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host, ops
from pyg_dist.backend.ops.memory import release_after
from pyg_dist.errors import OptionError

Array = np.ndarray[Any, Any]

ExchangeKind = Literal["post", "pre", "hybrid"]
EXCHANGES: tuple[ExchangeKind, ...] = ("post", "pre", "hybrid")


BothEnds = Tensor | tuple[Tensor, Tensor]
"""A value for each node of a graph: a pair, of its sources and its targets, where these are two sets of nodes."""


def both_ends(given: BothEnds) -> tuple[Tensor, Tensor]:
    """The values of the sources, and those of the targets."""
    return given if isinstance(given, tuple) else (given, given)


class Cover(NamedTuple):
    """The chosen vertices: rows (left), bool ``[L]``, and sums (right), bool ``[R]``.

    An edge whose row is chosen is a post edge, else a pre edge.
    """

    left: Tensor
    right: Tensor

    @staticmethod
    def uniform(exchange: ExchangeKind, num_rows: int, num_sums: int) -> Cover:
        """All rows, or all sums."""
        is_post = exchange == "post"
        return Cover(host.full((num_rows,), is_post), host.full((num_sums,), not is_post))


@dataclass(frozen=True)
class Candidates:
    """Rows that could be sent, in the order (sender, receiver, node).

    Ranks are integers ``[k]``, nodes global ids, int64 ``[k]``.
    """

    sender: Tensor
    receiver: Tensor
    node: Tensor

    def __len__(self) -> int:
        return self.node.numel()


@dataclass(frozen=True)
class RemoteEdges:
    """Edges between any ranks.

    By ascending ``sum``, in input order for each: both ranks of a pair have them in the same order.
    """

    num_ranks: int  # P
    edge: Tensor  # global ids of the edges, int64 ``[m]``
    row: Tensor  # which of ``rows`` could carry each edge, int32 ``[m]``
    sum: Tensor  # and which of ``sums``, int32 ``[m]``
    rows: Candidates  # their node is a source
    sums: Candidates  # partial sums; their node is a target
    load: Tensor  # in-edges of the nodes of each rank, ``[P]``

    @staticmethod
    def of(edge_index: Tensor, parts: BothEnds, num_ranks: int) -> RemoteEdges:
        """The remote edges of the whole graph. Not collective, O(E log E) time.

        Shapes:
            - edge_index: int64 ``[2, E]``
            - parts: ``[N]`` integers, or those of the sources and those of the targets
        """
        of_sources, of_targets = both_ends(parts)
        sender, receiver = of_sources[edge_index[0]], of_targets[edge_index[1]]
        load = torch.bincount(receiver, minlength=num_ranks)
        edge = host.flatnonzero(sender != receiver)
        num_nodes = max(of_sources.numel(), of_targets.numel())
        pair, (source, target) = sender[edge].long() * num_ranks + receiver[edge], edge_index[:, edge]
        row, sums_of, place, *ends = _by_sum(pair, source, target, num_nodes, num_ranks**2)
        rows, sums = (Candidates(pair // num_ranks, pair % num_ranks, node) for pair, node in ends)
        return RemoteEdges(
            num_ranks, edge if place is None else edge.index_select(0, place), row, sums_of, rows, sums, load
        )

    @staticmethod
    def of_ways(arriving: OneWay, leaving: OneWay, load: Tensor) -> RemoteEdges:
        """The remote edges of one rank, from those of both directions. They have no global ids."""

        def joined(first: Ends, last: Ends) -> Candidates:
            peers = [ends.peers() for ends in (first, last)]
            own = [torch.full_like(peer, arriving.rank) for peer in peers]
            node = torch.cat([first.node, last.node])
            return Candidates(torch.cat([peers[0], own[1]]), torch.cat([own[0], peers[1]]), node)

        rows, sums = joined(arriving.rows, leaving.rows), joined(arriving.sums, leaving.sums)
        row = torch.cat([arriving.row, leaving.row + len(arriving.rows)])
        sums_of = torch.cat([arriving.sum, leaving.sum + len(arriving.sums)])
        return RemoteEdges(arriving.num_ranks, row, row, sums_of, rows, sums, load)

    def cover(self, exchange: ExchangeKind) -> Cover:
        """Which rows and sums are sent.

        ``hybrid`` sends as few as can be (SuperGCN, Alg. 1). How many go from p to q is the same in every minimum
        cover, and so the traffic of each rank, sent and received. What remains to choose (see
        :func:`minimum_vertex_cover`) is which of the two ranks multiplies: the one whose nodes have fewer in-edges.
        Both sides of a pair find the same cover, and so does who looks at all pairs together.
        """
        if exchange != "hybrid":
            return Cover.uniform(exchange, len(self.rows), len(self.sums))
        receiver_multiplies = self.load[self.rows.receiver] <= self.load[self.rows.sender]
        return minimum_vertex_cover(self.row, self.sum, len(self.rows), len(self.sums), receiver_multiplies)


_ROUNDS = 2
"""In batches of 256 seeds of Amazon Computers, PubMed and Coauthor CS, 2 random or 4 METIS parts, up to 4.3 % more rows
than the fewest cross, with one round 6.7 %, with four 3.5 %; at fan-outs [10, 10] up to 0.6 %."""

_MARKS = 4
"""Keys are marked in a table of all, not hashed, where one in so many is there."""


def _by_sum(
    pair: Tensor, source: Tensor, target: Tensor, num_nodes: int, num_pairs: int
) -> tuple[Tensor, Tensor, Tensor | None, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The row and the sum of each edge, by ascending sum, and which edge it is; keys of the rows and of the sums."""
    row, rows = _candidates(pair, source, num_nodes, num_pairs)
    sums_of, sums = _candidates(pair, target, num_nodes, num_pairs)
    start, row, place = ops.csr_from_edges(sums_of, row, None, len(sums[0]), len(rows[0]))
    number = host.arange(len(sums[0]), dtype=torch.int32)
    return row, torch.repeat_interleave(number, start.diff(), output_size=row.numel()), place, rows, sums


def _candidates(pair: Tensor, node: Tensor, num_nodes: int, num_pairs: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Number the distinct (pair of ranks, node): the number of each edge, and the pairs, int32, and nodes of these."""
    key, stride = pair * num_nodes + node, max(num_nodes, 1)
    span = num_nodes * num_pairs
    if span <= min(_MARKS * key.numel(), 2**31 - 1):  # places are int32
        place_of = host.full((span,), -1, dtype=torch.int32)
        keys, number = ops.add_places(place_of, key, 0), place_of.index_select(0, key)
    else:
        first, number = ops.distinct(key[:0], key)
        keys = key.index_select(0, first)
    pair_of = keys // stride
    return number, (pair_of.to(torch.int32), keys - pair_of * stride)


@dataclass(frozen=True)
class Ends:
    """Distinct ends of some edges of one rank, sources or targets: what rows, or sums, could be sent for.

    Global ids, int64 ``[k]``, by peer and ascending for each, and their numbers by peer, ``[P]``.
    """

    node: Tensor
    counts: tuple[int, ...]

    def __len__(self) -> int:
        return self.node.numel()

    def peers(self) -> Tensor:
        """The peer of each end, int64 ``[k]``."""
        return torch.repeat_interleave(host.arange(len(self.counts)), host.tensor(self.counts))

    def counts_of(self, place: Tensor) -> list[int]:
        """How many of each peer's there are among some, given by their places, which ascend or stay."""
        bounds = host.tensor((0, *self.counts)).cumsum(0, dtype=place.dtype)
        counts: list[int] = torch.searchsorted(place, bounds).diff().tolist()
        return counts


@dataclass(frozen=True)
class OneWay:
    """:class:`RemoteEdges` between one rank and all others in one direction: whether they leave it.

    ``edge`` is None where it is not needed, as the edges are stored elsewhere.
    """

    rank: int
    leaves: bool
    edge: Tensor | None
    row: Tensor
    sum: Tensor
    rows: Ends
    sums: Ends

    @property
    def num_ranks(self) -> int:
        """P."""
        return len(self.rows.counts)

    @staticmethod
    def of_list(
        edge: Tensor | None,
        source: Tensor,
        target: Tensor,
        peer: Tensor,
        num_nodes: int,
        num_ranks: int,
        rank: int,
        leaves: bool,
    ) -> OneWay:
        """The edges of one direction, in input order, given the other rank of each. Not collective, O(m) time."""
        row, sums_of, place, *ends = _by_sum(peer, source, target, num_nodes, num_ranks)
        rows, sums = (Ends(node, tuple(torch.bincount(of, minlength=num_ranks).tolist())) for of, node in ends)
        if place is not None and edge is not None:
            edge = edge.index_select(0, place)
        return OneWay(rank, leaves, edge, row, sums_of, rows, sums)

    @staticmethod
    def both(
        edge: Tensor, source: Tensor, target: Tensor, sender: Tensor, receiver: Tensor, num_nodes: int, num_ranks: int,
        rank: int,
    ) -> tuple[OneWay, OneWay]:  # fmt: skip
        """The edges that end on ``rank``, and those that begin there, of a list in input order of edges that do either.

        ``sender`` and ``receiver`` are the owners of their ends. Not collective, O(m) time.
        """

        def one_way(leaves: bool, own: Tensor, peer: Tensor) -> OneWay:
            some = host.flatnonzero(own == rank)
            number, begin, end, other = (column.index_select(0, some) for column in (edge, source, target, peer))
            return OneWay.of_list(number, begin, end, other.long(), num_nodes, num_ranks, rank, leaves)

        return one_way(False, receiver, sender), one_way(True, sender, receiver)

    def cover(self, exchange: ExchangeKind, load: Tensor, each_step: bool = False) -> Cover:
        """:meth:`RemoteEdges.cover` of these edges; ``load``: in-edges of the nodes of each rank, ``[P]``.

        ``each_step``: whether it is made anew in each step, as for mini-batches.
        """
        if exchange != "hybrid":
            return self.uniform_cover(exchange)
        at_target, at_source = (load, load[self.rank]) if self.leaves else (load[self.rank], load)
        prefer_left = torch.repeat_interleave(at_target <= at_source, host.tensor(self.rows.counts))
        return minimum_vertex_cover(self.row, self.sum, len(self.rows), len(self.sums), prefer_left, each_step)

    def batch_cover(self, exchange: ExchangeKind) -> Cover:
        """:meth:`cover` of drawn edges, with a few more rows for ``hybrid``. Both ranks of a pair find the same; O(m).

        All sums are sent at first. A row is sent where two sums or more have edges of this row alone, in place of these
        sums; then again with the sums that are left, :data:`_ROUNDS` times in all (Karp and Sipser, 1981, of one side).
        A pair of ranks with fewer rows than that sends all rows instead.
        """
        if exchange != "hybrid":
            return self.uniform_cover(exchange)
        left = host.zeros(len(self.rows), dtype=torch.bool)
        edges_of = left_of = torch.bincount(self.sum, minlength=len(self.sums))
        for _ in range(_ROUNDS):
            lone = masked(self.row, (left_of == 1).index_select(0, self.sum))
            left |= torch.bincount(lone, minlength=len(left)) >= 2
            carried = masked(self.sum, left.index_select(0, self.row))
            left_of = edges_of - torch.bincount(carried, minlength=len(edges_of))
        right = left_of > 0
        rows, sums = (host.tensor(ends.counts) for ends in (self.rows, self.sums))
        sent = host.tensor(self.rows.counts_of(host.flatnonzero(left)))
        sent += host.tensor(self.sums.counts_of(host.flatnonzero(right)))
        is_post = rows < sent
        return Cover(left | is_post.repeat_interleave(rows), right & ~is_post.repeat_interleave(sums))

    def uniform_cover(self, exchange: ExchangeKind) -> Cover:
        """All rows, or all sums."""
        return Cover.uniform(exchange, len(self.rows), len(self.sums))


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """The values that a mask selects. torch would make an int64 of each entry of the mask first."""
    return torch.from_numpy(values.numpy()[mask.numpy()])


def minimum_vertex_cover(
    left: Tensor,
    right: Tensor,
    num_left: int,
    num_right: int,
    prefer_left: Tensor | None = None,
    each_step: bool = False,
) -> Cover:
    r"""A minimum vertex cover, as large as a maximum matching (König). Exact, not collective, O(E sqrt(V)) time.

    With Z the left vertices that alternating paths reach from unmatched left ones, and Z' likewise on the right, every
    minimum cover holds the partners of Z and of Z' and not Z and Z' themselves (Dulmage and Mendelsohn, 1958). Between
    the other vertices, all matched, each connected component may take either side: ``prefer_left`` chooses. So the
    result depends on the graph and ``prefer_left`` alone and not on which maximum matching was found: ranks that see
    different parts of a graph agree on its components.

    Source: SuperGCN, Alg. 1, lines 1-3.

    ``left`` and ``right`` are the ends of the edges, ``[E]`` integers; ``prefer_left``, bool ``[L]``, says where to
    take the left side if both are minimum, the same for all vertices of a connected component. None: everywhere.
    ``each_step``: whether memory of this size is wanted again soon, as by the next mini-batch.

    Example:
        >>> minimum_vertex_cover(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2, 2)
        Cover(left=tensor([True, True]), right=tensor([False, False]))
    """
    if host.integers_to(max(num_left, num_right, left.numel())) != torch.int32:  # as the op counts
        raise OptionError(
            f"Expected at most 2**31 - 1 remote edges in one cover (got {left.numel()}): use more ranks or "
            f"exchange='post'"
        )
    if left.numel() == 0:
        return Cover(host.zeros(num_left, dtype=torch.bool), host.zeros(num_right, dtype=torch.bool))
    # From the smaller side nearly each vertex finds a partner at once; the others would search along long paths.
    if num_left <= num_right:
        right_of, left_of, from_left, from_right = _matching(left, right, num_left, num_right)
    else:
        left_of, right_of, from_right, from_left = _matching(right, left, num_right, num_left)
    release_after(left.numel(), each_step)
    is_matched = right_of >= 0
    in_left, in_right = np.zeros(num_left, dtype=bool), np.zeros(num_right, dtype=bool)
    in_right[right_of[from_left & is_matched]] = True
    in_left[left_of[from_right & (left_of >= 0)]] = True
    free = np.flatnonzero(is_matched & ~from_left & ~in_left)
    takes_left = np.ones(free.size, dtype=bool) if prefer_left is None else prefer_left.numpy()[free]
    in_left[free[takes_left]] = True
    in_right[right_of[free[~takes_left]]] = True
    return Cover(torch.from_numpy(in_left), torch.from_numpy(in_right))


def _matching(start: Tensor, end: Tensor, num_starts: int, num_ends: int) -> tuple[Array, Array, Array, Array]:
    """The end matched to each start in a maximum matching, or -1, the start matched to each end; Z and Z'."""
    edges = ops.csr_from_edges(start, end, None, num_starts, num_ends)
    end_of, from_starts, from_ends = (x.numpy() for x in ops.bipartite_matching(*edges[:2], num_ends))
    start_of, matched = np.full(num_ends, -1, dtype=np.int32), np.flatnonzero(end_of >= 0)
    start_of[end_of[matched]] = matched
    return end_of, start_of, from_starts, from_ends
