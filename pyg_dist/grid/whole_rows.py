"""The grid's edges for convs that look at single edges: as they are stored, and by the ranks of their targets.

For the latter a copy of the edges is sent to the ranks of their targets' whole rows, and rows of sources are fetched as
on the halo layout, with the parts that the whole rows make.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pyg_dist.backend import host
from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.redistribution import Redistribution, RowsByRank
from pyg_dist.graph.edges import Edges, SelectedEdges
from pyg_dist.graph.gcn_norm import put_loop_values
from pyg_dist.graph.protocol import End
from pyg_dist.grid.plan.mesh_shape import GRID_AXES, WHOLE_ROWS
from pyg_dist.grid.sharding import Grid
from pyg_dist.halo.plan.cover import OneWay
from pyg_dist.halo.plan.share import HaloShare, LocalEdges, share_of
from pyg_dist.halo.products import HaloProducts
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.operands import by_row_mask
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.sharding import RowSharding, lasting


@dataclass(frozen=True)
class EdgeEnds:
    """The nodes at one end of the edges that a rank stores: products with the incidence matrix and its transpose."""

    nodes: Redistribution  # fetches the rows of the distinct nodes
    slot: Tensor  # the number of each edge's node among the distinct ones, int64 ``[e]``

    @staticmethod
    def of(grid: Grid, node: Tensor, device: torch.device) -> EdgeEnds:
        """The ends ``node`` of edges, int64 ``[e]``, counted from the data group's first node (collective)."""
        distinct, slot = torch.unique(node, return_inverse=True)
        owner, row = grid.owners(distinct)
        transport = grid.transport(*GRID_AXES, exact=True)
        num_rows = grid.node_sharding.num_local
        return EdgeEnds(Redistribution.of_requests(transport, owner, row, num_rows), slot.to(device))

    def fetch(self, rows: Tensor) -> Tensor:
        """Each edge's row of whole rows; differentiable (collective). Shapes: ``[n, ...] -> [e, ...]``."""
        return apply(self.nodes, rows).index_select(0, self.slot)

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the values of each node's edges; differentiable (collective). Shapes: ``[e, ...] -> [n, ...]``."""
        sums = values.new_zeros(self.nodes.receive.num_rows, *values.shape[1:])  # type: ignore[union-attr]
        return apply(self.nodes.transposed, sums.index_add(0, self.slot, values))


class OperatorEdges(Edges):
    """The edges of a graph on the grid, each on the rank that stores it.

    Sums over them are the graph's products; rows at their ends are fetched. For all in-edges of a node see
    :attr:`by_target_rank`.
    """

    graph: Any  # a GridGraph

    @staticmethod
    def of_graph(graph: Any, weight: RowTensor | None) -> OperatorEdges:
        """All edges of a ``GridGraph``."""
        rows = graph.edge_sharding
        edges: Any = OperatorEdges.empty()
        edges.graph, edges.rows, edges.weight = graph, rows, weight
        return edges  # type: ignore[no-any-return]

    @cached_property
    @lasting
    def _global_ids(self) -> tuple[Tensor, Tensor]:
        source, target = self.graph.edge_index.to(self.graph.device, copy=True)
        return source, target

    def fetch(self, x: NodeTensor, end: End) -> EdgeTensor:
        return self.tensor(self.graph.ends[end].fetch(x.to_rows().to_local()))

    def reduce(self, values: Tensor, end: End, reduce: str) -> Tensor:
        if reduce in ("sum", "add"):
            return self.graph.ends[end].sum(values)  # type: ignore[no-any-return]
        return self.by_target_rank.reduce(self._sent(values), end, reduce)

    def with_loop_values(self, filled: Tensor, values: Tensor, rule: LoopRule) -> Tensor:
        home, row = self.graph.loops
        return put_loop_values(filled, row, apply(home, values), rule)

    def softmax_by_target(self, values: Tensor) -> Tensor:
        there = self.by_target_rank
        found = there.rows.to_sharding(there.softmax_by_target(self._sent(values)), self.rows)
        assert found is not None
        return found

    def full_tensor(self) -> Tensor:
        return self.graph.full_edge_index()  # type: ignore[no-any-return]

    @property
    def by_target_rank(self) -> Edges:
        """See :class:`Edges` (collective at the first use; with values that learn, which move, at each)."""
        is_fixed = self.weight is None or not self.weight.requires_grad
        return self._by_target_rank if is_fixed else Edges.all_of(self.graph.edge_view, self.weight)

    @cached_property
    def _by_target_rank(self) -> Edges:
        return Edges.all_of(self.graph.edge_view, self.weight)

    def _sent(self, values: Tensor) -> Tensor:
        """Values of these edges, on the ranks of :attr:`by_target_rank` (collective)."""
        moved = self.by_target_rank.rows.from_sharding(values, self.rows)
        assert moved is not None
        return moved

    @cached_property
    def without_loops(self) -> SelectedEdges:
        """See :class:`Edges`; the graph keeps them."""
        graph, places = self.graph.without_loops
        return SelectedEdges(OperatorEdges.of_graph(graph, None), places)

    @cached_property
    def with_loops(self) -> OperatorEdges:
        """See :class:`Edges`; the graph keeps them."""
        return OperatorEdges.of_graph(self.graph.with_loops, None)

    def selected(self, mask: RowTensor) -> OperatorEdges:
        graph = self.graph
        return OperatorEdges.of_graph(graph.select(by_row_mask(self.rows, mask)), None)


class EdgesByTarget(RowSharding):
    """Edges on the ranks of their targets, to which ``move`` sends the ``stored`` ones; keys and positions stay."""

    def __init__(self, stored: RowSharding, move: Redistribution) -> None:
        super().__init__(stored.group, "edge", None, move.start(stored.rng_key).wait())
        self._stored, self._move = stored, move
        self.counts_selections = stored.counts_selections

    @cached_property
    def size(self) -> int:
        return self._stored.size

    @property
    def derives_from_index(self) -> bool:
        return self._stored.derives_from_index

    @property
    def num_rng_keys(self) -> int:
        return self._stored.num_rng_keys

    @cached_property
    @lasting
    def global_id(self) -> Tensor:
        return self._move.start(self._stored.global_id).wait()

    @cached_property
    @lasting
    def position(self) -> Tensor:
        return self._move.start(self._stored.position).wait()

    def from_sharding(self, local: Tensor, before: RowSharding) -> Tensor | None:
        if before is self:
            return local
        stored = self._stored.from_sharding(local, before)
        return None if stored is None else apply(self._move, stored)

    def to_sharding(self, local: Tensor, after: RowSharding) -> Tensor | None:
        stored = apply(self._move.transposed, local)
        return stored if after is self._stored else after.from_sharding(stored, self._stored)


class WholeRows(HaloProducts):
    """A grid's graph over whole rows, with products as on the halo layout. Messages are exact."""

    @staticmethod
    @lasting
    def of(grid: Grid, edge_index: Tensor, stored: RowSharding, loop_rule: LoopRule, device: torch.device) -> WholeRows:
        """The view of a graph; nodes of ``edge_index`` are counted from the data group's first (collective)."""
        share, move = _share(grid, edge_index, stored)
        rows = EdgesByTarget(stored, move)
        messages = sum(grid.ranks(*GRID_AXES).gather_counts(sum(count > 0 for count in share.row_transfer.send_counts)))
        group = grid.mesh.group(*GRID_AXES)
        nodes: Any = grid.node_sharding  # has all of HaloNodes that an exchange of exact rows uses
        return WholeRows(share, nodes, loop_rule, messages, rows, group, device)

    def owns(self, x: RowTensor, end: End = 1) -> bool:
        """See :class:`~pyg_dist.graph.protocol.GraphProducts`; also for tiles."""
        return isinstance(x, NodeTensor) and x.dim() > 0 and x.to_rows()._sharding is self.node_sharding

    def place(self, x: NodeTensor, layer: nn.Module | None = None) -> NodeTensor:
        """Whole rows (collective where they are tiles)."""
        return x.to_rows()


def _share(grid: Grid, edge_index: Tensor, stored: RowSharding) -> tuple[HaloShare, Redistribution]:
    """This rank's share of the edges, and the redistribution that fetches their values (collective)."""
    group, transport = grid.mesh.group(*GRID_AXES), grid.transport(*GRID_AXES, exact=True)
    rank, number = group.rank, host.arange(edge_index.shape[1])
    key = stored.global_id
    sender, receiver = (grid.owners(node)[0] for node in edge_index)
    remote = host.flatnonzero(sender != receiver)
    to_both = Redistribution.of_copies(
        transport, torch.cat([receiver, sender[remote]]), torch.cat([number, remote]), key
    )
    source, target, sender, receiver = to_both.start(torch.stack([*edge_index, sender, receiver], 1)).wait().unbind(1)
    node_id = grid.node_ids(WHOLE_ROWS) - grid.first
    ascending = node_id.sort().values
    crossing = host.flatnonzero(sender != receiver)
    arriving, leaving = OneWay.both(
        crossing, source[crossing], target[crossing], sender[crossing], receiver[crossing], grid.num_nodes, group.size,
        rank,
    )  # fmt: skip
    on_boundary = host.zeros(ascending.numel(), dtype=torch.bool)
    on_boundary[torch.searchsorted(ascending, arriving.sums.node)] = True

    def inside() -> LocalEdges:
        edge = host.flatnonzero(sender == receiver)
        ends = torch.stack([source[edge], target[edge]])
        return LocalEdges(edge, *torch.searchsorted(ascending, ends, out_int32=True))

    share = share_of(
        rank, group.size, grid.num_nodes, stored.size, ascending, on_boundary, inside,
        lambda: (arriving, arriving.uniform_cover("post")), lambda: (leaving, leaving.uniform_cover("post")),
        "post", node_id,
    )  # fmt: skip
    # Edges arrive by ascending key; they go to their places in the share's edge storage.
    move = Redistribution.of_copies(transport, grid.owners(edge_index[1])[0], number, key)
    arrived = host.flatnonzero(receiver == rank)
    place = torch.empty_like(arrived)
    place[torch.searchsorted(arrived, share.edge_id)] = host.arange(arrived.numel())
    assert isinstance(move.receive, RowsByRank)
    received = replace(move.receive, index=place[move.receive.index])
    return share, Redistribution(transport, move.send, received)
