"""Node orders, the choice of orders with even tiles, and the redistributions between layouts.

A *node order* is a permutation of the nodes; *position* is a node's place in it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.grid.plan.mesh_shape import (
    MeshShape,
    Sums,
    TileLayout,
    nested_index,
    nested_split,
    row_range,
    split,
    tilings,
)
from pyg_dist.pricing.base import imbalance


class NodeOrder(ABC):
    """A permutation of the nodes, in memory or in a file."""

    @property
    @abstractmethod
    def num_nodes(self) -> int:
        """N."""

    @abstractmethod
    def nodes(self, low: int, high: int) -> Tensor:
        """Global ids at positions ``low`` to ``high``, int64 ``[high - low]``."""

    @abstractmethod
    def positions(self, node_id: Tensor) -> Tensor:
        """The position of each node, int64 like ``node_id``."""

    @property
    def num_split(self) -> int:
        """The number of positions that are split over axes."""
        return self.num_nodes

    def bounds(self, split_at: Sequence[int]) -> list[int]:
        """The first position of each range, given the bounds among the :attr:`num_split` positions."""
        return list(split_at)


@dataclass(frozen=True)
class ListedOrder(NodeOrder):
    """A permutation in memory: global id by position and position by global id, int64 ``[N]``."""

    node_id: Tensor
    position: Tensor

    @property
    def num_nodes(self) -> int:
        return self.node_id.numel()

    def nodes(self, low: int, high: int) -> Tensor:
        """See :class:`NodeOrder`; a view."""
        return self.node_id[low:high]

    def positions(self, node_id: Tensor) -> Tensor:
        return self.position[node_id]

    @staticmethod
    def of(node_id: Tensor) -> ListedOrder:
        """The order that lists the nodes as ``node_id`` does."""
        position = torch.empty_like(node_id)
        position[node_id] = host.arange(node_id.numel())
        return ListedOrder(node_id, position)

    @staticmethod
    def random(num_nodes: int, rng: torch.Generator) -> ListedOrder:
        """A uniform permutation."""
        return ListedOrder.of(host.randperm(num_nodes, generator=rng))

    @staticmethod
    def round_robin_by_degree(weight: Tensor, num_blocks: int, rng: torch.Generator) -> ListedOrder:
        """Deal nodes by descending weight to ``num_blocks`` ranges, a node to each in a round, in random order."""
        num_nodes = weight.numel()
        shuffled = host.randperm(num_nodes, generator=rng)
        by_weight = shuffled[torch.argsort(weight[shuffled], descending=True, stable=True)]
        num_rounds = -(-num_nodes // num_blocks)
        seat = host.rand(num_rounds, num_blocks, generator=rng).argsort(1).view(-1)[:num_nodes]
        return ListedOrder.of(by_weight[torch.argsort(seat, stable=True)])


@dataclass(frozen=True)
class SampledOrder(ListedOrder):
    """The nodes of a sample in the whole graph's order, in whose even ranges they are counted."""

    parent_position: Tensor  # of each node in the order of the graph, ascending
    split_position: Tensor  # in the order whose positions are split evenly: another one where the graph is a sample
    num_even: int  # positions of that order
    number: Tensor | None = None  # of each node of the sample, ascending; ``None``: its place in the sample

    @staticmethod
    def at(parent: NodeOrder, node_id: Tensor, number: Tensor | None = None) -> SampledOrder:
        """The order of sampled nodes. O(B log B) time."""
        parent_position, place = parent.positions(node_id).sort(stable=True)
        position = torch.empty_like(place).scatter_(0, place, host.arange(place.numel()))
        split_position = parent_position
        if isinstance(parent, SampledOrder):
            split_position = parent.split_position[parent_position]
        nodes = place if number is None else number[place]
        return SampledOrder(nodes, position, parent_position, split_position, parent.num_split, number)

    def positions(self, node_id: Tensor) -> Tensor:
        return super().positions(node_id if self.number is None else torch.searchsorted(self.number, node_id))

    @property
    def num_split(self) -> int:
        return self.num_even

    def bounds(self, split_at: Sequence[int]) -> list[int]:
        """See :class:`NodeOrder`. O(k log B) time."""
        found: list[int] = torch.searchsorted(self.split_position, host.tensor(split_at, dtype=torch.int64)).tolist()
        return found


@dataclass(frozen=True)
class Balance:
    """The evenness of node orders."""

    method: str  # by which they were made
    imbalance: float  # largest over mean of the entries of a tile, in the worst tiling of the mesh


GOOD_IMBALANCE = 1.05
"""Orders are kept once no tile has more than this over the mean; Plexus reports 1.001 for its best graph (Table 3)."""


def tile_counts(
    row: Tensor, column: Tensor, row_order: NodeOrder, column_order: NodeOrder, num_rows: int, num_columns: int
) -> Tensor:
    """Entries by tile of a tiling, int64. Shapes: ``[E], [E] -> [num_rows, num_columns]``."""
    row_bounds = host.tensor(split(row_order.num_nodes, num_rows)[1:-1], dtype=torch.int64)
    column_bounds = host.tensor(split(column_order.num_nodes, num_columns)[1:-1], dtype=torch.int64)
    block = torch.bucketize(row_order.positions(row), row_bounds, right=True) * num_columns
    block += torch.bucketize(column_order.positions(column), column_bounds, right=True)
    return torch.bincount(block, minlength=num_rows * num_columns).view(num_rows, num_columns)


def edge_blocks(
    edge_index: Tensor, rows: NodeOrder, columns: NodeOrder, shape: MeshShape, row_axis: str, column_axis: str
) -> tuple[Tensor, Tensor]:
    """The coordinates of each edge's tile on the row and on the column axis. Shapes: ``[2, E] -> [E], [E]``."""
    bounds = [
        host.tensor(order.bounds(split(order.num_split, shape[axis])[1:-1]), dtype=torch.int64)
        for order, axis in ((rows, row_axis), (columns, column_axis))
    ]
    return (
        torch.bucketize(rows.positions(edge_index[1]), bounds[0], right=True),
        torch.bucketize(columns.positions(edge_index[0]), bounds[1], right=True),
    )


EdgeChunks = Callable[[], Iterable[tuple[Tensor, Tensor]]]
"""All edges in pieces, (sources, targets); each call begins anew."""


def in_one_piece(edge_index: Tensor) -> EdgeChunks:
    """Edges that are in memory, int64 ``[2, E]``."""
    return lambda: [(edge_index[0], edge_index[1])]


def choose_orders(
    edges: EdgeChunks, num_nodes: int, shape: MeshShape, seed: int, sums: Sums = "reduce_scatter"
) -> tuple[tuple[ListedOrder, ...], tuple[Balance, ...]]:
    """Node orders for which the tiles of GCN's matrix (with self loops) are even, and the evenness of each try.

    In turn: the input's order, a random one, two random ones in alternation (Plexus, 5.1), and two by degree
    (:meth:`ListedOrder.round_robin_by_degree`, "dealt" in plans). The first with an imbalance of at most
    :data:`GOOD_IMBALANCE` is taken, else the best; the last of the returned tries is the one taken.
    """
    loops = host.arange(num_nodes)
    rng = torch.Generator().manual_seed(seed)
    num_blocks = max(shape.x * shape.y * shape.z, 1)

    def degrees() -> Tensor:
        degree = host.full((num_nodes,), 2)
        for ends in edges():
            for end in ends:
                degree += torch.bincount(end, minlength=num_nodes)
        return degree

    def worst(orders: tuple[ListedOrder, ...]) -> float:
        pairs = ((orders[-1], orders[0]), (orders[0], orders[-1]))[: len(orders)]
        kinds = [(rows, columns, shape[a], shape[b]) for a, b in tilings(sums) for rows, columns in pairs]
        counts = [tile_counts(loops, loops, *kind) for kind in kinds]
        for source, target in edges():
            for count, kind in zip(counts, kinds, strict=True):
                count += tile_counts(target, source, *kind)
        return max(imbalance(count.view(-1).tolist()) for count in counts)

    if all(shape[a] * shape[b] == 1 for a, b in tilings(sums)):
        return (ListedOrder.of(loops),), (Balance("original", 1.0),)
    tries = []
    makers: dict[str, Callable[[], tuple[ListedOrder, ...]]] = {
        "original": lambda: (ListedOrder.of(loops),),
        "single": lambda: (ListedOrder.random(num_nodes, rng),),
        "double": lambda: (ListedOrder.random(num_nodes, rng), ListedOrder.random(num_nodes, rng)),
        "dealt": lambda: tuple(ListedOrder.round_robin_by_degree(d, num_blocks, rng) for d in [degrees()] * 2),
    }
    best: tuple[float, str, tuple[ListedOrder, ...]] | None = None
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
class RedistributionPlan:
    """Local rows that a rank sends to and receives from each rank, in the receiver's row order; ``None``: no rows."""

    send: tuple[Tensor | None, ...]
    receive: tuple[Tensor | None, ...]


def redistribution_plan(
    orders: Sequence[NodeOrder], shape: MeshShape, rank: int, before: TileLayout, after: TileLayout
) -> RedistributionPlan:
    """The rows that ``rank`` sends and receives in a change of layout.

    Of several replicas, the one with the receiver's coordinates on the replica axes sends.
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
    """First and last position, exclusive, of the nodes at ``coordinates``."""
    order = orders[layout.order]
    held = row_range(order.num_split, layout, shape, coordinates)
    low, high = order.bounds((held.start, held.stop))
    return low, high


def _rows_by_block(
    held: tuple[int, int], own: NodeOrder, other: NodeOrder, parts: Sequence[int], by_own: bool
) -> list[Tensor]:
    """Local rows by the block of the other layout that holds them, in the order of the layout after the change.

    ``by_own``: that is this rank's own order, since it receives.
    """
    there = host.arange(*held) if own is other else other.positions(own.nodes(*held))
    bounds = host.tensor(other.bounds(nested_split(other.num_split, parts)[1:-1]), dtype=torch.int64)
    block = torch.bucketize(there, bounds, right=True)
    local = host.arange(there.numel()) if by_own else torch.argsort(there)
    local = local[torch.argsort(block[local], stable=True)]
    counts = torch.bincount(block, minlength=len(bounds) + 1)
    return list(torch.split(local, counts.tolist()))


def columns_between(one: range, other: range) -> range:
    """The columns that two ranges share."""
    low, high = max(one.start, other.start), min(one.stop, other.stop)
    return range(low, max(low, high))
