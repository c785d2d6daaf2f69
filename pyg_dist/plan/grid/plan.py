"""What was decided for a graph on a mesh, for people and programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pyg_dist.backend.grid.mesh import GRID_AXES, RANK_ORDER, MeshShape
from pyg_dist.backend.session.agreement import digest
from pyg_dist.plan.grid.cost import memory_of
from pyg_dist.plan.grid.node_order import Balance, EdgeChunks, NodeOrder, choose_orders, tile_counts
from pyg_dist.plan.grid.tiling import INPUT, Sums, row_range
from pyg_dist.plan.grid.work import aggregation_bytes, work_of
from pyg_dist.plan.model import Model, Price, memory_range


@dataclass(frozen=True)
class GridPlan:
    """The plan of one :class:`~pyg_dist.DistributedData` in the grid layout, equal on every rank.

    Attributes:
        shape: the mesh.
        sums: the form of the two big sums.
        num_nodes: N.
        edges: edges of each rank's tile in the first layer, by rank.
        tries: node orders that were tried, and how even their tiles are; the last one is used.
        model: the convs that the mesh was chosen for.
        price: predicted for a training step of them.
        constants: the machine's that it was priced with.
        hash: digest of graph, mesh and options; equal plans have equal hashes.
    """

    shape: MeshShape
    sums: Sums
    num_nodes: int
    edges: tuple[int, ...]
    tries: tuple[Balance, ...]
    model: Model
    price: Price
    constants: str
    hash: str
    layout: str = "grid"

    @staticmethod
    def of(
        edges: EdgeChunks,
        model: Model,
        shape: MeshShape,
        sums: Sums,
        price: Price,
        constants: str,
        seed: int,
        identity: str,
    ) -> tuple[GridPlan, tuple[NodeOrder, ...]]:
        """The plan of a mesh, and its node orders (not collective).

        Args:
            edges: all of them.
            model: the convs; it has the number of nodes.
            shape: the mesh.
            sums: the form of the two big sums.
            price: of a step.
            constants: that it was priced with.
            seed: of the node orders.
            identity: digest of graph and options.
        """
        orders, tries = choose_orders(edges, model.num_nodes, shape, seed, sums)
        counts = torch.zeros(shape.z, shape.x, dtype=torch.int64)
        for source, target in edges():
            counts += tile_counts(target, source, orders[-1], orders[0], shape.z, shape.x)
        places = [shape.coordinates(rank) for rank in range(shape.size)]
        by_rank = tuple(int(counts[place["z"], place["x"]]) for place in places)
        name = digest(identity + repr((shape, sums)))
        return GridPlan(shape, sums, model.num_nodes, by_rank, tries, model, price, constants, name), orders

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.shape.size

    @property
    def nodes(self) -> list[int]:
        """Rows of x by rank."""
        return [
            len(row_range(self.num_nodes, INPUT, self.shape, self.shape.coordinates(rank)))
            for rank in range(self.ranks)
        ]

    def memory_bytes(self) -> list[int]:
        """See :func:`~pyg_dist.plan.grid.cost.memory_of`; by rank."""
        return [memory_of(self.model, self.shape, self.sums, rank) for rank in range(self.ranks)]

    def to_dict(self, widths: Sequence[int] = ()) -> dict[str, Any]:
        """Plain numbers for programs; ``bytes`` is by width, for float32, of one aggregation.

        Messages, ``step_bytes``, memory and seconds are of a training step of the model that the mesh was chosen for.
        """
        works = [work_of(self.model, self.shape, self.sums, rank) for rank in range(self.ranks)]
        return {
            "ranks": self.ranks,
            "layout": self.layout,
            "mesh": {axis: self.shape[axis] for axis in reversed(RANK_ORDER)},
            "sums": self.sums,
            "orders": self.tries[-1].method,
            "hash": self.hash,
            "nodes": self.nodes,
            "edges": list(self.edges),
            # No row goes to a rank for itself alone: collectives along axes carry blocks of rows.
            "rows": {},
            "messages": sum(work.num_messages(self.shape) for work in works),
            "bytes": {str(w): aggregation_bytes(self.model, self.shape, self.sums, w) for w in widths},
            "step_bytes": sum(work.num_bytes for work in works),
            "memory_bytes": self.memory_bytes(),
            "model": str(self.model),
            "predicted_seconds": self.price.seconds,
            "imbalance": {balance.method: balance.imbalance for balance in self.tries},
        }

    def describe(self, widths: Sequence[int] = ()) -> str:
        """A few lines for people."""
        tried = ", ".join(f"{b.method} {b.imbalance:.3f}" for b in self.tries)
        sides = " x ".join(str(self.shape[axis]) for axis in GRID_AXES)
        return "\n".join(
            [
                f"grid layout, mesh {self.shape} ({sides}), sums by {self.sums}, plan {self.hash[:12]}",
                f"node orders: {self.tries[-1].method} (max/mean of tiles: {tried})",
                f"edges by rank: {min(self.edges):,} to {max(self.edges):,}",
                f"predicted for a {self.model}: {self.price} a step; constants: {self.constants}",
                f"memory of a rank, about: {memory_range(self.memory_bytes())}",
                *(
                    f"width {w}: {aggregation_bytes(self.model, self.shape, self.sums, w):,} bytes per aggregation"
                    for w in widths
                ),
            ]
        )

    def plot(self, path: str | Path) -> None:
        """Draw edges by tile, and each rank's bytes (needs matplotlib). See :func:`pyg_dist.plan.plot.plot_grid`."""
        from pyg_dist.plan.plot import plot_grid

        plot_grid(self, path)
