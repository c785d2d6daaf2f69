"""What a training step costs on a mesh: messages to the byte, seconds by a model of the machine, memory.

Messages follow the layouts as the tensors do, layer by layer, so the numbers are exact for stacks of one conv
(element-wise functions between them move nothing). Seconds: sparse products by Plexus, 4.1; messages by Plexus, 4.2,
with latencies, and copies, which both count on CPUs.

Legend: *work* is what one rank does in one step, forward and backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pyg_dist.backend.mesh import GRID_AXES, RANK_ORDER, MeshShape, meshes, nearest_cube
from pyg_dist.errors import OptionError
from pyg_dist.plan.grid import INPUT, WHOLE_ROWS, Layout, Sums, column_range, row_range, tilings
from pyg_dist.plan.halo_cost import reduction_seconds
from pyg_dist.plan.machine import Machine
from pyg_dist.plan.model import ACTIVATION_PASSES, Model, Price


@dataclass
class Work:
    """What one rank does in one step.

    Attributes:
        sent: bytes sent to other ranks, by product of axes.
        messages: how many collectives there are, by product of axes.
        spmm: for each sparse product: entries and rows of the sparse tile, and columns of the dense one.
        gemm_flops: of the dense products.
        copied: numbers read and written beside the products: packing, sums of what arrived, element-wise functions.
        peak_numbers: numbers kept for the backward, and the largest temporary ones.
    """

    sent: dict[tuple[str, ...], int] = field(default_factory=dict)
    messages: dict[tuple[str, ...], int] = field(default_factory=dict)
    spmm: list[tuple[float, int, int]] = field(default_factory=list)
    gemm_flops: float = 0.0
    copied: int = 0
    peak_numbers: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes sent to other ranks."""
        return sum(self.sent.values())


class _Walk:
    """One rank's way through a step."""

    def __init__(self, model: Model, shape: MeshShape, sums: Sums, rank: int) -> None:
        self.model, self.shape, self.sums = model, shape, sums
        self.place = shape.coordinates(rank)
        self.rank = rank
        self.layout, self.width = INPUT, model.widths[0]
        self.learns = model.input_learns
        self.work = Work()

    def rows(self, layout: Layout | None = None) -> int:
        return len(row_range(self.model.num_nodes, layout or self.layout, self.shape, self.place))

    def columns(self, width: int, layout: Layout | None = None) -> int:
        return len(column_range(width, layout or self.layout, self.shape, self.place))

    def send(self, numbers: int, *axes: str, size: int = 0) -> None:
        key = tuple(sorted(axes))
        if self.shape.sizes(*axes) != (1,) * len(axes):
            self.work.sent[key] = self.work.sent.get(key, 0) + numbers * (size or self.model.message_size)
            self.work.messages[key] = self.work.messages.get(key, 0) + 1

    def sum_to_all(self, numbers: int, axis: str) -> None:
        parts, mine = self.shape[axis], self.place[axis]
        own = numbers * (mine + 1) // parts - numbers * mine // parts
        self.send(numbers - own, axis)
        self.send(own * (parts - 1), axis)
        self.copy(axis, 2 * numbers + 2 * own * parts)

    def copy(self, axis: str, numbers: int) -> None:
        """What a collective reads and writes beside its messages; on an axis of one rank there is none."""
        if self.shape[axis] > 1:
            self.work.copied += numbers

    def aggregate(self) -> None:
        before, model = self.layout, self.model
        row, column, free = before.rows[0], before.columns, before.free_axis()
        order = model.num_orders - 1 - before.order
        source = self.rows(Layout((row, free), column, before.order))
        target = self.rows(Layout((free, row), column, order))
        all_source, all_target = self.rows(Layout((row,), column, 0)), self.rows(Layout((free,), column, 0))
        wide = self.columns(self.width)
        scattered, scatters = len(before.rows) == 2, self.sums == "reduce_scatter"

        def gather(piece: int, axis: str) -> None:
            self.send(piece * wide * (self.shape[axis] - 1), axis)
            self.copy(axis, 2 * piece * wide * self.shape[axis])

        def sum_up(whole: int, piece: int, axis: str, to_all: bool) -> None:
            self.send((whole - piece) * wide, axis)
            self.copy(axis, (whole + piece) * wide)
            if to_all:
                gather(piece, axis)

        tile = model.num_entries / (self.shape[row] * self.shape[free])
        if scattered:
            gather(source, free)
        sum_up(all_target, target, row, not scatters)
        self.work.spmm.append((tile, all_target, wide))
        if self.learns:
            if scatters:
                gather(target, row)
            sum_up(all_source, source, free, not scattered)
            self.work.spmm.append((tile, all_source, wide))
        self.work.peak_numbers = max(self.work.peak_numbers, (all_source + all_target) * wide)
        self.layout = Layout((free, row) if scatters else (free,), column, order)

    def linear(self, width: int, pairs: int = 1) -> None:
        """A product with weights, over ``pairs`` matrices side by side."""
        before, rows, wide = self.layout, self.rows(), self.columns(self.width)
        column = before.columns or ""
        if before.replicas:
            self.layout = Layout(before.rows, before.replicas[0], before.order)
            out = self.columns(width)
            self.sum_to_all(rows * out, column)
            if self.learns:
                for _ in range(pairs):
                    self.sum_to_all(rows * wide, before.replicas[0])
        else:
            out, mine = width, self.columns(width)
            self.send(rows * (width - mine), column)
            self.send(rows * mine * (self.shape[column] - 1), column)  # of the gradient
            self.copy(column, 3 * rows * width + rows * mine * (1 + 2 * self.shape[column]) + 2 * rows * width)
        self.work.gemm_flops += 2.0 * rows * wide * out * pairs * (3 if self.learns else 2)
        self.width, self.learns = width, True

    def reroute(self, before: Layout, after: Layout, width: int) -> None:
        """A change of layout; only numbers that come from or go to other ranks count."""
        numbers = self.rows(before) * self.columns(width, before)
        copies = 1
        for axis in after.replicas:
            if axis not in before.replicas:
                copies *= self.shape[axis]
        share = 1
        for axis in before.replicas:
            if axis not in after.replicas:
                share *= self.shape[axis]
        self.send(numbers * copies // share, *GRID_AXES, size=self.model.element_size)
        self.work.copied += 4 * numbers * copies // share

    def layer(self, width: int) -> None:
        """One conv, with the order of its products that the conv itself chooses."""
        before, wide, learned = self.layout, self.width, self.learns
        is_gcn = self.model.conv == "gcn"
        if width <= wide if is_gcn else width < wide:
            self.linear(width)
            if not is_gcn:  # the root's product, which then goes where the neighbours' is
                projected = self.layout
                self.layout, self.width, self.learns = before, wide, learned
                self.linear(width)
                self.aggregate()
                self.move(projected, self.layout, width, learns=True)
            else:
                self.aggregate()
        else:
            self.aggregate()
            if not is_gcn:
                self.move(before, self.layout, wide, learns=learned)
            self.linear(width, 1 if is_gcn else 2)
        self.work.peak_numbers += self.rows() * self.columns(width)
        self.work.copied += ACTIVATION_PASSES * self.rows() * self.columns(width)

    def move(self, before: Layout, after: Layout, width: int, learns: bool) -> None:
        """There, and the gradient back."""
        self.reroute(before, after, width)
        if learns:
            self.reroute(after, before, width)


def work_of(model: Model, shape: MeshShape, sums: Sums, rank: int) -> Work:
    """What ``rank`` does in one training step of ``model``; the weights' gradients are :func:`gradient_bytes`."""
    walk = _Walk(model, shape, sums, rank)
    for width in model.widths[1:]:
        walk.layer(width)
    walk.move(walk.layout, WHOLE_ROWS, model.widths[-1], learns=True)  # the loss
    return walk.work


def aggregation_bytes(model: Model, shape: MeshShape, sums: Sums, width: int) -> int:
    """Bytes of the first layer's aggregation of ``width`` columns, forward, all ranks together."""
    total = 0
    for rank in range(shape.size):
        walk = _Walk(replace(model, widths=(width, width), input_learns=False), shape, sums, rank)
        walk.aggregate()
        total += walk.work.num_bytes
    return total


def bandwidth(shape: MeshShape, axes: tuple[str, ...], machine: Machine) -> float:
    """Bytes per second and rank along a product of axes (Plexus, 4.2): its slowest axis, with contention."""
    slowest = max(axes, key=RANK_ORDER.index)
    inside = math.prod(shape[a] for a in RANK_ORDER[: RANK_ORDER.index(slowest)])
    if inside * shape[slowest] <= machine.ranks_per_node:
        return machine.intra_bandwidth
    return machine.inter_bandwidth / min(machine.ranks_per_node, inside)


def is_inside(shape: MeshShape, axes: tuple[str, ...], machine: Machine) -> bool:
    """Whether the ranks along a product of axes lie on one machine: y is innermost, then x, then z."""
    slowest = max(axes, key=RANK_ORDER.index)
    return math.prod(shape[a] for a in RANK_ORDER[: RANK_ORDER.index(slowest) + 1]) <= machine.ranks_per_node


def price_of(model: Model, shape: MeshShape, sums: Sums, machine: Machine) -> Price:
    """Predicted seconds of a training step: those of the slower of the first and the last rank."""
    prices = [_price(model, shape, sums, machine, rank) for rank in sorted({0, shape.size - 1})]
    return max(prices, key=lambda price: price.seconds)


def _price(model: Model, shape: MeshShape, sums: Sums, machine: Machine, rank: int) -> Price:
    # Ranks beyond the cores take turns, in products and, where no network card works for them, in messages.
    turns, work = machine.turns(shape.size), work_of(model, shape, sums, rank)
    sparse = sum(machine.spmm_seconds(*product) for product in work.spmm)
    streams = work.copied * model.element_size + model.update_bytes
    messages = reduction_seconds(model, machine, shape.size)
    for axes, num_bytes in work.sent.items():
        peers = math.prod(shape.sizes(*axes)) - 1
        inside = is_inside(shape, axes, machine)
        latency = machine.call_seconds + peers * (machine.intra_latency if inside else machine.inter_latency)
        seconds = num_bytes / bandwidth(shape, axes, machine) + work.messages[axes] * latency
        messages += (turns if inside else 1.0) * seconds
    return Price(
        turns * sparse, turns * work.gemm_flops / machine.gemm_rate, turns * streams / machine.stream_rate, messages
    )


def memory_of(model: Model, shape: MeshShape, sums: Sums, rank: int) -> int:
    """Bytes on one rank: adjacency tiles with transposes, node orders, kept activations, weights with Adam's state."""
    tiles = min(len(tilings(sums)) // (2 if model.num_orders == 1 else 1) or 1, len(model.widths) - 1)
    entries = sum(2 * model.num_entries // (shape[a] * shape[b]) * (4 + 8) for a, b in tilings(sums)[: max(tiles, 1)])
    orders = 2 * model.num_orders * model.num_nodes * 8
    input_rows = len(row_range(model.num_nodes, INPUT, shape, shape.coordinates(rank)))
    input_columns = len(column_range(model.widths[0], INPUT, shape, shape.coordinates(rank)))
    copies = 4 if model.input_learns else 1
    numbers = (
        work_of(model, shape, sums, rank).peak_numbers + copies * input_rows * input_columns + 4 * model.num_weights
    )
    return entries + orders + numbers * model.element_size


@dataclass(frozen=True)
class Candidate:
    """One mesh and form of the sums, with its price.

    Attributes:
        shape: the mesh.
        sums: the form.
        price: predicted, for a step.
        num_bytes: sent in a step by all ranks together, without the weights' gradients.
        memory: bytes on the rank that needs most.
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
    """Every mesh of ``num_ranks`` ranks in both forms of the sums, the cheapest first (not collective)."""
    if num_ranks < 1:
        raise OptionError(f"Expected at least one rank (got {num_ranks}): give --ranks a positive integer")
    candidates = []
    for shape in meshes(num_ranks):
        ranks = sorted({0, num_ranks // 2, num_ranks - 1})
        for sums in FORMS:
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
    lines = [f"{'x':>4} {'y':>4} {'z':>4}  {'sums':<14} {'seconds':>11} {'MB sent':>10} {'MB a rank':>10}"]
    for candidate in candidates:
        sides = " ".join(f"{candidate.shape[axis]:>4}" for axis in GRID_AXES)
        marks = ["chosen"] * (candidate is candidates[0]) + ["nearest cube"] * (candidate.shape == cube)
        lines.append(
            f"{sides}  {candidate.sums:<14} {candidate.seconds:>11.4g} {candidate.num_bytes / 1e6:>10.2f} "
            f"{candidate.memory / 1e6:>10.2f}  {', '.join(marks)}".rstrip()
        )
    return "\n".join(lines)
