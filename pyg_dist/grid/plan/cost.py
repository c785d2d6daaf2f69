"""The price and the memory of a training step on a mesh of the grid, and all meshes with their prices.

Sparse products as in Plexus, 4.1; messages with the contention of Plexus, 4.2, but for all-to-alls in place of its
rings, with latencies; and copies, which matter on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from pyg_dist.backend.session.settings import GRID_SUMS
from pyg_dist.errors import OptionError
from pyg_dist.grid.plan.mesh_shape import (
    GRID_AXES,
    INPUT,
    MeshShape,
    Sums,
    column_range,
    in_order,
    meshes,
    nearest_cube,
    row_range,
)
from pyg_dist.grid.plan.work import Work, work_of
from pyg_dist.pricing.base import columns
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price, reduction_seconds


def all_to_all_seconds(
    shape: MeshShape, axes: tuple[str, ...], rank: int, num_bytes: float, calls: int, machine: Machine
) -> float:
    r"""Seconds of all-to-alls along one axis, or along all, on ``rank``.

    .. math::
        T = t \left( n c + n p_i L_i + \frac{p_i}{p} \frac{b}{B_i} \right)
        + n p_o L_o + \frac{p_o}{p} \frac{k b}{B_o}

    n calls of c seconds send b bytes, in equal shares to p partners, of which p_i are on the rank's machine and p_o are
    not; t is :meth:`Machine.turns`, since cores carry the messages within a machine. In the rings of Plexus, 4.2 one
    message of a group leaves a machine; in an all-to-all p_o of each rank do, and the k ranks of the machine that have
    such partners along these axes share its link. As there, y runs inside of x, x of z.

    Along one axis there are gathers and scattered sums. Where its lines have k ranks on each of m machines, these take
    two steps (:mod:`pyg_dist.grid.collectives`): m - 1 pieces go between machines, m (k - 1) within.
    """
    stride, place, size = _line(shape, axes, rank)
    if size == 1:
        return 0.0
    low = rank - rank % machine.ranks_per_node
    high = min(low + machine.ranks_per_node, shape.size)
    partners = size - 1
    inside = min(place, (rank - low) // stride) + min(partners - place, (high - 1 - rank) // stride)
    outside, sharing, steps = partners - inside, 0, 1
    for other in range(low, high) if outside else ():
        _, its_place, _ = _line(shape, axes, other)
        first = other - its_place * stride
        sharing += first < low or first + partners * stride >= high
    pieces = inside
    if len(axes) == 1 and _goes_in_two_steps(shape, axes[0], machine.ranks_per_node):
        outside = size // (inside + 1) - 1
        pieces, steps = inside * (outside + 1), 2
    near = machine.send_seconds(num_bytes * pieces / partners, calls * inside, sharing, True)
    far = machine.send_seconds(num_bytes * outside / partners, calls * outside, sharing, False) if outside else 0.0
    return machine.turns(shape.size) * (near + steps * calls * machine.call_seconds) + far


@cache
def _goes_in_two_steps(shape: MeshShape, axis: str, ranks_per_node: int) -> bool:
    """Whether every line of an axis has as many ranks, and several, on each of several machines."""
    stride, size, of_rank = shape.stride(axis), shape[axis], [rank // ranks_per_node for rank in range(shape.size)]
    begins = (rank for rank in range(shape.size) if not shape.coordinates(rank)[axis])
    return all(in_order(range(first, first + size * stride, stride), of_rank) for first in begins)


def _line(shape: MeshShape, axes: tuple[str, ...], rank: int) -> tuple[int, int, int]:
    """The line of ranks along one axis, or along all, through ``rank``: stride, the rank's place, number of ranks."""
    if len(axes) > 1:
        return 1, rank, shape.size
    (axis,) = axes
    return shape.stride(axis), shape.coordinates(rank)[axis], shape[axis]


def price_of(model: Model, shape: MeshShape, sums: Sums, machine: Machine) -> Price:
    """The price of a training step: that of the slower of the first and the last rank."""
    prices = [_price(model, shape, sums, machine, rank) for rank in sorted({0, shape.size - 1})]
    return max(prices, key=lambda price: price.seconds)


def _price(model: Model, shape: MeshShape, sums: Sums, machine: Machine, rank: int) -> Price:
    # Ranks beyond the cores take turns, in products and, where no network card works for them, in messages.
    turns, work = machine.turns(shape.size), work_of(model, shape, sums, rank)
    sparse = sum(machine.spmm_seconds(*product) for product in work.spmm)
    streams = work.copied * model.element_size + model.update_bytes
    messages = reduction_seconds(model, machine, shape.size)
    for axes, num_bytes in work.sent.items():
        messages += all_to_all_seconds(shape, axes, rank, num_bytes, work.collectives[axes], machine)
    return Price(
        turns * sparse, turns * work.gemm_flops / machine.gemm_rate, turns * streams / machine.stream_rate, messages
    )


def memory_of(model: Model, shape: MeshShape, sums: Sums, rank: int) -> int:
    """Bytes on one rank: :func:`graph_bytes`, kept activations, weights with Adam's state."""
    input_rows = len(row_range(model.num_nodes, INPUT, shape, shape.coordinates(rank)))
    input_columns = len(column_range(model.widths[0], INPUT, shape, shape.coordinates(rank)))
    copies = 4 if model.input == "learns" else 1
    work = _first_work(model, shape, sums, rank)
    numbers = work.kept_numbers + work.passing_numbers + copies * input_rows * input_columns + 4 * model.num_weights
    return graph_bytes(model, shape, sums, rank) + numbers * model.element_size


def graph_bytes(model: Model, shape: MeshShape, sums: Sums, rank: int) -> int:
    """Bytes that one rank keeps of a graph without edge weights, once every layer has run; means over ranks.

    Edges; node orders; each adjacency tile's edges, matrix, transpose and scales; the rows of changes of layout.
    """
    nodes, num_ranks = model.num_nodes, math.prod(shape.sizes(*GRID_AXES))
    edges, work = model.num_entries - nodes, _first_work(model, shape, sums, rank)
    is_gcn = model.conv == "gcn"
    total = 24.0 * edges / num_ranks  # two ends and a number, int64
    total += 2 * model.num_orders * nodes * 8
    for axis, other, _ in work.tiles:
        part, lines = shape[axis] * shape[other], nodes / shape[axis] + nodes / shape[other]
        total += 8 * edges / part  # row and column, int32
        total += 12 * (model.num_entries if is_gcn else edges) / part + 8 * lines  # columns both ways, places; pointers
        if is_gcn:
            total += 16 * nodes / part + (16 + model.element_size) * lines  # loops' places; scales, and their routes
        else:
            total += model.element_size * nodes / shape[axis]
    for layouts in work.routes:
        ends = [len(row_range(nodes, layout, shape, shape.coordinates(rank))) for layout in layouts]
        total += 2 * 8 * sum(ends)
    return round(total)


def _first_work(model: Model, shape: MeshShape, sums: Sums, rank: int) -> Work:
    """The work of a step without remembered sums: it makes all that is kept."""
    return work_of(replace(model, input="new") if model.input == "remembered" else model, shape, sums, rank)


@dataclass(frozen=True)
class Candidate:
    """One mesh and form of the sums, with its price for a step. Bytes are estimated from three ranks."""

    shape: MeshShape
    sums: Sums
    price: Price
    num_bytes: int  # sent by all ranks together, without the weights' gradients
    memory: int  # bytes of the rank that needs most

    @property
    def seconds(self) -> float:
        """Predicted, for a step."""
        return self.price.seconds

    def __str__(self) -> str:
        return f"grid {self.shape}, sums by {self.sums}"

    def to_dict(self) -> dict[str, object]:
        """Plain values for programs."""
        return {
            "layout": "grid",
            "mesh": {axis: self.shape[axis] for axis in GRID_AXES},
            "sums": self.sums,
            "predicted_seconds": self.seconds,
            "bytes": self.num_bytes,
            "memory_bytes": self.memory,
        }


FORMS: tuple[Sums, ...] = ("reduce_scatter", "all_reduce")


def grid_plans(model: Model, num_ranks: int, machine: Machine, wanted: MeshShape | None = None) -> list[Candidate]:
    """Every mesh of ``num_ranks`` ranks, or the wanted one alone, the cheapest first (not collective).

    In both forms of the sums, or in that of ``PYG_DIST_GRID_SUMS``.
    """
    if num_ranks < 1:
        raise OptionError(f"Expected at least one rank (got {num_ranks}): give --ranks a positive integer")
    forced: Sums | None = GRID_SUMS.value()
    candidates = []
    for shape in meshes(num_ranks) if wanted is None else [wanted]:
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
    """The candidates as a table; the first one is marked as chosen, and the baseline as nearest cube."""
    cube = nearest_cube(num_ranks)

    def marks(one: Candidate) -> str:
        return ", ".join(["chosen"] * (one is candidates[0]) + ["nearest cube"] * (one.shape == cube))

    lines = columns(
        candidates, ("x", lambda one: str(one.shape.x)), ("y", lambda one: str(one.shape.y)),
        ("z", lambda one: str(one.shape.z)), ("sums", lambda one: one.sums),
        ("seconds", lambda one: f"{one.seconds:.4g}"), ("MiB, about", lambda one: f"{one.num_bytes / 2**20:.2f}"),
        ("MiB a rank", lambda one: f"{one.memory / 2**20:.2f}"), ("", marks), left=(3, 7),
    )  # fmt: skip
    return "\n".join(lines)
