"""A checked input graph in the grid layout: mesh, node orders, this rank's edges, plan."""

from __future__ import annotations

from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session.settings import GRID_BLOCKS
from pyg_dist.data.options import Options
from pyg_dist.grid.graph import GridGraph
from pyg_dist.grid.mesh import Mesh
from pyg_dist.grid.plan.cost import Candidate, grid_plans
from pyg_dist.grid.plan.mesh_shape import MeshShape
from pyg_dist.grid.plan.node_order import in_one_piece
from pyg_dist.grid.plan.plan import GridPlan
from pyg_dist.grid.sharding import Grid
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.store.graph_input import GraphInput


def on_grid(
    graph_input: GraphInput, options: Options, model: Model, machine: Machine, identity: str
) -> tuple[GridGraph, GridPlan]:
    """The runtime form and the plan (collective)."""
    num_ranks = world_group().size
    best = candidates(model, num_ranks, options, machine)[0]
    given = None if options.mesh is None else MeshShape.of(options.mesh, num_ranks)
    shape = best.shape if given is None else given
    plan, orders = GridPlan.of(
        in_one_piece(graph_input.edge_index), model, shape, best.sums, best.price, machine, options.seed, identity
    )
    grid = Grid(Mesh(shape), orders, best.sums, GRID_BLOCKS.value(), options.comm_dtype)
    return GridGraph.of(grid, graph_input.edge_index, graph_input.loop_rule), plan


def candidates(model: Model, num_ranks: int, options: Options, machine: Machine) -> list[Candidate]:
    """The meshes and forms that the options allow, the cheapest first; of one data group (not collective)."""
    given = None if options.mesh is None else MeshShape.of(options.mesh, num_ranks)
    wanted = None if given is None else MeshShape(given.x, given.y, given.z)
    priced = grid_plans(model, num_ranks if wanted is None else wanted.size, machine)
    return [c for c in priced if wanted in (None, c.shape)]
