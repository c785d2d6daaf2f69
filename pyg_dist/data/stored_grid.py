"""A grid store as this rank's tiles of a graph: edges, attributes and the plan; no edge travels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.grid.mesh import GRID_AXES, Mesh, MeshShape
from pyg_dist.backend.session.agreement import raise_together
from pyg_dist.backend.session.settings import GRID_BLOCKS
from pyg_dist.data.grid_data import candidates
from pyg_dist.data.machine import common_machine
from pyg_dist.data.options import Options
from pyg_dist.layout.grid.graph import GridGraph
from pyg_dist.layout.grid.sharding import Grid, Tile
from pyg_dist.plan.grid.node_order import Balance, NodeOrder
from pyg_dist.plan.grid.plan import GridPlan
from pyg_dist.plan.grid.tiling import WHOLE_ROWS, row_range, split, tilings
from pyg_dist.plan.machine import Machine
from pyg_dist.plan.model import Model, Price
from pyg_dist.store.format import as_torch, storage_dtype
from pyg_dist.store.grid_store import GridStore
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.sharding import RowSharding


def stored_grid_plan(store: GridStore) -> GridPlan:
    """The plan for the mesh that the store was written for (not collective)."""
    made: dict[str, Any] = store.manifest.plan
    model = Model(**(made["model"] | {"widths": tuple(made["model"]["widths"])}))
    machine = Machine(**(made["machine"] | {"spmm": tuple(made["machine"]["spmm"])}))
    return GridPlan(
        MeshShape(**made["shape"]), made["sums"], made["num_nodes"], tuple(made["edges"]),
        tuple(Balance(**balance) for balance in made["tries"]), model, Price(**made["predicted"]), machine,
        made["hash"],
    )  # fmt: skip


def on_stored_grid(store: GridStore, options: Options) -> tuple[GridGraph, GridPlan, dict[str, RowTensor]]:
    """The runtime form, the plan, and the attributes by name (collective).

    On another mesh than the store was written for, the node orders stay what they are.
    """
    num_ranks, plan, error = world_group().size, stored_grid_plan(store), None
    shape = plan.shape if options.grid.mesh is None else MeshShape.of(options.grid.mesh, num_ranks)
    if (options.grid.mesh is None and shape.size != num_ranks) or shape != plan.shape:
        best = candidates(plan.model, num_ranks, options, common_machine())[0]
        shape = best.shape if options.grid.mesh is None else shape
        plan = replace(plan, shape=shape, sums=best.sums, predicted=best.price)
    orders: tuple[NodeOrder, ...] = ()
    try:
        orders = tuple(NodeOrder.of(node_id) for node_id in store.orders())
    except (ValueError, OSError) as caught:
        error = caught
    raise_together(error)
    grid = Grid(Mesh(shape), orders, plan.sums, GRID_BLOCKS.value(), options.grid.comm_dtype)
    try:
        graph = _graph(store, grid)
        attributes = _attributes(store, graph)
        first = len(_rectangle(store, grid, "z", "x", 0)[0]) if shape != stored_grid_plan(store).shape else 0
    except (ValueError, OSError) as caught:
        error = caught
    raise_together(error)
    if shape != stored_grid_plan(store).shape:
        plan = replace(plan, edges=tuple(world_group().gather_counts(first)))
    return graph, plan, attributes


def _graph(store: GridStore, grid: Grid) -> GridGraph:
    """This rank's edges; what its tiles will be read from is checked."""
    manifest, group = store.manifest, grid.mesh.group(*GRID_AXES)
    low, high = split(manifest.num_edges, group.size)[group.rank : group.rank + 2]
    ends = [store.range_rows("edges", name, manifest.num_edges, low, high) for name in ("source", "target")]
    edge_rows = RowSharding(group, "edge", manifest.num_edges, torch.arange(low, high))
    for row_axis, column_axis in tilings(grid.sums):
        for order in range(len(grid.orders)):
            for key, _, _ in store.overlapping(order, *_bounds(grid, row_axis, column_axis)):
                for name in ("edge_id", "row", "column"):
                    store.check(key, name)

    def read_tile(row_axis: str, column_axis: str, order: int) -> tuple[Tensor, Tensor]:
        return _rectangle(store, grid, row_axis, column_axis, order)

    return GridGraph(grid, torch.stack(ends), edge_rows, manifest.graph["loop_rule"], read_tile)


def _rectangle(store: GridStore, grid: Grid, row_axis: str, column_axis: str, order: int) -> tuple[Tensor, Tensor]:
    found = store.rectangle(order, *_bounds(grid, row_axis, column_axis))
    store.close()
    return found


def _bounds(grid: Grid, row_axis: str, column_axis: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """The positions of this rank's tile."""
    shape, here = grid.mesh.grid_shape, grid.mesh.coordinates
    rows, columns = (
        split(grid.num_nodes, shape[axis])[here[axis] : here[axis] + 2] for axis in (row_axis, column_axis)
    )
    return (rows[0], rows[1]), (columns[0], columns[1])


def _attributes(store: GridStore, graph: GridGraph) -> dict[str, RowTensor]:
    manifest, grid, found = store.manifest, graph.grid, dict[str, RowTensor]()
    for name, (dtype, shape) in manifest.node_attributes.items():
        size = (manifest.num_nodes, *shape)
        like = torch.empty(size, device="meta", dtype=_torch_dtype(dtype))
        sharding = graph.attribute_sharding(name, like)
        layout = sharding.layout if isinstance(sharding, Tile) else WHOLE_ROWS
        held = row_range(manifest.num_nodes, layout, grid.mesh.grid_shape, grid.mesh.coordinates)
        local = store.range_rows("rows", name, manifest.num_nodes, held.start, held.stop)
        if isinstance(sharding, Tile):
            local = local[:, sharding.columns.start : sharding.columns.stop].contiguous()
        found[name] = RowTensor.from_local(local, sharding)
    ids = graph.edge_sharding.global_id
    low, high = (int(ids[0]), int(ids[-1]) + 1) if ids.numel() else (0, 0)
    for name in manifest.edge_attributes:
        local = store.range_rows("edges", name, manifest.num_edges, low, high)
        found[name] = RowTensor.from_local(local, graph.edge_sharding)
    store.close()
    return found


def _torch_dtype(dtype: str) -> torch.dtype:
    return as_torch(torch.empty(0).numpy().astype(storage_dtype(dtype)), dtype).dtype
