"""Choice of the layout: the given one, or the one that ``layout="auto"`` finds cheaper; a graph in the halo layout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from pyg_dist.backend import host
from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.backend.comm.ids import IdLists
from pyg_dist.backend.comm.topology import DataGroups, machines, ranks_per_machine
from pyg_dist.backend.plain_json import typed
from pyg_dist.backend.session import session
from pyg_dist.backend.session.agreement import on_main
from pyg_dist.backend.session.steps import step
from pyg_dist.data.options import WHOLE_GRAPHS, Options, common_machine
from pyg_dist.errors import DataError, OptionError
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.halo.graph import HaloGraph
from pyg_dist.halo.plan.cover import BothEnds
from pyg_dist.halo.plan.levels import LevelCounts, shares_machines
from pyg_dist.halo.plan.plan import Plan, pairs_of, plan_hash
from pyg_dist.halo.plan.share import HaloShare, halo_share
from pyg_dist.halo.plan.sizes import ShareSizes
from pyg_dist.halo.sharding import HaloNodes
from pyg_dist.partition.balance import balanced_by_kind, whole_graphs
from pyg_dist.partition.stream import chunks_of
from pyg_dist.plan.parts import PartsOptions, find_parts
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.store.graph_input import GraphInput
from pyg_dist.store.hyperedges import edges_with_hyperedges
from pyg_dist.store.manifest import LoopRule

if TYPE_CHECKING:
    from pyg_dist.grid.plan.plan import GridPlan

_SEND_LITTLE = ("metis", "metis-cut", "metis-cover", "hypergraph", "cover")
"""Methods that look for few messages, of which parts of whole graphs send none."""

_HEAVIER = 1.1
"""Heaviest part over mean up to which whole graphs are taken where nobody asked for them."""


def model_of(graph_input: GraphInput, options: Options) -> Model:
    """The stack of convs that is priced: as many columns come in as x has, as many go out as y has classes."""
    features, labels = graph_input.node_attributes.get("x"), graph_input.node_attributes.get("y")
    in_channels = features.shape[1] if features is not None and features.dim() == 2 else None
    is_classes = labels is not None and labels.numel() > 0 and not (labels.is_floating_point() or labels.is_complex())
    out_channels = max(int(labels.max()) + 1, 1) if is_classes and labels is not None else None
    size = 4 if options.comm_dtype is None else options.comm_dtype.itemsize
    num_edges = graph_input.edge_index.shape[1]
    return Model.of_layers(
        graph_input.num_nodes, num_edges, in_channels, out_channels, options.model, message_size=size
    )


def lay_out(graph_input: GraphInput, options: Options, identity: str) -> tuple[DistributedGraph, Plan | GridPlan]:
    """The graph in the layout of the options, and its plan (collective)."""
    groups = DataGroups.of(options.mesh if options.layout == "halo" else None)
    parts = None
    if options.layout != "grid":
        with step(f"partition ({options.partition_name}, {groups.part.size} parts)"):
            parts, options = node_parts(graph_input, options, groups.part)
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
    from pyg_dist.plan.prices import HaloCandidate, halo_candidates, reasons

    num_ranks = world_group().size

    def price() -> list[dict[str, object]]:
        levels, bits = options.hierarchy, options.bits_by_direction
        found = halo_candidates(graph_input.edge_index, parts, num_ranks, model, machine, levels, bits)
        return [asdict(candidate) for candidate in found]

    halo = [typed(HaloCandidate, candidate) for candidate in on_main(price)]
    grid = candidates(model, num_ranks, options, machine)
    if session.is_main():
        # A choice that was left to the library should not be silent.
        print(f"pyg_dist: {reasons(halo, grid, model, machine)}", file=sys.stderr)
    if halo[0].seconds <= grid[0].seconds:
        return replace(options, layout="halo", exchange=halo[0].exchange, mesh=None, comm_dtype=None)
    mesh = options.mesh
    if mesh is None:
        mesh = dict(zip("xyz", grid[0].shape.sizes("x", "y", "z"), strict=True))
    return replace(options, layout="grid", mesh=mesh)


def on_halo(
    graph_input: GraphInput, options: Options, parts: Tensor, groups: DataGroups | None = None
) -> tuple[HaloGraph, Plan]:
    """The graph and the plan (collective); ``groups=None``: one data group."""
    groups = DataGroups.of(None) if groups is None else groups
    group = groups.part
    levels = levels_of(options, group, graph_input.edge_index, parts, lambda: model_of(graph_input, options))
    share = halo_share(
        graph_input.edge_index, parts, group.rank, group.size, options.exchange, ranks_per_machine=levels.shared_by,
        send=IdLists(group).send,
    )  # fmt: skip
    identity = plan_hash(graph_input.edge_index, parts, group.size, options.exchange)
    kept = parts.to(torch.int32) if group.rank == 0 else None
    plan = gathered_plan(share, group, options, options.partition_name, kept, identity, levels.across)
    return halo_graph(share, groups, options, graph_input.form.loop_rule, plan), plan


def halo_graph(share: HaloShare, groups: DataGroups, options: Options, loop_rule: LoopRule, plan: Plan) -> HaloGraph:
    """The graph of a rank's share (collective)."""
    bits = options.bits_by_direction
    nodes = HaloNodes(
        groups.part, share.node_id, share.num_nodes, options.exchange, bits, groups, share.ranks_per_machine
    )
    return HaloGraph(share, nodes, loop_rule, plan.messages)


def node_parts(graph_input: GraphInput, options: Options, group: Group) -> tuple[Tensor, Options]:
    """The owner of each node, and the options with the method that found them (collective).

    Computed on one rank, since solvers differ from run to run, and sent to all.
    """
    method = options.partition
    if isinstance(method, Plan):  # a data.plan has its parts on rank 0 alone
        given = (graph_input.edge_index, graph_input.num_nodes, group.size)
        return on_main(lambda: method.parts_for(*given, options.exchange, options.bits_by_direction)), options
    parts = _of_whole_graphs(graph_input, options, group.size) if isinstance(method, str) else None
    if parts is not None:
        return parts, replace(options, partition=WHOLE_GRAPHS)
    train_mask = graph_input.node_attributes.get("train_mask")
    if train_mask is not None and (train_mask.dtype != torch.bool or train_mask.dim() != 1):
        train_mask = None
    edges, sizes = graph_input.edge_index, [graph_input.num_nodes]
    if graph_input.hyperedges is not None and isinstance(method, str):
        edges = edges_with_hyperedges(edges, graph_input.num_nodes, graph_input.hyperedges)
        sizes.append(graph_input.hyperedges.size)
        train_mask = None if train_mask is None else F.pad(train_mask, (0, sizes[1]))
    found_by = PartsOptions(
        method, options.epsilon, options.seed, exchange=options.exchange,
        ranks_per_node=known_ranks_per_node(group), hierarchy=options.hierarchy,
        model=model_of(graph_input, options), bits=options.bits_by_direction,
    )  # fmt: skip

    def find() -> Tensor:
        names = [options.partition_name]
        parts = find_parts(edges, sum(sizes), group.size, found_by, train_mask, lambda name, _: names.append(name))
        if len(sizes) > 1:
            parts = balanced_by_kind(chunks_of(edges), parts, sizes, group.size, options.epsilon)[: sizes[0]]
        return torch.cat([parts, parts.new_tensor([len(names) > 1])])

    found = on_main(find)
    is_metis_cover = bool(found[-1])
    return found[:-1], replace(options, partition="metis-cover") if is_metis_cover else options


def _of_whole_graphs(graph_input: GraphInput, options: Options, num_parts: int) -> Tensor | None:
    """Parts of whole graphs, where they are asked for, or the method looks for few messages and they are balanced.

    Raises:
        DataError: They are asked for, and this is no batch of graphs.
    """
    is_asked_for = options.partition == WHOLE_GRAPHS
    found, batch = None, graph_input.node_attributes.get("batch")
    looks = is_asked_for or (options.partition in _SEND_LITTLE and num_parts > 1)
    if looks and batch is not None and batch.dtype == torch.int64 and batch.dim() == 1:
        found = whole_graphs(graph_input.edge_index, batch.cpu(), num_parts)
    if is_asked_for and found is None:
        raise DataError(
            f"Expected a Batch of graphs with partition={WHOLE_GRAPHS!r} (got edges between different graphs, or no "
            f"'batch'): use partition='metis'"
        )
    if found is None or not (is_asked_for or found[1] <= max(_HEAVIER, 1 + options.epsilon)):
        return None
    if not is_asked_for and session.is_main():
        print(
            f"pyg_dist: each graph of the batch is whole on one of {num_parts} ranks, the heaviest of which has "
            f"{found[1]:.2f} of the mean, so convs send nothing (partition={WHOLE_GRAPHS!r})",
            file=sys.stderr,
        )
    return found[0]


class Levels(NamedTuple):
    """Whether rows that cross to another machine are sent once for all ranks of a machine."""

    shared_by: int | None  # ranks per machine, where they do
    across: tuple[int, int] | None  # rows that cross machines, in one level and in two, where ranks share machines


def levels_of(
    options: Options, group: Group, edge_index: Tensor, parts: BothEnds, model: Callable[[], Model]
) -> Levels:
    """One level or two, as the options say or as is cheaper for a ``model``, by the counts of rank 0 (collective)."""
    on_each = known_ranks_per_node(group)
    machines_to_share(options, group)
    if on_each is None or not shares_machines(group.size, on_each):
        return Levels(None, None)

    def chosen() -> tuple[bool, tuple[int, int] | None]:
        counts, machine = LevelCounts.of(edge_index, parts, group.size, on_each), Machine.load()
        priced, bits = (model(), machine.with_ranks_per_node(on_each)), options.bits_by_direction
        found = counts.chosen(options.exchange, options.hierarchy, *priced, bits)
        return found.two_levels, counts.across

    two_levels, across = on_main(chosen)
    return Levels(on_each if two_levels else None, across)


def machines_to_share(options: Options, group: Group) -> int | None:
    """Ranks per machine, if the options allow ranks of a machine to share rows from other machines (collective).

    Raises:
        OptionError: Two levels are asked for, but ranks of a machine do not follow one another.
    """
    on_each = known_ranks_per_node(group)
    if options.hierarchy == "on" and on_each is None:
        raise OptionError(
            f"Expected ranks of a machine to follow one another, in equal numbers and one data group, with "
            f"hierarchy='on' (got machines {machines()}): start them so, or hierarchy='auto'"
        )
    return on_each if options.hierarchy != "off" and shares_machines(group.size, on_each) else None


def gathered_plan(
    share: HaloShare,
    group: Group,
    options: Options,
    partition: str,
    parts: Tensor | None,
    identity: str,
    across: tuple[int, int] | None = None,
) -> Plan:
    """The plan, from every rank's numbers (collective)."""
    sent = host.tensor(share.sum_transfer.sent).sum(0).tolist()
    mine = [*vars(ShareSizes.of(share)).values(), *sent]
    table = group.gather_rows(host.tensor([mine]), [1] * group.size)
    sizes, rows = table[:, : -group.size].tolist(), table[:, -group.size :]
    shares = tuple(ShareSizes(*size) for size in sizes)
    return Plan(
        options.layout, partition, options.exchange, shares, pairs_of(rows), identity, parts,
        options.bits_by_direction, known_ranks_per_node(group), share.ranks_per_machine is not None, across,
    )  # fmt: skip


def known_ranks_per_node(group: Group) -> int | None:
    """:func:`ranks_per_machine`; ``None`` where there are several data groups (collective over all ranks)."""
    found = ranks_per_machine()
    return found if group.size == world_group().size else None
