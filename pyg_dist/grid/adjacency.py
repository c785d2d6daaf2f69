"""A tile of the adjacency matrix on one rank of the grid: its edges, their order, and the self loops of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.redistribution import Redistribution
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.gcn_norm import SelfLoops
from pyg_dist.grid.plan.mesh_shape import GRID_AXES, TileLayout, Tiling
from pyg_dist.grid.plan.node_order import edge_blocks
from pyg_dist.grid.sharding import Grid
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.sharding import lasting

Entries = tuple[Tensor, Tensor]
"""Row and column of each edge of a tile, from the blocks' first positions, int32 ``[e]``; edges by ascending id."""

ReadTile = Callable[[Tiling], Entries]
"""Reads the entries of this rank's tile."""


@dataclass(frozen=True)
class AdjacencyTile:
    """The edges between the sources of one block and the targets of another; edges and nodes are on the host."""

    grid: Grid
    tiling: Tiling
    row: Tensor  # see :data:`Entries`
    column: Tensor
    device: torch.device  # of patterns
    make_dispatch: Callable[[], Redistribution]  # makes :attr:`dispatch` (collective)

    @staticmethod
    def of(
        grid: Grid,
        edge_index: Tensor,
        edge_id: Tensor,
        tiling: Tiling,
        device: torch.device,
        entries: Entries | None = None,
    ) -> AdjacencyTile:
        """This rank's tile, where each rank stores edges ``edge_index``, int64 ``[2, e]``, with ascending ``edge_id``.

        Without ``entries`` the tile's edges are fetched from all ranks (collective).
        """
        make_dispatch = partial(_dispatch, grid, edge_index, edge_id, tiling)
        if entries is None:
            ends = zip(
                make_dispatch().start(edge_index.t()).wait().unbind(1)[::-1], _layouts(grid, tiling), strict=True
            )
            row, column = ((grid.orders[k.order].positions(node) - grid.held(k)[0]).int() for node, k in ends)
            entries = row, column
        return AdjacencyTile(grid, tiling, *entries, device, make_dispatch)

    @property
    def layouts(self) -> tuple[TileLayout, TileLayout]:
        """The layouts of the rows and of the columns."""
        return _layouts(self.grid, self.tiling)

    @cached_property
    @lasting
    def ids(self) -> tuple[Tensor, Tensor]:
        """Ids of the rows' nodes and of the columns'; in a batch counted from its data group's first node."""
        rows, columns = (self.grid.orders[k.order].nodes(*self.grid.held(k)) for k in self.layouts)
        return rows, columns

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        (row_low, row_high), (column_low, column_high) = map(self.grid.held, self.layouts)
        return row_high - row_low, column_high - column_low

    @cached_property
    def csr(self) -> CSR:
        """The edges by target."""
        return CSR.from_edges(self.row, self.column, None, *self.shape).to(self.device)

    def to(self, device: torch.device) -> AdjacencyTile:
        """The same edges with patterns on another device."""
        moved = replace(self, device=device)
        known: dict[str, Any] = {name: self.__dict__[name] for name in ("csr", "dispatch") if name in self.__dict__}
        if "csr" in known:
            known["csr"] = known["csr"].to(device)
        moved.__dict__.update(known)
        return moved

    @cached_property
    @lasting
    def dispatch(self) -> Redistribution:
        """Fetches values of edges; not needed without edge weights (collective at the first use)."""
        return self.make_dispatch()

    @cached_property
    def _loops(self) -> dict[LoopRule, SelfLoops]:
        return {}

    def loops(self, rule: LoopRule) -> SelfLoops:
        """The edges with a loop for every node that is in both blocks. Made once."""
        known = self._loops.get(rule)
        if known is None:
            row, column = self.row, self.column  # not self, which would be a cycle
            entries = lambda: (row, column, host.arange(row.numel()))  # noqa: E731
            known = SelfLoops(entries, self.shape, *self._loop_ends(), rule, self.row.numel(), self.device)
            self._loops[rule] = known
        return known

    def _loop_ends(self) -> tuple[Tensor, Tensor]:
        """Row and column of each node that is in both blocks."""
        rows, columns = (self.grid.orders[k.order] for k in self.layouts)
        (row_low, row_high), (low, high) = map(self.grid.held, self.layouts)
        as_column = host.arange(row_low, row_high) if rows is columns else columns.positions(self.ids[0])
        row = host.flatnonzero((as_column >= low) & (as_column < high))
        return row, as_column[row] - low


def _layouts(grid: Grid, tiling: Tiling) -> tuple[TileLayout, TileLayout]:
    return tiling.layouts(len(grid.orders))


def _dispatch(grid: Grid, edge_index: Tensor, edge_id: Tensor, tiling: Tiling) -> Redistribution:
    """Sends values of edges from the ranks that store them to the ranks of their tiles (collective)."""
    shape, (rows, columns) = grid.mesh.grid_shape, (grid.orders[k.order] for k in _layouts(grid, tiling))
    at_row, at_column = edge_blocks(edge_index, rows, columns, shape, tiling.row_axis, tiling.column_axis)
    third = tiling.third_axis
    first = at_row * shape.stride(tiling.row_axis) + at_column * shape.stride(tiling.column_axis)
    receiver = torch.cat([first + replica * shape.stride(third) for replica in range(shape[third])])
    edge = host.arange(first.numel()).repeat(shape[third])
    return Redistribution.of_copies(grid.transport(*GRID_AXES, exact=True), receiver, edge, edge_id)
