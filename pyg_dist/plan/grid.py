"""The grid layout: which rows and columns a rank of the mesh holds, in which order of nodes (pure functions).

A *node order* is a permutation of the nodes; *position* is a node's place in it. A layout splits positions over some
axes, one after another (the first is the coarsest), and columns over at most one; all other axes hold replicas.
Splits are as even as they can be: any numbers of nodes, columns and ranks fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from pyg_dist.backend.mesh import GRID_AXES, MeshShape


@dataclass(frozen=True)
class Layout:
    """How a matrix with a row per node lies on the mesh.

    Attributes:
        rows: the axes that split its rows, the coarsest split first.
        columns: the axis that splits its columns, or ``None``.
        order: the number of the node order.
    """

    rows: tuple[str, ...]
    columns: str | None
    order: int

    @property
    def distinct(self) -> tuple[str, ...]:
        """The axes along which ranks hold different elements."""
        return self.rows if self.columns is None else (*self.rows, self.columns)

    @property
    def replicas(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same elements."""
        return tuple(axis for axis in GRID_AXES if axis not in self.distinct)

    def free_axis(self) -> str:
        """The one axis that is neither the coarsest row axis nor the column axis."""
        (axis,) = (a for a in GRID_AXES if a not in (self.rows[0], self.columns))
        return axis


WHOLE_ROWS = Layout(("x", "z", "y"), None, 0)
"""Every row on one rank: what labels and masks have, and what functions of whole rows work on."""
INPUT = Layout(("x", "z"), "y", 0)
"""Input features and embeddings: split over x and y, and over z as well (Plexus, 3.1)."""


def split(size: int, num_parts: int) -> list[int]:
    """The bounds of ``num_parts`` near-equal ranges: ``num_parts + 1`` numbers from 0 to ``size``."""
    return [size * part // num_parts for part in range(num_parts + 1)]


def nested_split(size: int, parts: Sequence[int]) -> list[int]:
    """The bounds of the ranges of a split whose ranges are split again, and so on."""
    bounds = [0, size]
    for num_parts in parts:
        bounds = [low + inner for low, high in pairwise(bounds) for inner in split(high - low, num_parts)[:-1]] + [size]
    return bounds


def nested_index(axes: Sequence[str], shape: MeshShape, coordinates: Mapping[str, int]) -> int:
    """The number of the range that falls on ``coordinates``."""
    index = 0
    for axis in axes:
        index = index * shape[axis] + coordinates[axis]
    return index


def row_range(num_nodes: int, layout: Layout, shape: MeshShape, coordinates: Mapping[str, int]) -> range:
    """The positions held at ``coordinates``."""
    low, high = 0, num_nodes  # of :func:`nested_split`, without the bounds of all others
    for axis in layout.rows:
        size, index, parts = high - low, coordinates[axis], shape[axis]
        low, high = low + size * index // parts, low + size * (index + 1) // parts
    return range(low, high)


def column_range(num_columns: int, layout: Layout, shape: MeshShape, coordinates: Mapping[str, int]) -> range:
    """The columns held at ``coordinates``."""
    if layout.columns is None:
        return range(num_columns)
    index, parts = coordinates[layout.columns], shape[layout.columns]
    return range(num_columns * index // parts, num_columns * (index + 1) // parts)


@dataclass(frozen=True)
class NodeOrder:
    """A permutation of the nodes.

    Attributes:
        node_id: global id by position, int64 ``[N]``.
        position: position by global id, int64 ``[N]``.
    """

    node_id: Tensor
    position: Tensor

    @staticmethod
    def of(node_id: Tensor) -> NodeOrder:
        """The order that lists the nodes as ``node_id`` does."""
        position = torch.empty_like(node_id)
        position[node_id] = torch.arange(node_id.numel())
        return NodeOrder(node_id, position)

    @staticmethod
    def random(num_nodes: int, rng: torch.Generator) -> NodeOrder:
        """A uniform permutation."""
        return NodeOrder.of(torch.randperm(num_nodes, generator=rng))

    @staticmethod
    def dealt(weight: Tensor, num_blocks: int, rng: torch.Generator) -> NodeOrder:
        """Nodes dealt to ``num_blocks`` ranges by weight: each range gets as many of every weight as the others.

        Nodes of like weight form rounds of one node per range; within a round, who gets which is random.
        """
        num_nodes = weight.numel()
        shuffled = torch.randperm(num_nodes, generator=rng)
        by_weight = shuffled[torch.argsort(weight[shuffled], descending=True, stable=True)]
        num_rounds = -(-num_nodes // num_blocks)
        seat = torch.rand(num_rounds, num_blocks, generator=rng).argsort(1).view(-1)[:num_nodes]
        return NodeOrder.of(by_weight[torch.argsort(seat, stable=True)])


@dataclass(frozen=True)
class Balance:
    """Stored entries of the adjacency tiles.

    Attributes:
        method: how the node orders were made.
        imbalance: largest over mean, of the worst of the tilings that the mesh uses.
    """

    method: str
    imbalance: float


GOOD_IMBALANCE = 1.05
"""Orders are kept once no tile has more than this over the mean; Plexus reports 1.001 for its best graph (Table 3)."""


def tile_counts(
    row: Tensor, column: Tensor, row_order: NodeOrder, column_order: NodeOrder, num_rows: int, num_columns: int
) -> Tensor:
    """Entries by tile of a tiling, int64. Shapes: ``[E], [E] -> [num_rows, num_columns]``."""
    row_bounds = torch.tensor(split(row_order.node_id.numel(), num_rows)[1:-1], dtype=torch.int64)
    column_bounds = torch.tensor(split(column_order.node_id.numel(), num_columns)[1:-1], dtype=torch.int64)
    block = torch.bucketize(row_order.position[row], row_bounds, right=True) * num_columns
    block += torch.bucketize(column_order.position[column], column_bounds, right=True)
    return torch.bincount(block, minlength=num_rows * num_columns).view(num_rows, num_columns)


def imbalance_of(counts: Tensor) -> float:
    """Largest over mean; 1.0 where there is nothing."""
    total = int(counts.sum())
    return float(counts.max()) * counts.numel() / total if total else 1.0


Sums = Literal["all_reduce", "reduce_scatter"]
"""How the two big sums of a layer go on: to all ranks (Plexus, Alg. 1), or each rank's piece to it alone."""


def tilings(sums: Sums) -> tuple[tuple[str, str], ...]:
    """The (row axis, column axis) of the adjacency tiles that layers use, the first layer's first.

    Layouts rotate with period three where sums go to all ranks (Plexus, 3.2), and with period two where they are
    scattered: the column axis then stays what it is.
    """
    two = (("z", "x"), ("x", "z"))
    return two if sums == "reduce_scatter" else (*two, ("y", "z"), ("z", "y"), ("x", "y"), ("y", "x"))


def choose_orders(
    edge_index: Tensor, num_nodes: int, shape: MeshShape, seed: int, sums: Sums = "reduce_scatter"
) -> tuple[tuple[NodeOrder, ...], tuple[Balance, ...]]:
    """The node orders under which the tiles of GCN's matrix (with self loops) are even, and how even each try was.

    In turn: the input's order, a random one, two random ones in alternation (Plexus, 5.1), and two in which nodes are
    dealt by degree. The first try with an imbalance of at most :data:`GOOD_IMBALANCE` is taken, else the best.

    Args:
        edge_index: int64 ``[2, E]``.
        num_nodes: N.
        shape: the mesh.
        seed: of the permutations; equal on every rank.
        sums: says which tiles are used.

    Returns:
        One or two orders, and the tries, the last of which is the one taken.
    """
    loops = torch.arange(num_nodes)
    source, target = torch.cat([edge_index[0], loops]), torch.cat([edge_index[1], loops])
    rng = torch.Generator().manual_seed(seed)
    num_blocks = max(shape.x * shape.y * shape.z, 1)
    degree = torch.bincount(source, minlength=num_nodes) + torch.bincount(target, minlength=num_nodes)

    def worst(orders: tuple[NodeOrder, ...]) -> float:
        return max(
            imbalance_of(tile_counts(target, source, rows, columns, shape[a], shape[b]))
            for a, b in tilings(sums)
            for rows, columns in ((orders[-1], orders[0]), (orders[0], orders[-1]))[: len(orders)]
        )

    if all(shape[a] * shape[b] == 1 for a, b in tilings(sums)):
        return (NodeOrder.of(loops),), (Balance("original", 1.0),)
    tries = []
    makers: dict[str, Callable[[], tuple[NodeOrder, ...]]] = {
        "original": lambda: (NodeOrder.of(loops),),
        "single": lambda: (NodeOrder.random(num_nodes, rng),),
        "double": lambda: (NodeOrder.random(num_nodes, rng), NodeOrder.random(num_nodes, rng)),
        "dealt": lambda: (NodeOrder.dealt(degree, num_blocks, rng), NodeOrder.dealt(degree, num_blocks, rng)),
    }
    best: tuple[float, str, tuple[NodeOrder, ...]] | None = None
    for method, make in makers.items():
        orders = make()
        tries.append(Balance(method, worst(orders)))
        if best is None or tries[-1].imbalance < best[0]:
            best = (tries[-1].imbalance, method, orders)
        if tries[-1].imbalance <= GOOD_IMBALANCE:
            break
    assert best is not None
    if best[1] != tries[-1].method:
        tries.append(Balance(best[1], best[0]))
    return best[2], tuple(tries)


@dataclass(frozen=True)
class Route:
    """What one rank sends and receives when a matrix changes its layout; :func:`columns_between` settles columns.

    Attributes:
        send: local rows for each rank of the grid, int64, in the receiver's row order; ``None`` for nothing.
        receive: the local rows that each rank fills, in the same order; ``None`` for nothing.
    """

    send: tuple[Tensor | None, ...]
    receive: tuple[Tensor | None, ...]


def route(
    num_nodes: int, orders: Sequence[NodeOrder], shape: MeshShape, rank: int, before: Layout, after: Layout
) -> Route:
    """The rows that ``rank`` sends and receives in a change of layout; every rank gets each element once.

    Of several replicas, a receiver listens to the one that stands on its own coordinates of the replica axes.
    """
    here = shape.coordinates(rank)
    held = torch.tensor(row_range(num_nodes, before, shape, here), dtype=torch.int64)
    wanted = torch.tensor(row_range(num_nodes, after, shape, here), dtype=torch.int64)
    goes_to = _rows_by_block(
        held, orders[before.order], orders[after.order], num_nodes, shape.sizes(*after.rows), False
    )
    comes_from = _rows_by_block(
        wanted, orders[after.order], orders[before.order], num_nodes, shape.sizes(*before.rows), True
    )
    send, receive = [], []
    for other in range(shape.size):
        there = shape.coordinates(other)
        matches = all(here[axis] == there[axis] for axis in before.replicas)
        sent = goes_to[nested_index(after.rows, shape, there)]
        got = comes_from[nested_index(before.rows, shape, there)]
        send.append(sent if matches and sent.numel() else None)
        receive.append(got if matches and got.numel() else None)
    return Route(tuple(send), tuple(receive))


def _rows_by_block(
    positions: Tensor, own: NodeOrder, other: NodeOrder, num_nodes: int, parts: Sequence[int], by_own: bool
) -> list[Tensor]:
    """Local rows (places in ``positions``) by the block of the other layout that holds them.

    Both sides list the rows of a pair in the order of the layout *after*: ``by_own`` says that it is this one's own.
    """
    there = other.position[own.node_id[positions]]
    bounds = torch.tensor(nested_split(num_nodes, parts)[1:-1], dtype=torch.int64)
    block = torch.bucketize(there, bounds, right=True)
    local = torch.arange(positions.numel()) if by_own else torch.argsort(there)
    local = local[torch.argsort(block[local], stable=True)]
    counts = torch.bincount(block, minlength=len(bounds) + 1)
    return list(torch.split(local, counts.tolist()))


def columns_between(one: range, other: range) -> range:
    """The columns that two ranks share, as a range."""
    low, high = max(one.start, other.start), min(one.stop, other.stop)
    return range(low, max(low, high))


def edge_blocks(
    edge_index: Tensor, rows: NodeOrder, columns: NodeOrder, shape: MeshShape, row_axis: str, column_axis: str
) -> tuple[Tensor, Tensor]:
    """The coordinates of each edge's tile on the row and on the column axis. Shapes: ``[2, E] -> [E], [E]``."""
    num_nodes = rows.node_id.numel()
    bounds = [torch.tensor(split(num_nodes, shape[a])[1:-1], dtype=torch.int64) for a in (row_axis, column_axis)]
    return (
        torch.bucketize(rows.position[edge_index[1]], bounds[0], right=True),
        torch.bucketize(columns.position[edge_index[0]], bounds[1], right=True),
    )
