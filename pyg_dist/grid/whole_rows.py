"""All in-edges of a node on the rank that has its whole row: what convs need that look at more than sums.

A copy of the grid's edges, which lie by their numbers, goes to the ranks of their targets, and the rows of sources come
from where whole rows lie, as on the halo layout with the parts that the grid's orders make.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.redistribution import Redistribution, RowsByRank
from pyg_dist.grid.plan.mesh_shape import GRID_AXES
from pyg_dist.grid.plan.tiling import WHOLE_ROWS
from pyg_dist.grid.sharding import Grid
from pyg_dist.halo.plan.one_way import OneWay
from pyg_dist.halo.plan.plan import is_dense
from pyg_dist.halo.plan.remote_edges import RemoteEdges
from pyg_dist.halo.plan.share import HaloShare, LocalEdges, share_of
from pyg_dist.halo.products import HaloProducts
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor
from pyg_dist.tensor.sharding import RowSharding, lasting


class EdgesByTarget(RowSharding):
    """Edges on the ranks of their targets. Keys and places are those of the edges as they are stored.

    Args:
        stored: the same edges elsewhere.
        move: fetches their values.
    """

    def __init__(self, stored: RowSharding, move: Redistribution) -> None:
        super().__init__(stored.group, "edge", 0, move.start(stored.rng_key).wait())
        del self.size
        self._stored, self._move = stored, move
        self.counts_selections = stored.counts_selections

    @cached_property
    def size(self) -> int:  # type: ignore[override]
        """Number of edges over all ranks."""
        return self._stored.size

    @property
    def derives_from_index(self) -> bool:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding`."""
        return self._stored.derives_from_index

    @property
    def num_rng_keys(self) -> int:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding`."""
        return self._stored.num_rng_keys

    @cached_property
    @lasting
    def global_id(self) -> Tensor:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding` (collective at the first use)."""
        return self._move.start(self._stored.global_id).wait()

    @cached_property
    @lasting
    def position(self) -> Tensor:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding` (collective at the first use)."""
        return self._move.start(self._stored.position).wait()

    def from_sharding(self, local: Tensor, before: RowSharding) -> Tensor | None:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding` (collective)."""
        if before is self:
            return local
        stored = self._stored.from_sharding(local, before)
        return None if stored is None else apply(self._move, stored)

    def to_sharding(self, local: Tensor, after: RowSharding) -> Tensor | None:
        """See :class:`~pyg_dist.tensor.sharding.RowSharding` (collective)."""
        stored = apply(self._move.transposed, local)
        return stored if after is self._stored else after.from_sharding(stored, self._stored)


class WholeRows(HaloProducts):
    """A grid's graph over its whole rows. Rows of nodes and values of edges are exact in messages.

    What it gives are rows of the grid's nodes.
    """

    @staticmethod
    @lasting
    def of(grid: Grid, edge_index: Tensor, stored: RowSharding, loop_rule: LoopRule, device: torch.device) -> WholeRows:
        """Those of a graph (collective).

        Args:
            grid: its mesh and node orders.
            edge_index: this rank's edges, nodes counted from the first one of the data group.
            stored: which they are.
            loop_rule: the graph's.
            device: where its rows are.
        """
        share, move = _share(grid, edge_index, stored)
        rows = EdgesByTarget(stored, move)
        messages = sum(grid.ranks(*GRID_AXES).gather_counts(sum(count > 0 for count in share.row_transfer.send_counts)))
        group = grid.mesh.group(*GRID_AXES)
        nodes: Any = grid.node_sharding  # with what of HaloNodes an exchange of exact rows needs
        return WholeRows(share, nodes, loop_rule, is_dense(messages, group.size), rows, group, device)

    def owns(self, x: RowTensor) -> bool:
        """Whether x has a row for every node of this graph, as tiles or whole."""
        return isinstance(x, NodeTensor) and x.dim() > 0 and x.to_rows()._sharding is self.node_sharding

    def place(self, x: NodeTensor, layer: nn.Module | None = None) -> NodeTensor:
        """Whole rows (collective where they are tiles)."""
        return x.to_rows()


def _share(grid: Grid, edge_index: Tensor, stored: RowSharding) -> tuple[HaloShare, Redistribution]:
    """This rank's share of the edges, and the redistribution that fetches their values (collective)."""
    group, transport = grid.mesh.group(*GRID_AXES), grid.transport(*GRID_AXES, exact=True)
    rank, number = group.rank, torch.arange(edge_index.shape[1])
    key = stored.global_id
    sender, receiver = (grid.owners(node)[0] for node in edge_index)
    remote = (sender != receiver).nonzero().view(-1)
    to_both = Redistribution.of_copies(
        transport, torch.cat([receiver, sender[remote]]), torch.cat([number, remote]), key
    )
    source, target, sender, receiver = to_both.start(torch.stack([*edge_index, sender, receiver], 1)).wait().unbind(1)
    node_id = grid.node_ids(WHOLE_ROWS) - grid.first
    ascending = node_id.sort().values
    crossing = (sender != receiver).nonzero().view(-1)
    others = RemoteEdges.of_list(
        crossing, source[crossing], target[crossing], sender[crossing], receiver[crossing], grid.num_nodes,
        torch.zeros(group.size, dtype=torch.int64), rank,
    )  # fmt: skip
    arriving, leaving = OneWay.both(others, rank)
    on_boundary = torch.zeros(ascending.numel(), dtype=torch.bool)
    on_boundary[torch.searchsorted(ascending, arriving.sums.node)] = True

    def inside() -> LocalEdges:
        edge = (sender == receiver).nonzero().view(-1)
        ends = torch.stack([source[edge], target[edge]])
        return LocalEdges(edge, *torch.searchsorted(ascending, ends, out_int32=True))

    share = share_of(
        rank, group.size, grid.num_nodes, stored.size, ascending, on_boundary, inside,
        lambda: (arriving, arriving.uniform_cover("post")), lambda: (leaving, leaving.uniform_cover("post")),
        "post", node_id,
    )  # fmt: skip
    # Edges come by ascending key; their places here are those of the share's edge storage.
    move = Redistribution.of_copies(transport, grid.owners(edge_index[1])[0], number, key)
    arrived = (receiver == rank).nonzero().view(-1)
    place = torch.empty_like(arrived)
    place[torch.searchsorted(arrived, share.edge_id)] = torch.arange(arrived.numel())
    assert isinstance(move.receive, RowsByRank)
    received = replace(move.receive, index=place[move.receive.index])
    return share, Redistribution(transport, move.send, received)
