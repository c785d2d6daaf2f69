"""What a distributed graph is priced for, with which constants, and which layout ``layout="auto"`` takes."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, astuple, replace

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import on_main
from pyg_dist.data.graph_input import GraphInput
from pyg_dist.data.grid_data import candidates
from pyg_dist.data.options import Options
from pyg_dist.plan.auto import HaloCandidate, halo_candidates, reasons
from pyg_dist.plan.halo.remote_edges import EXCHANGES
from pyg_dist.plan.machine import Machine
from pyg_dist.plan.model import Model, Price


def model_of(graph_input: GraphInput, options: Options) -> Model:
    """The stack of convs that suits the data: as many columns as x, as many as y has classes (not collective)."""
    features, labels = graph_input.node_attributes.get("x"), graph_input.node_attributes.get("y")
    in_channels = features.shape[1] if features is not None and features.dim() == 2 else None
    is_classes = labels is not None and labels.numel() > 0 and not labels.is_floating_point()
    out_channels = max(int(labels.max()) + 1, 1) if is_classes and labels is not None else None
    size = 4 if options.comm_dtype is None else options.comm_dtype.itemsize
    num_edges = graph_input.edge_index.shape[1]
    return Model.of_layers(
        graph_input.num_nodes, num_edges, in_channels, out_channels, options.model, message_size=size
    )


def common_machine() -> Machine:
    """Rank 0's constants, with the ranks that really run on each machine (collective)."""

    def constants() -> Tensor:
        return torch.tensor(list(json.dumps(asdict(Machine.load())).encode()), dtype=torch.uint8)

    values = json.loads(bytes(on_main(constants).tolist()))
    machine = Machine(**(values | {"spmm": tuple(values["spmm"])}))
    on_each = ranks_per_node()
    return machine if on_each is None else machine.with_ranks_per_node(on_each)


def ranks_per_node() -> int | None:
    """Ranks on each machine, or None where they do not lie there one after another, in equal numbers (collective).

    The last machine may have fewer. Where a launcher does not say which ranks share a machine, all do.
    """
    local = world_group().gather_counts(session.local_rank())
    most = max(local) + 1
    return most if local == [rank % most for rank in range(len(local))] else None


def choose_layout(graph_input: GraphInput, options: Options, parts: Tensor, model: Model, machine: Machine) -> Options:
    """The options with the cheapest layout in the place of "auto"; rank 0 prints why (collective)."""
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
        return replace(options, layout="halo", exchange=halo[0].exchange, mesh=None, comm_dtype=None)
    mesh = dict(zip("xyz", grid[0].shape.sizes("x", "y", "z"), strict=True)) if options.mesh is None else options.mesh
    return replace(options, layout="grid", mesh=mesh)
