"""A checked input graph in the grid layout: mesh, node orders, this rank's edges, plan."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from pyg_dist.backend.agreement import digest, on_main
from pyg_dist.backend.axis import world_axis
from pyg_dist.backend.mesh import GRID_AXES, Mesh, MeshShape
from pyg_dist.data.graph_input import GraphInput
from pyg_dist.data.options import Options
from pyg_dist.errors import OptionError
from pyg_dist.plan.grid import Sums, choose_orders, split, tile_counts
from pyg_dist.plan.grid_cost import Model, grid_plans
from pyg_dist.plan.grid_plan import GridPlan
from pyg_dist.plan.machine import Machine
from pyg_dist.tensor.grid_graph import GridGraph
from pyg_dist.tensor.tile import Grid

HIDDEN_WIDTH = 128
"""Columns of the two hidden layers that a mesh is chosen for: the data does not say what the model will have."""
_FORMS: tuple[Sums, ...] = ("reduce_scatter", "all_reduce")


def on_grid(graph_input: GraphInput, options: Options, identity: str) -> tuple[GridGraph, GridPlan]:
    """The runtime form and the plan (collective)."""
    num_ranks = world_axis().size
    given = None if options.mesh is None else MeshShape.of(options.mesh, num_ranks)
    model = _model_of(graph_input)
    # Machines may have other constants: one rank chooses for all.
    x, y, z, form, seconds = on_main(lambda: _choice(model, num_ranks, given)).tolist()
    shape = MeshShape(int(x), int(y), int(z), 1 if given is None else given.data)
    sums = _FORMS[int(form)]
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
    plan = GridPlan(
        shape, sums, graph_input.num_nodes, edges, tries, model, seconds, digest(identity + repr((shape, sums)))
    )
    return GridGraph(grid, own, num_edges, graph_input.loop_rule, sums, _num_blocks()), plan


def _model_of(graph_input: GraphInput) -> Model:
    """A GCN of three layers that suits the data."""
    features, labels = graph_input.node_attributes.get("x"), graph_input.node_attributes.get("y")
    in_channels = features.shape[1] if features is not None and features.dim() == 2 else HIDDEN_WIDTH
    is_classes = labels is not None and labels.numel() > 0 and not labels.is_floating_point()
    out_channels = max(int(labels.max()) + 1, 1) if is_classes and labels is not None else HIDDEN_WIDTH
    entries = graph_input.num_nodes + graph_input.edge_index.shape[1]
    return Model(graph_input.num_nodes, entries, (in_channels, HIDDEN_WIDTH, HIDDEN_WIDTH, out_channels))


def _choice(model: Model, num_ranks: int, given: MeshShape | None) -> Tensor:
    """x, y, z, the number of the form of the sums, and the predicted seconds."""
    forced = _sums()
    wanted = None if given is None else MeshShape(given.x, given.y, given.z)
    best = next(
        c
        for c in grid_plans(model, num_ranks if wanted is None else wanted.size, Machine.load())
        if forced in (None, c.sums) and wanted in (None, c.shape)
    )
    return torch.tensor([*best.shape.sizes("x", "y", "z"), _FORMS.index(best.sums), best.seconds], dtype=torch.float64)


def _sums() -> Sums | None:
    """The form that ``PYG_DIST_GRID_SUMS`` asks for."""
    sums = os.environ.get("PYG_DIST_GRID_SUMS")
    if sums not in (None, *_FORMS):
        raise OptionError(f"Expected PYG_DIST_GRID_SUMS to be all_reduce or reduce_scatter (got {sums!r}): unset it")
    return sums


def _num_blocks() -> int:
    given = os.environ.get("PYG_DIST_GRID_BLOCKS", "1")
    if not given.isdecimal() or int(given) < 1:
        raise OptionError(f"Expected PYG_DIST_GRID_BLOCKS to be a positive integer (got {given!r}): unset it")
    return int(given)
