"""Each rank's numbers from the manifest's counts of edges between ranks, without the edges."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pyg_dist.halo.plan.remote_edges import EXCHANGES, ExchangeKind
from pyg_dist.halo.plan.sizes import ShareSizes


@dataclass(frozen=True)
class BlockNumbers:
    """Numbers of each block, sender by receiver, int64 ``[P, P]``; zero on the diagonal but for ``edges``.

    Attributes:
        edges: edges from one rank to another.
        rows: their distinct sources.
        sums: their distinct targets.
        post_edges: edges that ``hybrid`` carries by rows.
        post_rows: rows that it sends.
        pre_sums: sums that it sends.
        nodes: nodes of each rank, ``[P]``.
        boundary: of these, nodes with a source on another rank, ``[P]``.
    """

    edges: Tensor
    rows: Tensor
    sums: Tensor
    post_edges: Tensor
    post_rows: Tensor
    pre_sums: Tensor
    nodes: Tensor
    boundary: Tensor

    def sent(self, exchange: ExchangeKind) -> tuple[Tensor, Tensor, Tensor]:
        """Rows, sums, and edges carried by rows, ``[P, P]`` each."""
        crossing = self.edges - self.edges.diag().diag()
        none = crossing * 0
        return {
            "post": (self.rows, none, crossing),
            "pre": (none, self.sums, none),
            "hybrid": (self.post_rows, self.pre_sums, self.post_edges),
        }[exchange]


def block_sizes(numbers: BlockNumbers, exchange: ExchangeKind) -> tuple[tuple[ShareSizes, ...], Tensor]:
    """What :func:`~pyg_dist.halo.plan.sizes.all_sizes` counts, from blocks. Not collective, O(P^2) time."""
    rows, sums, by_row = numbers.sent(exchange)
    chosen = rows + sums
    crossing = numbers.edges - numbers.edges.diag().diag()
    load, halo_edges = numbers.edges.sum(0), crossing.sum(0)
    multiplied = by_row.sum(0) + (crossing - by_row).sum(1)
    columns: dict[str, Tensor] = {
        "nodes": numbers.nodes,
        "inner": numbers.nodes - numbers.boundary,
        "edges": load,
        "halo_edges": halo_edges,
        "work": load - halo_edges + multiplied + rows.sum(1) + sums.sum(0),
        "rows_sent": chosen.sum(1),
        "rows_received": chosen.sum(0),
        "messages": (chosen > 0).sum(1),
        **{kind: sum(numbers.sent(kind)[:2], start=crossing * 0).sum(1) for kind in EXCHANGES},
    }
    by_rank = zip(*(column.tolist() for column in columns.values()), strict=True)
    return tuple(ShareSizes(**dict(zip(columns, values, strict=True))) for values in by_rank), chosen
