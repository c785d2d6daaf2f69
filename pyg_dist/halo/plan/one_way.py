"""The edges between one rank and all others in one direction: those that end there, or those that begin there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.halo.plan.remote_edges import ExchangeKind, RemoteEdges
from pyg_dist.halo.plan.vertex_cover import Cover, minimum_vertex_cover


@dataclass(frozen=True)
class Ends:
    """Distinct ends of some edges, sources or targets: what rows, or sums, could be sent for.

    Attributes:
        node: global ids, by peer and ascending for each, int64 ``[k]``.
        counts: by peer, ``[P]``.
    """

    node: Tensor
    counts: tuple[int, ...]

    def __len__(self) -> int:
        return self.node.numel()

    def of_peers(self, values: Tensor) -> Tensor:
        """The value of the peer of each. Shapes: ``[P] -> [k]``."""
        return torch.repeat_interleave(values, torch.tensor(self.counts))

    def counts_of(self, place: Tensor) -> list[int]:
        """How many of each peer's there are among some, given by their places, which ascend or stay."""
        bounds = torch.tensor((0, *self.counts)).cumsum(0, dtype=place.dtype)
        counts: list[int] = torch.searchsorted(place, bounds).diff().tolist()
        return counts


@dataclass(frozen=True)
class OneWay:
    """See the module. By ascending ``sum``, in input order for each: both ranks of a pair have them in the same order.

    Attributes:
        rank: the rank.
        leaves: whether they begin there.
        edge: global ids of the edges, int64 ``[m]``; None where they are not needed, as the edges are stored elsewhere.
        row: which of ``rows`` is each edge's source, int32 ``[m]``.
        sum: which of ``sums`` is each edge's target, int32 ``[m]``.
        rows: the distinct sources.
        sums: the distinct targets.
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
    def both(remote: RemoteEdges, rank: int) -> tuple[OneWay, OneWay]:
        """Those that end on ``rank``, and those that begin there, of edges that all do one of the two."""
        here = remote.arriving(rank)

        def ends(node: Tensor, peer: Tensor) -> Ends:
            return Ends(node, tuple(torch.bincount(peer, minlength=remote.num_ranks).tolist()))

        rows, sums = remote.rows, remote.sums
        arriving = OneWay(
            rank, False, remote.edge[: here.edges], remote.row[: here.edges], remote.sum[: here.edges],
            ends(rows.node[: here.rows], rows.sender[: here.rows]),
            ends(sums.node[: here.sums], sums.sender[: here.sums]),
        )  # fmt: skip
        leaving = OneWay(
            rank, True, remote.edge[here.edges :], remote.row[here.edges :] - here.rows,
            remote.sum[here.edges :] - here.sums,
            ends(rows.node[here.rows :], rows.receiver[here.rows :]),
            ends(sums.node[here.sums :], sums.receiver[here.sums :]),
        )  # fmt: skip
        return arriving, leaving

    def cover(self, exchange: ExchangeKind, load: Tensor) -> Cover:
        """Which rows and sums are sent: :meth:`~pyg_dist.halo.plan.remote_edges.RemoteEdges.cover` of these edges.

        Args:
            exchange: what to send.
            load: in-edges of the nodes of each rank, ``[P]``.
        """
        if exchange != "hybrid":
            return self.uniform_cover(exchange)
        at_target, at_source = (load, load[self.rank]) if self.leaves else (load[self.rank], load)
        return minimum_vertex_cover(
            self.row, self.sum, len(self.rows), len(self.sums), self.rows.of_peers(at_target <= at_source)
        )

    def uniform_cover(self, exchange: ExchangeKind) -> Cover:
        """All rows, or all sums."""
        is_post = exchange == "post"
        return Cover(
            torch.full((len(self.rows),), is_post, dtype=torch.bool),
            torch.full((len(self.sums),), not is_post, dtype=torch.bool),
        )
