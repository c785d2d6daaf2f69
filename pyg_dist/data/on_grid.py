"""A checked input graph in the grid layout: mesh, node orders, this rank's edges, plan."""

from __future__ import annotations

import os
from typing import cast

from pyg_dist.backend.agreement import digest
from pyg_dist.backend.axis import world_axis
from pyg_dist.backend.mesh import GRID_AXES, Mesh, MeshShape, nearest_cube
from pyg_dist.data.graph_input import GraphInput
from pyg_dist.data.options import Options
from pyg_dist.errors import OptionError
from pyg_dist.plan.grid import Sums, choose_orders, split, tile_counts
from pyg_dist.plan.grid_plan import GridPlan
from pyg_dist.tensor.grid_graph import GridGraph
from pyg_dist.tensor.tile import Grid


def on_grid(graph_input: GraphInput, options: Options, identity: str) -> tuple[GridGraph, GridPlan]:
    """The runtime form and the plan (collective)."""
    num_ranks = world_axis().size
    shape = nearest_cube(num_ranks) if options.mesh is None else MeshShape.of(options.mesh, num_ranks)
    sums = _sums()
    orders, tries = choose_orders(graph_input.edge_index, graph_input.num_nodes, shape, options.seed, sums)
    mesh = Mesh(shape)
    grid = Grid(mesh, orders, options.comm_dtype)
    axis = mesh.axis(*GRID_AXES)
    num_edges = graph_input.edge_index.shape[1]
    bounds = split(num_edges, axis.size)
    own = graph_input.edge_index[:, bounds[axis.rank] : bounds[axis.rank + 1]].clone()
    source, target = graph_input.edge_index
    counts = tile_counts(target, source, orders[-1], orders[0], shape.z, shape.x)
    places = [shape.coordinates(rank) for rank in range(num_ranks)]
    edges = tuple(int(counts[place["z"], place["x"]]) for place in places)
    plan = GridPlan(shape, sums, graph_input.num_nodes, edges, tries, digest(identity + repr((shape, sums))))
    return GridGraph(grid, own, num_edges, graph_input.loop_rule, sums, _num_blocks()), plan


def _sums() -> Sums:
    sums = os.environ.get("PYG_DIST_GRID_SUMS", "reduce_scatter")
    if sums not in ("all_reduce", "reduce_scatter"):
        raise OptionError(f"Expected PYG_DIST_GRID_SUMS to be all_reduce or reduce_scatter (got {sums!r}): unset it")
    return cast(Sums, sums)


def _num_blocks() -> int:
    given = os.environ.get("PYG_DIST_GRID_BLOCKS", "1")
    if not given.isdecimal() or int(given) < 1:
        raise OptionError(f"Expected PYG_DIST_GRID_BLOCKS to be a positive integer (got {given!r}): unset it")
    return int(given)
