"""A tile of the adjacency matrix on one rank of the grid: its edges, their order, and the self loops of its nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.comm.redistribution import Redistribution
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.graph.gcn_norm import SelfLoops
from pyg_dist.grid.plan.mesh_shape import GRID_AXES, split
from pyg_dist.grid.plan.node_order import NodeOrder, edge_blocks
from pyg_dist.grid.sharding import Grid
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor.sharding import lasting

ReadTile = Callable[[str, str, int], tuple[Tensor, Tensor]]
"""Rows and columns of the edges of this rank's tile, by ascending id, of (row axis, column axis, order of sources)."""


@dataclass(frozen=True)
class AdjacencyTile:
    """The edges between the sources of one block and the targets of another.

    Data on single edges and nodes is on the host.

    Attributes:
        row_axis: splits the targets, in node order ``row_order``.
        column_axis: splits the sources, in node order ``column_order``.
        row, column: of each edge, from the blocks' first positions, int32 ``[e]``; edges by ascending id.
        row_id, column_id: global ids of the blocks' nodes.
        loop_row, loop_column: where each node stands that is in both blocks.
        device: where patterns lie.
        make_dispatch: makes :attr:`dispatch` (collective).
    """

    row_axis: str
    column_axis: str
    row_order: int
    column_order: int
    row: Tensor
    column: Tensor
    row_id: Tensor
    column_id: Tensor
    loop_row: Tensor
    loop_column: Tensor
    device: torch.device
    make_dispatch: Callable[[], Redistribution]

    @staticmethod
    def of(
        grid: Grid,
        edge_index: Tensor,
        edge_id: Tensor,
        row_axis: str,
        column_axis: str,
        order: int,
        device: torch.device,
        read: ReadTile | None = None,
    ) -> AdjacencyTile:
        """The edges of this rank's tile, brought together from all ranks (collective), or read (not collective).

        The rank stores ``edge_index``, int64 ``[2, E / P]``, with ascending ``edge_id``. ``row_axis`` splits the
        targets, ``column_axis`` the sources, in node order ``order``.
        """
        if read is not None:
            entries = read(row_axis, column_axis, order)
        else:
            rows, columns = grid.orders[grid.other_order(order)], grid.orders[order]
            dispatch = _dispatch(grid, edge_index, edge_id, row_axis, column_axis, order)
            source, target = dispatch.start(edge_index.t()).wait().unbind(1)
            row_low, _ = _block(grid, rows, row_axis)
            column_low, _ = _block(grid, columns, column_axis)
            entries = (rows.positions(target) - row_low).int(), (columns.positions(source) - column_low).int()
        return AdjacencyTile.of_entries(grid, edge_index, edge_id, row_axis, column_axis, order, *entries, device)

    @staticmethod
    def of_entries(
        grid: Grid,
        edge_index: Tensor,
        edge_id: Tensor,
        row_axis: str,
        column_axis: str,
        order: int,
        row: Tensor,
        column: Tensor,
        device: torch.device,
    ) -> AdjacencyTile:
        """The tile whose edges are known; see the class and :meth:`of` (not collective)."""
        column_order, row_order = order, grid.other_order(order)
        rows, columns = grid.orders[row_order], grid.orders[column_order]
        make_dispatch = partial(_dispatch, grid, edge_index, edge_id, row_axis, column_axis, order)
        (row_low, row_high), (column_low, column_high) = (
            _block(grid, rows, row_axis),
            _block(grid, columns, column_axis),
        )
        row_id, column_id = rows.nodes(row_low, row_high), columns.nodes(column_low, column_high)
        as_column = torch.arange(row_low, row_high) if rows is columns else columns.positions(row_id)
        loop_row = ((as_column >= column_low) & (as_column < column_high)).nonzero().view(-1)
        return AdjacencyTile(
            row_axis, column_axis, row_order, column_order,
            row, column, row_id, column_id, loop_row, as_column[loop_row] - column_low, device, make_dispatch,
        )  # fmt: skip

    @cached_property
    def csr(self) -> CSR:
        """The edges by target."""
        csr = CSR.from_edges(self.row, self.column, None, self.row_id.numel(), self.column_id.numel())
        return csr.to(self.device)

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
            entries = lambda: (row, column, torch.arange(row.numel()))  # noqa: E731
            shape = self.row_id.numel(), self.column_id.numel()
            known = SelfLoops(entries, shape, self.loop_row, self.loop_column, rule, self.row.numel(), self.device)
            self._loops[rule] = known
        return known


def _block(grid: Grid, order: NodeOrder, axis: str) -> tuple[int, int]:
    """First and last position, exclusive, of this rank's block along ``axis``."""
    index = grid.mesh.coordinates[axis]
    low, high = order.bounds(split(order.num_split, grid.mesh.grid_shape[axis])[index : index + 2])
    return low, high


def _dispatch(
    grid: Grid, edge_index: Tensor, edge_id: Tensor, row_axis: str, column_axis: str, order: int
) -> Redistribution:
    """Sends values from the ranks that store the edges to their tiles (collective). See :meth:`AdjacencyTile.of`."""
    shape = grid.mesh.grid_shape
    rows, columns = grid.orders[grid.other_order(order)], grid.orders[order]
    at_row, at_column = edge_blocks(edge_index, rows, columns, shape, row_axis, column_axis)
    (third,) = (axis for axis in GRID_AXES if axis not in (row_axis, column_axis))
    first = at_row * shape.stride(row_axis) + at_column * shape.stride(column_axis)
    receiver = torch.cat([first + replica * shape.stride(third) for replica in range(shape[third])])
    edge = torch.arange(first.numel()).repeat(shape[third])
    return Redistribution.of_copies(grid.transport(*GRID_AXES, exact=True), receiver, edge, edge_id)
