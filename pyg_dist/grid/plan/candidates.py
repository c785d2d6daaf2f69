"""Every mesh of the grid with its price, the cheapest first, and all of them as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pyg_dist.backend.session.settings import GRID_SUMS
from pyg_dist.errors import OptionError
from pyg_dist.grid.plan.cost import memory_of, price_of
from pyg_dist.grid.plan.mesh_shape import GRID_AXES, MeshShape, meshes, nearest_cube
from pyg_dist.grid.plan.tiling import Sums
from pyg_dist.grid.plan.work import work_of
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price


@dataclass(frozen=True)
class Candidate:
    """One mesh and form of the sums, with its price.

    Attributes:
        shape: the mesh.
        sums: the form.
        price: predicted, for a step.
        num_bytes: sent in a step by all ranks together, without the weights' gradients; an estimate, from what the
            first, the middle and the last rank send (:meth:`GridPlan.to_dict` has the sum over all ranks).
        memory: bytes on that of these three ranks that needs most.
    """

    shape: MeshShape
    sums: Sums
    price: Price
    num_bytes: int
    memory: int

    @property
    def seconds(self) -> float:
        """Predicted, for a step."""
        return self.price.seconds

    def __str__(self) -> str:
        return f"grid {self.shape}, sums by {self.sums}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "layout": "grid",
            "mesh": {axis: self.shape[axis] for axis in GRID_AXES},
            "sums": self.sums,
            "predicted_seconds": self.seconds,
            "bytes": self.num_bytes,
            "memory_bytes": self.memory,
        }


FORMS: tuple[Sums, ...] = ("reduce_scatter", "all_reduce")


def grid_plans(model: Model, num_ranks: int, machine: Machine) -> list[Candidate]:
    """Every mesh of ``num_ranks`` ranks, the cheapest first (not collective).

    In both forms of the sums, or in that of ``PYG_DIST_GRID_SUMS``.
    """
    if num_ranks < 1:
        raise OptionError(f"Expected at least one rank (got {num_ranks}): give --ranks a positive integer")
    forced: Sums | None = GRID_SUMS.value()
    candidates = []
    for shape in meshes(num_ranks):
        ranks = sorted({0, num_ranks // 2, num_ranks - 1})
        for sums in FORMS if forced is None else (forced,):
            works = [work_of(model, shape, sums, rank) for rank in ranks]
            num_bytes = sum(work.num_bytes for work in works) * num_ranks // len(ranks)
            memory = max(memory_of(model, shape, sums, rank) for rank in ranks)
            candidates.append(Candidate(shape, sums, price_of(model, shape, sums, machine), num_bytes, memory))
    # Equal prices (a mesh of one rank has but one form) fall to the nearest cube, then to the first in the list.
    cube = nearest_cube(num_ranks)
    return sorted(candidates, key=lambda c: (c.seconds, c.shape != cube))


def grid_table(candidates: Sequence[Candidate], num_ranks: int) -> str:
    """The candidates as a table for people; the first one is marked as chosen, and the baseline as nearest cube."""
    cube = nearest_cube(num_ranks)
    lines = [f"{'x':>4} {'y':>4} {'z':>4}  {'sums':<14} {'seconds':>11} {'MiB, about':>10} {'MiB a rank':>10}"]
    for candidate in candidates:
        sides = " ".join(f"{candidate.shape[axis]:>4}" for axis in GRID_AXES)
        marks = ["chosen"] * (candidate is candidates[0]) + ["nearest cube"] * (candidate.shape == cube)
        lines.append(
            f"{sides}  {candidate.sums:<14} {candidate.seconds:>11.4g} {candidate.num_bytes / 2**20:>10.2f} "
            f"{candidate.memory / 2**20:>10.2f}  {', '.join(marks)}".rstrip()
        )
    return "\n".join(lines)
