"""Choice of the layout: the given one, or the one that ``layout="auto"`` finds cheaper; the factory of both."""

from __future__ import annotations

import sys
from dataclasses import astuple, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pyg_dist.backend.comm.data_groups import DataGroups
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import on_main
from pyg_dist.backend.session.steps import step
from pyg_dist.data.halo_data import node_parts, on_halo
from pyg_dist.data.options import GridOptions, Options, common_machine
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.halo.plan.cover import EXCHANGES
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model, Price
from pyg_dist.store.graph_input import GraphInput

if TYPE_CHECKING:
    from pyg_dist.grid.plan.plan import GridPlan


def model_of(graph_input: GraphInput, options: Options) -> Model:
    """The stack of convs that suits the data: as many columns as x, as many as y has classes (not collective)."""
    features, labels = graph_input.node_attributes.get("x"), graph_input.node_attributes.get("y")
    in_channels = features.shape[1] if features is not None and features.dim() == 2 else None
    is_classes = labels is not None and labels.numel() > 0 and not labels.is_floating_point()
    out_channels = max(int(labels.max()) + 1, 1) if is_classes and labels is not None else None
    size = 4 if options.grid.comm_dtype is None else options.grid.comm_dtype.itemsize
    num_edges = graph_input.edge_index.shape[1]
    return Model.of_layers(
        graph_input.num_nodes, num_edges, in_channels, out_channels, options.model, message_size=size
    )


def lay_out(graph_input: GraphInput, options: Options, identity: str) -> tuple[DistributedGraph, Plan | GridPlan]:
    """The graph in the layout of the options, and its plan (collective)."""
    groups = DataGroups.of(options.grid.mesh if options.layout == "halo" else None)
    parts = None
    if options.layout != "grid":
        with step(f"partition ({options.halo.partition_name}, {groups.part.size} parts)"):
            parts = node_parts(graph_input, options, groups.part)
    if options.layout == "halo" and parts is not None:
        with step("lay out (halo)"):
            return on_halo(graph_input, options, parts, groups)
    from pyg_dist.data.grid_data import on_grid  # loaded where a grid may be the layout

    features = graph_input.node_attributes.get("x")
    is_on_gpu = features is not None and features.is_cuda
    priced, machine = model_of(graph_input, options), common_machine("cuda" if is_on_gpu else "cpu")
    if parts is not None:
        options = choose_layout(graph_input, options, parts, priced, machine)
    with step(f"lay out ({options.layout})"):
        if options.layout == "halo" and parts is not None:
            return on_halo(graph_input, options, parts)
        return on_grid(graph_input, options, priced, machine, identity)


def choose_layout(graph_input: GraphInput, options: Options, parts: Tensor, model: Model, machine: Machine) -> Options:
    """The options with the cheapest layout in the place of "auto"; rank 0 prints why (collective)."""
    from pyg_dist.data.grid_data import candidates
    from pyg_dist.plan.auto import HaloCandidate, halo_candidates, reasons

    num_ranks = world_group().size

    def price() -> Tensor:
        found = halo_candidates(graph_input.edge_index, parts, num_ranks, model, machine)
        return torch.tensor([[EXCHANGES.index(c.exchange), *astuple(c.price)] for c in found], dtype=torch.float64)

    halo = [HaloCandidate(EXCHANGES[int(kind)], Price(*price)) for kind, *price in on_main(price).tolist()]
    grid = candidates(model, num_ranks, options, machine)
    if session.is_main():
        # The one line that the library prints: a choice that was left to it should not be silent.
        print(f"pyg_dist: {reasons(halo, grid, model, machine)}", file=sys.stderr)
    if halo[0].seconds <= grid[0].seconds:
        chosen = replace(options.halo, exchange=halo[0].exchange)
        return replace(options, layout="halo", halo=chosen, grid=GridOptions(None, None))
    mesh = options.grid.mesh
    if mesh is None:
        mesh = dict(zip("xyz", grid[0].shape.sizes("x", "y", "z"), strict=True))
    return replace(options, layout="grid", grid=replace(options.grid, mesh=mesh))
