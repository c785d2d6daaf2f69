"""The plan of a graph on a mesh: its sizes, price, tables and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pyg_dist.backend import host
from pyg_dist.backend.session.agreement import digest
from pyg_dist.grid.plan.cost import Candidate, memory_of, price_of
from pyg_dist.grid.plan.mesh_shape import GRID_AXES, INPUT, RANK_ORDER, MeshShape, Sums, row_range
from pyg_dist.grid.plan.node_order import Balance, EdgeChunks, ListedOrder, choose_orders, tile_counts
from pyg_dist.grid.plan.work import Work, aggregation_bytes, work_of
from pyg_dist.pricing.base import DistributionPlan
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price
from pyg_dist.pricing.plot import Bars, HeatMap, draw


@dataclass(frozen=True)
class GridPlan(DistributionPlan):
    """The plan of one :class:`~pyg_dist.DistributedData` in the grid layout, equal on every rank.

    Attributes:
        shape: the mesh.
        sums: the form of the two big sums.
        num_nodes: N.
        edges: edges of each rank's tile in the first layer, by rank.
        tries: node orders that were tried, and how even their tiles are; the last one is used.
        model: the convs that the mesh was chosen for.
        predicted: the price of a training step of them.
        machine: the constants that it was priced with.
        hash: digest of graph, mesh and options; equal plans have equal hashes.

    Example:
        >>> plan = DistributedData(KarateClub()[0], layout="grid").plan
        >>> isinstance(plan, GridPlan), plan.ranks, plan.layout
        (True, 1, 'grid')
    """

    shape: MeshShape
    sums: Sums
    num_nodes: int
    edges: tuple[int, ...]
    tries: tuple[Balance, ...]
    model: Model
    predicted: Price
    machine: Machine
    hash: str
    layout: str = "grid"

    @staticmethod
    def of(
        edges: EdgeChunks, model: Model, best: Candidate, machine: Machine, seed: int, identity: str
    ) -> tuple[GridPlan, tuple[ListedOrder, ...]]:
        """The plan of a mesh, and its node orders (not collective); ``identity`` is the digest of graph and options."""
        shape, sums = best.shape, best.sums
        orders, tries = choose_orders(edges, model.num_nodes, shape, seed, sums)
        counts = host.zeros(shape.z, shape.x, dtype=torch.int64)
        for source, target in edges():
            counts += tile_counts(target, source, orders[-1], orders[0], shape.z, shape.x)
        places = [shape.coordinates(rank) for rank in range(shape.size)]
        by_rank = tuple(int(counts[place["z"], place["x"]]) for place in places)
        name = digest(identity + repr((shape, sums)))
        return GridPlan(shape, sums, model.num_nodes, by_rank, tries, model, best.price, machine, name), orders

    @property
    def ranks(self) -> int:
        return self.shape.size

    @property
    def nodes(self) -> list[int]:
        return [
            len(row_range(self.num_nodes, INPUT, self.shape, self.shape.coordinates(rank)))
            for rank in range(self.ranks)
        ]

    @property
    def messages(self) -> int:
        return sum(work.num_messages(self.shape) for work in self._works())

    def halo_bytes(self, width: int) -> int:
        """Bytes that the first layer's aggregation of ``width`` columns of float32 sends, all ranks together."""
        return aggregation_bytes(self.model, self.shape, self.sums, width)

    def memory_bytes(self, model: Model | None = None) -> list[int]:
        model = self.model if model is None else model
        return [memory_of(model, self.shape, self.sums, rank) for rank in range(self.ranks)]

    def assumed_model(self) -> Model:
        return self.model

    def price(self, model: Model | None = None, machine: Machine | None = None) -> Price:
        model, machine = self._described_model(model), self._machine(machine)
        if (model, machine) == (self.model, self.machine):
            return self.predicted
        return price_of(model, self.shape, self.sums, machine)

    def plot(self, path: str | Path, width: int = 256) -> None:
        """Draw edges by tile, and each rank's bytes and memory in a training step; ``width`` is the halo's."""
        shape, mebibyte = self.shape, 2**-20
        places = map(shape.coordinates, range(self.ranks))
        edges = {(place["z"], place["x"]): count for place, count in zip(places, self.edges, strict=True)}
        tiles, order = [[edges[z, x] for x in range(shape.x)] for z in range(shape.z)], self.tries[-1].method
        pairs = HeatMap(f"edges of a tile, {order} order", tiles, "edges", "x: sources", "z: targets")
        sent = Bars("sent in a step", {"sent": [work.num_bytes * mebibyte for work in self._works()]}, "MiB")
        memory = Bars("memory", {"memory": [num_bytes * mebibyte for num_bytes in self.memory_bytes()]}, "MiB")
        draw(path, f"mesh {shape}, {self.model}, plan {self.hash[:12]}", pairs, sent, memory)

    def _works(self) -> list[Work]:
        return [work_of(self.model, self.shape, self.sums, rank) for rank in range(self.ranks)]

    def _machine(self, machine: Machine | None) -> Machine:
        return self.machine if machine is None else machine

    def _described_model(self, model: Model | None) -> Model:
        return self.model if model is None else model

    def _numbers(self, widths: Sequence[int], machine: Machine) -> dict[str, object]:
        """Messages, ``step_bytes``, memory and seconds are of a training step."""
        return {
            "mesh": {axis: self.shape[axis] for axis in reversed(RANK_ORDER)},
            "sums": self.sums,
            "edges": list(self.edges),
            "orders": self.tries[-1].method,
            # Rows are not counted: collectives along axes send blocks of rows.
            "rows": {},
            "step_bytes": sum(work.num_bytes for work in self._works()),
            "model": str(self.model),
            "imbalance": {balance.method: balance.imbalance for balance in self.tries},
        }

    def _title(self) -> str:
        sides = " x ".join(str(self.shape[axis]) for axis in GRID_AXES)
        return f"grid layout, mesh {self.shape} ({sides}), sums by {self.sums}, plan {self.hash[:12]}"

    def _table(self, machine: Machine) -> list[str]:
        tried = ", ".join(f"{b.method} {b.imbalance:.3f}" for b in self.tries)
        return [
            f"node orders: {self.tries[-1].method} (max/mean of tiles: {tried})",
            f"edges by rank: {min(self.edges):,} to {max(self.edges):,}",
        ]
