"""What was decided before training, for people and programs: sizes, balance and traffic of every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyg_dist.plan.halo import HaloShare
from pyg_dist.plan.remote import EXCHANGES, Exchange


@dataclass(frozen=True)
class ShareSizes:
    """One rank's numbers.

    Attributes:
        nodes: nodes owned.
        inner: of these, nodes without remote sources.
        edges: edges executed.
        halo_edges: of these, edges with a remote source.
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
            halo_edges=share.post.incoming.num_entries,
            rows_sent=sum(share.sums.send_counts),
            rows_received=sum(share.sums.recv_counts),
            messages=sum(count > 0 for count in share.sums.send_counts),
            **share.rows_sent,
        )


@dataclass(frozen=True)
class Plan:
    """The plan of one :class:`~pyg_dist.DistributedData`, equal on every rank.

    Attributes:
        layout: ``"halo"``.
        partition: how the parts were made.
        exchange: ``"post"``, ``"pre"`` or ``"hybrid"``.
        sizes: each rank's numbers, by rank.
        hash: digest of graph, parts and options; equal plans have equal hashes.
    """

    layout: str
    partition: str
    exchange: Exchange
    sizes: tuple[ShareSizes, ...]
    hash: str

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.sizes)

    @property
    def rows(self) -> dict[str, int]:
        """Rows sent in one aggregation, all ranks together, by kind of exchange."""
        return {kind: sum(getattr(s, kind) for s in self.sizes) for kind in EXCHANGES}

    @property
    def messages(self) -> int:
        """Messages sent in one aggregation, all ranks together."""
        return sum(s.messages for s in self.sizes)

    def halo_bytes(self, width: int, element_size: int = 4) -> int:
        """Bytes sent in one aggregation of ``width`` columns, all ranks together; the backward sends as many."""
        return self.rows[self.exchange] * width * element_size

    @staticmethod
    def imbalance(values: list[int]) -> float:
        """Largest over mean: 1.0 is even."""
        return max(values) * len(values) / sum(values) if sum(values) else 1.0

    def to_dict(self, widths: tuple[int, ...] = ()) -> dict[str, Any]:
        """Plain numbers for programs; ``bytes`` is by width, for float32."""
        return {
            "ranks": self.ranks,
            "layout": self.layout,
            "partition": self.partition,
            "exchange": self.exchange,
            "hash": self.hash,
            "nodes": [s.nodes for s in self.sizes],
            "edges": [s.edges for s in self.sizes],
            "inner": [s.inner for s in self.sizes],
            "halo_edges": [s.halo_edges for s in self.sizes],
            "rows": self.rows,
            "rows_sent": [s.rows_sent for s in self.sizes],
            "rows_received": [s.rows_received for s in self.sizes],
            "messages": self.messages,
            "bytes": {str(width): self.halo_bytes(width) for width in widths},
            "imbalance": {
                "nodes": self.imbalance([s.nodes for s in self.sizes]),
                "edges": self.imbalance([s.edges for s in self.sizes]),
                "rows_sent": self.imbalance([s.rows_sent for s in self.sizes]),
            },
        }

    def describe(self, widths: tuple[int, ...] = ()) -> str:
        """A table for people: one line per rank, then the totals."""
        columns = ("nodes", "inner", "edges", "halo_edges", "rows_sent", "rows_received", "messages")
        header = ["rank", *(c.replace("_", " ") for c in columns)]
        lines = [[str(rank), *(f"{getattr(s, c):,}" for c in columns)] for rank, s in enumerate(self.sizes)]
        lines.append(["all", *(f"{sum(getattr(s, c) for s in self.sizes):,}" for c in columns)])
        lines.append(["max/mean", *(f"{self.imbalance([getattr(s, c) for s in self.sizes]):.2f}" for c in columns)])
        width_of = [max(len(row[k]) for row in [header, *lines]) for k in range(len(header))]
        table = ["  ".join(cell.rjust(w) for cell, w in zip(row, width_of, strict=True)) for row in [header, *lines]]
        title = f"{self.layout} layout, {self.partition} partition, {self.exchange} exchange, plan {self.hash[:12]}"
        traffic = [f"width {w}: {self.halo_bytes(w):,} bytes per aggregation" for w in widths]
        return "\n".join([title, *table, *traffic])
