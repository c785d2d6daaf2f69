"""A change of layout on the grid: which rows and columns each rank sends to which other (pure functions)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.grid.plan.mesh_shape import MeshShape
from pyg_dist.grid.plan.node_order import NodeOrder
from pyg_dist.grid.plan.tiling import TileLayout, nested_index, nested_split, row_range


@dataclass(frozen=True)
class RedistributionPlan:
    """What one rank sends and receives when a matrix changes its layout; :func:`columns_between` settles columns.

    Attributes:
        send: local rows for each rank of the grid, int64, in the receiver's row order; ``None`` for nothing.
        receive: the local rows that each rank fills, in the same order; ``None`` for nothing.
    """

    send: tuple[Tensor | None, ...]
    receive: tuple[Tensor | None, ...]


def redistribution_plan(
    orders: Sequence[NodeOrder], shape: MeshShape, rank: int, before: TileLayout, after: TileLayout
) -> RedistributionPlan:
    """The rows that ``rank`` sends and receives in a change of layout; every rank gets each element once.

    Of several replicas, a receiver listens to the one that stands on its own coordinates of the replica axes.
    """
    here = shape.coordinates(rank)
    held, wanted = (held_positions(orders, layout, shape, here) for layout in (before, after))
    goes_to = _rows_by_block(held, orders[before.order], orders[after.order], shape.sizes(*after.rows), False)
    comes_from = _rows_by_block(wanted, orders[after.order], orders[before.order], shape.sizes(*before.rows), True)
    send, receive = [], []
    for other in range(shape.size):
        there = shape.coordinates(other)
        matches = all(here[axis] == there[axis] for axis in before.replicas)
        sent = goes_to[nested_index(after.rows, shape, there)]
        got = comes_from[nested_index(before.rows, shape, there)]
        send.append(sent if matches and sent.numel() else None)
        receive.append(got if matches and got.numel() else None)
    return RedistributionPlan(tuple(send), tuple(receive))


def held_positions(
    orders: Sequence[NodeOrder], layout: TileLayout, shape: MeshShape, coordinates: Mapping[str, int]
) -> tuple[int, int]:
    """First and last position, exclusive, that are held at ``coordinates``."""
    order = orders[layout.order]
    held = row_range(order.num_split, layout, shape, coordinates)
    low, high = order.bounds((held.start, held.stop))
    return low, high


def _rows_by_block(
    held: tuple[int, int], own: NodeOrder, other: NodeOrder, parts: Sequence[int], by_own: bool
) -> list[Tensor]:
    """Local rows (places in the positions that are held) by the block of the other layout that holds them.

    Both sides list the rows of a pair in the order of the layout *after*: ``by_own`` says that it is this one's own.
    """
    there = torch.arange(*held) if own is other else other.positions(own.nodes(*held))
    bounds = torch.tensor(other.bounds(nested_split(other.num_split, parts)[1:-1]), dtype=torch.int64)
    block = torch.bucketize(there, bounds, right=True)
    local = torch.arange(there.numel()) if by_own else torch.argsort(there)
    local = local[torch.argsort(block[local], stable=True)]
    counts = torch.bincount(block, minlength=len(bounds) + 1)
    return list(torch.split(local, counts.tolist()))


def columns_between(one: range, other: range) -> range:
    """The columns that two ranks share, as a range."""
    low, high = max(one.start, other.start), min(one.stop, other.stop)
    return range(low, max(low, high))
