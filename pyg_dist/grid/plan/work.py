"""The work of one rank of the grid in a training step: messages to the byte, products, copies.

The layouts are traced layer by layer, so the numbers are exact for stacks of one conv (element-wise functions between
layers send nothing), but for redistributions from one random node order to another, whose bytes are expected values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from pyg_dist.backend.session.settings import PROJECT_FIRST
from pyg_dist.grid.plan.mesh_shape import (
    GRID_AXES,
    INPUT,
    WHOLE_ROWS,
    MeshShape,
    Sums,
    TileLayout,
    column_range,
    row_range,
)
from pyg_dist.grid.plan.node_order import columns_between
from pyg_dist.pricing.model import Layer, Model


@dataclass
class Work:
    """The work of one rank in one step."""

    sent: dict[tuple[str, ...], int] = field(default_factory=dict)  # bytes to other ranks, by product of axes
    collectives: dict[tuple[str, ...], int] = field(default_factory=dict)  # all-to-alls, by product of axes
    # for each sparse product: entries and rows of the sparse tile, and columns of the dense one
    spmm: list[tuple[float, int, int]] = field(default_factory=list)
    gemm_flops: float = 0.0  # of the dense products
    copied: int = 0  # numbers read and written beside products: packing, sums of messages, element-wise functions
    kept_numbers: int = 0  # kept for the backward
    passing_numbers: int = 0  # the largest temporary ones
    # row axis, column axis and source order of the adjacency tiles that it multiplies by
    tiles: set[tuple[str, str, int]] = field(default_factory=set)
    routes: set[frozenset[TileLayout]] = field(default_factory=set)  # changes of layout, each with its way back

    @property
    def num_bytes(self) -> int:
        """Bytes sent to other ranks."""
        return sum(self.sent.values())

    def num_messages(self, shape: MeshShape) -> int:
        """Messages to other ranks of a mesh: one for each partner of an all-to-all."""
        return sum(count * (math.prod(shape.sizes(*axes)) - 1) for axes, count in self.collectives.items())


def _part(whole: range, index: int, num_parts: int) -> range:
    """A part of a near-even split, as :func:`~pyg_dist.grid.plan.mesh_shape.split` makes it."""
    size = len(whole)
    return range(whole.start + size * index // num_parts, whole.start + size * (index + 1) // num_parts)


class _StepTrace:
    """Traces the layout and width of a tensor through a step on one rank, and counts the work."""

    def __init__(self, model: Model, shape: MeshShape, sums: Sums, rank: int) -> None:
        self.model, self.shape, self.sums = model, shape, sums
        self.place = shape.coordinates(rank)
        self.rank = rank
        self.layout, self.width = INPUT, model.widths[0]
        self.at_input = True
        self.learns = model.input == "learns"
        self.work = Work()

    def rows(self, layout: TileLayout | None = None) -> int:
        return len(row_range(self.model.num_nodes, layout or self.layout, self.shape, self.place))

    def columns(self, width: int, layout: TileLayout | None = None) -> int:
        return len(column_range(width, layout or self.layout, self.shape, self.place))

    def send(self, numbers: int, *axes: str, size: int = 0) -> None:
        key = tuple(sorted(axes))
        if self.shape.sizes(*axes) != (1,) * len(axes):
            self.work.sent[key] = self.work.sent.get(key, 0) + numbers * (size or self.model.message_size)
            self.work.collectives[key] = self.work.collectives.get(key, 0) + 1

    def sum_to_all(self, numbers: int, axis: str) -> None:
        parts, mine = self.shape[axis], self.place[axis]
        own = numbers * (mine + 1) // parts - numbers * mine // parts
        self.send(numbers - own, axis)
        self.send(own * (parts - 1), axis)
        self.copy(axis, 2 * numbers + 2 * own * parts)

    def copy(self, axis: str, numbers: int) -> None:
        """Count numbers that a collective reads and writes beside its messages; none on an axis of one rank."""
        if self.shape[axis] > 1:
            self.work.copied += numbers

    def aggregate(self, is_cached: bool = False) -> None:
        """A product with the adjacency matrix; one that is remembered costs nothing."""
        before, model = self.layout, self.model
        row, column, free = before.rows[0], before.columns, before.free_axis()
        order = model.num_orders - 1 - before.order
        source = self.rows(TileLayout((row, free), column, before.order))
        target = self.rows(TileLayout((free, row), column, order))
        all_source, all_target = self.rows(TileLayout((row,), column, 0)), self.rows(TileLayout((free,), column, 0))
        columns = self.columns(self.width)
        scattered, scatters = len(before.rows) == 2, self.sums == "reduce_scatter"
        self.layout = TileLayout((free, row) if scatters else (free,), column, order)
        self.work.tiles.add((free, row, before.order))
        at_input, self.at_input = self.at_input, False
        if is_cached:
            return
        # The gather of an input, and its derivative, are in full precision: they are no part of a large sum.
        of_input = scattered and (at_input or not scatters)
        source_size = model.element_size if of_input else model.message_size

        def gather(piece: int, axis: str, size: int = 0) -> None:
            self.send(piece * columns * (self.shape[axis] - 1), axis, size=size)
            self.copy(axis, 2 * piece * columns * self.shape[axis])

        def sum_up(whole: int, piece: int, axis: str, to_all: bool, size: int = 0) -> None:
            self.send((whole - piece) * columns, axis, size=size)
            self.copy(axis, (whole + piece) * columns)
            if to_all:
                gather(piece, axis, size)

        tile = model.num_entries / (self.shape[row] * self.shape[free])
        if scattered:
            gather(source, free, source_size)
        sum_up(all_target, target, row, not scatters)
        self.work.spmm.append((tile, all_target, columns))
        if self.learns:
            if scatters:
                gather(target, row)
            sum_up(all_source, source, free, not scattered, source_size)
            self.work.spmm.append((tile, all_source, columns))
        self.work.passing_numbers = max(self.work.passing_numbers, (all_source + all_target) * columns)

    def linear(self, width: int, pairs: int = 1) -> None:
        """A product with weights, over ``pairs`` matrices side by side."""
        before, rows, columns = self.layout, self.rows(), self.columns(self.width)
        column = before.columns or ""
        self.at_input = False
        if before.replicas:
            self.layout = TileLayout(before.rows, before.replicas[0], before.order)
            out = self.columns(width)
            self.sum_to_all(rows * out, column)
            if self.learns:
                for _ in range(pairs):
                    self.sum_to_all(rows * columns, before.replicas[0])
        else:
            out, mine = width, self.columns(width)
            self.send(rows * (width - mine), column)
            self.send(rows * mine * (self.shape[column] - 1), column)  # of the gradient
            self.copy(column, 3 * rows * width + rows * mine * (1 + 2 * self.shape[column]) + 2 * rows * width)
        self.work.gemm_flops += 2.0 * rows * columns * out * pairs * (3 if self.learns else 2)
        self.width, self.learns = width, True

    def redistribute(self, before: TileLayout, after: TileLayout, width: int) -> None:
        """A change of layout, as :func:`~pyg_dist.grid.plan.node_order.redistribution_plan` makes it.

        Exact within one node order. Across two random ones, ranges share rows in proportion to the length of both.
        """
        self.work.routes.add(frozenset((before, after)))
        packed, stays = self.shared(before, after, width, False), self.shared(before, after, width, True)
        self.send(round(packed - stays), *GRID_AXES, size=self.model.element_size)
        self.work.copied += round(2 * packed) + 2 * self.rows(after) * self.columns(width, after)

    def shared(self, before: TileLayout, after: TileLayout, width: int, here: bool) -> float:
        """Numbers held before that this rank (``here``), or all its receivers with itself, hold afterwards."""
        fixed = GRID_AXES if here else before.replicas
        held = row_range(self.model.num_nodes, before, self.shape, self.place)
        chosen = column_range(width, before, self.shape, self.place)
        copies = math.prod(self.shape[axis] for axis in after.replicas if axis not in fixed)
        if after.columns in fixed:
            chosen = columns_between(chosen, column_range(width, after, self.shape, self.place))
        wanted = [range(self.model.num_nodes)]
        for number, axis in enumerate(after.rows):
            if not any(a in fixed for a in after.rows[number:]):
                break  # receivers split the rest among themselves
            places = [self.place[axis]] if axis in fixed else range(self.shape[axis])
            wanted = [_part(rows, place, self.shape[axis]) for rows in wanted for place in places]
        if before.order == after.order:
            rows: float = sum(len(columns_between(held, other)) for other in wanted)
        else:
            rows = len(held) * sum(map(len, wanted)) / max(self.model.num_nodes, 1)
        return rows * len(chosen) * copies

    def layer(self, layer: Layer) -> None:
        """One conv, with its products in the order that the conv chooses."""
        before, in_channels, out_channels = self.layout, layer.in_channels, layer.out_channels
        is_gcn = self.model.conv == "gcn"
        # Sums of a constant come before the linear map, whatever the widths: they will be remembered.
        if layer.learns and (out_channels < in_channels or (out_channels == in_channels and PROJECT_FIRST.value())):
            self.linear(out_channels)
            if not is_gcn:  # the root's product, which then goes where the neighbours' is
                projected = self.layout
                self.layout, self.width = before, in_channels
                self.linear(out_channels)
                self.aggregate()
                self.move(projected, self.layout, out_channels, learns=True)
            else:
                self.aggregate()
        else:
            self.aggregate(layer.is_cached)
            if not (is_gcn or layer.is_cached):
                self.move(before, self.layout, in_channels, learns=layer.learns)
            self.work.kept_numbers += self.rows() * self.columns(in_channels) * self.model.num_matrices
            self.linear(out_channels, self.model.num_matrices)
        self.work.kept_numbers += self.rows() * self.columns(out_channels)
        self.work.copied += self.model.activation_passes * self.rows() * self.columns(out_channels)

    def move(self, before: TileLayout, after: TileLayout, width: int, learns: bool) -> None:
        """A redistribution, and that of the gradient back."""
        self.redistribute(before, after, width)
        if learns:
            self.redistribute(after, before, width)


def work_of(model: Model, shape: MeshShape, sums: Sums, rank: int) -> Work:
    """The work of ``rank`` in a training step of ``model``, without the sum of the weights' gradients."""
    walk = _StepTrace(model, shape, sums, rank)
    for layer in model.layers():
        walk.layer(layer)
    walk.move(walk.layout, WHOLE_ROWS, model.widths[-1], learns=True)  # the loss
    return walk.work


def aggregation_bytes(model: Model, shape: MeshShape, sums: Sums, width: int) -> int:
    """Bytes of the first layer's aggregation of ``width`` columns, forward, all ranks together."""
    total = 0
    for rank in range(shape.size):
        walk = _StepTrace(replace(model, widths=(width, width), input="new"), shape, sums, rank)
        walk.aggregate()
        total += walk.work.num_bytes
    return total
