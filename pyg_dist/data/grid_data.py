"""A graph in the grid layout, of a checked input or of a grid store: mesh, node orders, this rank's edges, plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.plain_json import typed
from pyg_dist.backend.session.agreement import digest, raised_on_all_ranks
from pyg_dist.backend.session.settings import GRID_BLOCKS
from pyg_dist.data.options import Options, common_machine
from pyg_dist.errors import StoreError
from pyg_dist.grid.collectives import Mesh
from pyg_dist.grid.graph import GridGraph
from pyg_dist.grid.plan.cost import Candidate, grid_plans
from pyg_dist.grid.plan.mesh_shape import (
    GRID_AXES,
    WHOLE_ROWS,
    MeshShape,
    TileLayout,
    Tiling,
    row_range,
    split,
    tilings,
)
from pyg_dist.grid.plan.node_order import Balance, NodeOrder, in_one_piece
from pyg_dist.grid.plan.plan import GridPlan
from pyg_dist.grid.sharding import Grid, Tile
from pyg_dist.partition.inputs import Array
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.store.format import torch_dtype
from pyg_dist.store.graph_input import GraphInput
from pyg_dist.store.grid_store import GridStore
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.sharding import RowSharding


def on_grid(
    graph_input: GraphInput, options: Options, model: Model, machine: Machine, identity: str
) -> tuple[GridGraph, GridPlan]:
    """The graph and the plan (collective)."""
    best = cheapest(model, options, machine)
    edges = in_one_piece(graph_input.edge_index)
    plan, orders = GridPlan.of(edges, model, best, machine, options.seed, identity)
    grid = Grid(Mesh(best.shape), orders, best.sums, GRID_BLOCKS.value(), options.comm_dtype)
    return GridGraph.of(grid, graph_input.edge_index, graph_input.form.loop_rule), plan


def candidates(model: Model, num_ranks: int, options: Options, machine: Machine) -> list[Candidate]:
    """The meshes and forms that the options allow, the cheapest first; of one data group (not collective)."""
    given = None if options.mesh is None else MeshShape.of(options.mesh, num_ranks)
    wanted = None if given is None else MeshShape(given.x, given.y, given.z)
    return grid_plans(model, num_ranks if wanted is None else wanted.size, machine, wanted)


def cheapest(model: Model, options: Options, machine: Machine) -> Candidate:
    """The cheapest candidate for all ranks, on as many data groups as the options ask for (not collective)."""
    num_ranks = world_group().size
    best = candidates(model, num_ranks, options, machine)[0]
    return best if options.mesh is None else replace(best, shape=MeshShape.of(options.mesh, num_ranks))


class StoredOrder(NodeOrder):
    """A node order that stays in its file, of which a rank copies only its own ranges."""

    def __init__(self, node_id: Array, position: Array) -> None:
        self._node_id, self._position = node_id, position

    @property
    def num_nodes(self) -> int:
        return len(self._node_id)

    def nodes(self, low: int, high: int) -> Tensor:
        """See :class:`~pyg_dist.grid.plan.node_order.NodeOrder`; a copy."""
        return torch.from_numpy(self._node_id[low:high].astype(np.int64))

    def positions(self, node_id: Tensor) -> Tensor:
        return torch.from_numpy(self._position.take(node_id.numpy()).astype(np.int64, copy=False))


def stored_grid_plan(store: GridStore) -> GridPlan:
    """The plan for the mesh that the store was written for (not collective)."""
    made = {field.name: store.manifest.plan.get(field.name) for field in fields(GridPlan) if field.name != "layout"}
    try:
        return typed(GridPlan, made, "plan")
    except ValueError as error:
        raise StoreError(f"Expected the plan of a grid in {store.path} (got {error}): write it again") from error


def on_mesh(written: GridPlan, best: Candidate, machine: Machine, edges: tuple[int, ...]) -> GridPlan:
    """A plan for another mesh than its store was written for; the node orders stay (not collective)."""
    balance = Balance(written.tries[-1].method, max(edges) * len(edges) / max(sum(edges), 1))
    name = digest(repr((written.hash, best.shape, best.sums)))
    return replace(
        written, shape=best.shape, sums=best.sums, edges=edges, tries=(balance,), predicted=best.price,
        machine=machine, hash=name,
    )  # fmt: skip


def edges_of_tile(store: GridStore, shape: MeshShape, place: Mapping[str, int]) -> int:
    """Edges of a rank's tile in the first layer; files that it shares with other ranks are read."""
    held = (row_range(store.manifest.num_nodes, TileLayout((axis,), None, 0), shape, place) for axis in ("z", "x"))
    return store.count(0, *((rows.start, rows.stop) for rows in held))


def on_stored_grid(store: GridStore, options: Options) -> tuple[GridGraph, GridPlan, dict[str, RowTensor]]:
    """The graph, the plan, and the attributes by name (collective).

    On another mesh than the store was written for, the node orders stay the same.
    """
    num_ranks, written = world_group().size, stored_grid_plan(store)
    shape = written.shape if options.mesh is None else MeshShape.of(options.mesh, num_ranks)
    is_as_written = shape == written.shape and shape.size == num_ranks
    machine = written.machine if is_as_written else common_machine()
    best = None if is_as_written else cheapest(written.model, options, machine)
    shape, sums = (shape, written.sums) if best is None else (best.shape, best.sums)
    with raised_on_all_ranks():
        orders = tuple(StoredOrder(*store.order(number)) for number in range(store.num_orders))
    grid = Grid(Mesh(shape), orders, sums, GRID_BLOCKS.value(), options.comm_dtype)
    with raised_on_all_ranks():
        graph = _graph(store, grid)
        mine = 0 if best is None else edges_of_tile(store, shape, grid.mesh.coordinates)
        attributes = _attributes(store, graph)
    if best is None:
        return graph, written, attributes
    return graph, on_mesh(written, best, machine, tuple(world_group().gather_counts(mine))), attributes


def _graph(store: GridStore, grid: Grid) -> GridGraph:
    """The graph with this rank's edges; the files from which its tiles will be read are checked."""
    manifest, group = store.manifest, grid.mesh.group(*GRID_AXES)
    low, high = split(manifest.num_edges, group.size)[group.rank : group.rank + 2]
    ends = [store.range_rows("edges", name, manifest.num_edges, low, high) for name in ("source", "target")]
    edge_rows = RowSharding(group, "edge", manifest.num_edges, host.arange(low, high))
    for row_axis, column_axis in tilings(grid.sums):
        for order in range(len(grid.orders)):
            layouts = Tiling(row_axis, column_axis, order).layouts(len(grid.orders))
            for key, _, _ in store.overlapping(order, *map(grid.held, layouts)):
                for name in ("edge_id", "row", "column"):
                    store.check(key, name)

    def read_tile(tiling: Tiling) -> tuple[Tensor, Tensor]:
        found = store.rectangle(tiling.order, *map(grid.held, tiling.layouts(len(grid.orders))))
        store.close()
        return found

    return GridGraph(grid, torch.stack(ends), edge_rows, manifest.graph.loop_rule, read_tile)


def _attributes(store: GridStore, graph: GridGraph) -> dict[str, RowTensor]:
    manifest, grid, found = store.manifest, graph.grid, dict[str, RowTensor]()
    for name, row in manifest.node_attributes.items():
        like = torch.empty((manifest.num_nodes, *row.shape), device="meta", dtype=torch_dtype(row.dtype))
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
