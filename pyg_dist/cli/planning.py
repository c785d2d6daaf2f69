"""``python -m pyg_dist plan GRAPH --ranks P ...``: predict messages, work, memory and cost of training on P ranks.

One process, nothing collective.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from pyg_dist.backend.session.agreement import digest
from pyg_dist.backend.session.steps import set_up, step
from pyg_dist.cli import inputs
from pyg_dist.cli.inputs import Commands, require
from pyg_dist.cli.stored_plan import is_store, plan_of_store, plans_of_types
from pyg_dist.errors import OptionError
from pyg_dist.grid.plan.cost import Candidate, grid_plans, grid_table
from pyg_dist.grid.plan.node_order import in_one_piece
from pyg_dist.grid.plan.plan import GridPlan
from pyg_dist.halo.plan.cover import EXCHANGES
from pyg_dist.halo.plan.levels import HIERARCHIES
from pyg_dist.halo.plan.mini_batches import MiniBatchPlan
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.plan.parts import METHODS, PartsOptions, find_parts
from pyg_dist.plan.prices import HaloCandidate, halo_candidates, reasons
from pyg_dist.pricing.base import DistributionPlan, columns, fold, imbalance
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.pricing.plot import new_figure, number_ranks, write_page
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.sources import KINDS


def add_command(commands: Commands) -> None:
    """Add ``plan`` to the command line."""
    parser = commands.add_parser(
        "plan", help="what training on some number of ranks would send, multiply, hold and cost"
    )
    parser.set_defaults(run=run, default=parser.get_default)
    parser.add_argument("graph", help=f"{KINDS}; a store of the command partition")
    inputs.add_graph_options(parser)
    parser.add_argument("--ranks", type=int, nargs="+", required=True, metavar="P",
                        help="of several numbers, a line each says what they gain")  # fmt: skip
    parser.add_argument(
        "--partition", default="metis", help=f"{', '.join(METHODS)}, or a .npy file with a part per node"
    )
    parser.add_argument("--layout", choices=["halo", "grid", "auto"], help="default: halo; a store has its own")
    parser.add_argument("--exchange", choices=EXCHANGES, default="hybrid")
    parser.add_argument("--hierarchy", choices=HIERARCHIES, default="auto", help="whether what crosses machines "
                        "crosses once for all ranks of one; auto: where that is cheaper")  # fmt: skip
    parser.add_argument("--epsilon", type=float, default=0.03, help="how much heavier than the mean a part may be")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bits", type=int, nargs="+", default=[32], choices=[32, 16, 8, 4, 2],
                        help="of halo messages: forward and, if not the same, backward")  # fmt: skip
    parser.add_argument("--widths", type=int, nargs="+", default=[], metavar="F", help="columns to give bytes for")
    parser.add_argument(
        "--model", type=int, nargs=2, metavar=("LAYERS", "WIDTH"), help="the convs to price; default: 3 128"
    )
    parser.add_argument("--conv", choices=["gcn", "sage"], default="gcn", help="their kind")
    inputs.add_machine_options(parser)
    parser.add_argument("--ranks-per-node", type=int, help="ranks on one machine; parts with much traffic are put "
                        "on one; default: as the constants say")  # fmt: skip
    parser.add_argument("--batch-size", type=int, metavar="B", help="nodes of uniform mini-batches; what a step on one "
                        "sends, holds and costs is counted on a few samples")  # fmt: skip
    parser.add_argument("--data-groups", type=int, default=1, metavar="D",
                        help="groups of ranks that draw batches of their own, each with P / D parts")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print plan.to_dict() instead of tables")
    parser.add_argument("--plot", type=Path, help="draw the plan: .png, .svg or .pdf")
    parser.add_argument("--html", type=Path, help="write one page with the tables and pictures")
    parser.add_argument("--save", type=Path, help="write the halo plan with its parts, for Plan.load")


def run(args: argparse.Namespace) -> None:
    """Read, partition if the layout needs it, price, count and print."""
    require(min(args.ranks) >= 1, f"--ranks of one rank or more, at least one part each (got {min(args.ranks)})")
    require(min(args.widths, default=1) >= 1, f"--widths of one column or more (got {min(args.widths, default=1)})")
    machine = inputs.machine_of(args)
    if args.ranks_per_node is not None:
        machine = machine.with_ranks_per_node(args.ranks_per_node)
    of_types = plans_of_types(args, machine)
    if of_types is not None:
        found = [plan.to_dict(args.widths) for plan in of_types]
        text = "\n\n".join(plan.describe(args.widths) for plan in of_types)
        print(json.dumps(found if len(found) > 1 else found[0]) if args.json else text)
        return
    _check(args)
    if is_store(args.graph):
        stored = plan_of_store(
            Path(args.graph), args.ranks[0], args.exchange, args.ranks_per_node, machine, args.hierarchy
        )
        text = stored.describe(args.widths, machine)
        print(json.dumps(stored.to_dict(args.widths, machine)) if args.json else text)
        _draw(args, stored, text)
        return
    num_counts = len({1, *args.ranks}) if len(args.ranks) > 1 else 1
    with set_up(f"plan {Path(args.graph).name}", num_steps=1 + 2 * num_counts):
        with step("read"):
            graph = inputs.read_planned_graph(args.graph, args.undirected, inputs.reading_of(args))
        if args.layout != "grid":  # which pads
            inputs.require_parts("rank", max(args.ranks), graph.num_nodes)
        layers = None if args.model is None else tuple(args.model)
        num_edges = graph.edge_index.shape[1]
        model = Model.of_layers(graph.num_nodes, num_edges, graph.num_features, graph.num_classes, layers, args.conv)
        if len(args.ranks) > 1:
            _compare(args, graph, model, machine)
            return
        planned = _plan(args, graph, args.ranks[0] // args.data_groups, model, machine)
        plan, sampled = planned.plan, None
        if args.batch_size is not None and isinstance(plan, Plan):
            sampled = MiniBatchPlan.of(graph.edge_index, plan, args.batch_size, args.data_groups, args.seed)
    text = plan.describe(args.widths, machine, model)
    if sampled is not None:
        text += "\n\n" + sampled.describe(args.widths, machine, model)
    notes = [grid_table(planned.grid, plan.ranks)] if planned.grid else []
    if planned.halo:  # every exchange, and why one was taken
        notes += [f"{candidate}: {candidate.price} a step" for candidate in planned.halo]
        notes.append(reasons(planned.halo, planned.grid, model, machine))
    text = fold("\n".join([*notes, text]))
    if args.json:
        numbers = plan.to_dict(args.widths, machine, model)
        if sampled is not None:
            numbers["mini_batches"] = sampled.to_dict(args.widths, machine, model)
        if candidates := [c.to_dict() for c in planned.halo] + [c.to_dict() for c in planned.grid]:
            numbers["candidates"] = candidates
        print(json.dumps(numbers))
    else:
        print(text)
    _draw(args, plan, text)
    if args.save:
        if not isinstance(plan, Plan):
            raise OptionError(
                f"Expected a halo plan to save in {args.save} (the grid is cheaper): --layout halo has one"
            )
        plan.save(args.save)


class Planned(NamedTuple):
    """A plan, and the candidates that it was chosen from."""

    plan: DistributionPlan  # the cheapest
    halo: list[HaloCandidate]  # every exchange, for ``--layout auto``
    grid: list[Candidate]  # every mesh, unless the layout is halo


def _plan(args: argparse.Namespace, graph: inputs.PlannedGraph, ranks: int, model: Model, machine: Machine) -> Planned:
    """Partition if the layout needs it, price and count."""
    with step(f"partition into {ranks}"):
        parts, name = (None, "") if args.layout == "grid" else _parts_of(graph, args, ranks, model, machine)
    with step(f"count for {ranks} ranks"):
        bits = args.bits[0], args.bits[-1]
        grid = [] if args.layout == "halo" else grid_plans(model, ranks, machine)
        halo: list[HaloCandidate] = []
        if args.layout == "auto" and parts is not None:
            halo = halo_candidates(graph.edge_index, parts, ranks, model, machine, args.hierarchy, bits)
        if parts is None or (halo and grid[0].seconds < halo[0].seconds):
            identity = digest(repr((digest(graph.edge_index), args.seed)))
            tiles, _ = GridPlan.of(in_one_piece(graph.edge_index), model, grid[0], machine, args.seed, identity)
            return Planned(tiles, halo, grid)
        exchange = halo[0].exchange if halo else args.exchange
        counted = Plan.of(
            graph.edge_index, parts, ranks, exchange, name, machine.ranks_per_node, args.hierarchy, model, machine, bits
        )
        return Planned(counted, halo, grid)


def _parts_of(
    graph: inputs.PlannedGraph, args: argparse.Namespace, ranks: int, model: Model, machine: Machine
) -> tuple[Tensor, str]:
    method = inputs.read_parts(args.partition) if args.partition.endswith(".npy") else args.partition
    options = PartsOptions(
        method, args.epsilon, args.seed, exchange=args.exchange, ranks_per_node=machine.ranks_per_node,
        hierarchy=args.hierarchy, model=model, machine=machine, bits=(args.bits[0], args.bits[-1]),
    )  # fmt: skip
    found_by = [Path(args.partition).name]
    parts = find_parts(
        graph.edge_index, graph.num_nodes, ranks, options, graph.train_mask, lambda name, _: found_by.append(name)
    )
    return parts, found_by[-1]


def _draw(args: argparse.Namespace, plan: DistributionPlan, text: str) -> None:
    width = max(args.widths, default=256)
    if args.plot:
        plan.plot(args.plot, width)
    if args.html:
        write_page(args.html, f"plan of {Path(args.graph).name}", text, [partial(plan.plot, width=width)])


_LAYOUTS_OF = {
    "--save": ("halo", "auto"), "parts of a .npy file": ("halo", "auto"),
    "--batch-size": ("halo",), "--bits": ("halo",), "--exchange": ("halo",),
}  # fmt: skip
"""The layouts that an option goes with, if not with all."""


def _check(args: argparse.Namespace) -> None:
    """Check the options before the work begins, and set ``args.layout``: a store has the one it was written for."""
    if is_store(args.graph):
        of_machine = ("exchange", "hierarchy", "machine", "device", "ranks_per_node")
        inputs.require_only(args, "a store", "graph", "ranks", "layout", "widths", "json", "plot", "html", *of_machine)
        layout = Manifest.load(Path(args.graph)).layout
        require(
            args.layout in (None, layout),
            f"--layout {layout}, for which the store {args.graph} was written (got {args.layout}): leave it out, or "
            f"write another store",
        )
        args.layout = layout
    args.layout = args.layout or "halo"
    given = {
        "--save": args.save is not None, "parts of a .npy file": args.partition.endswith(".npy"),
        "--batch-size": args.batch_size is not None, "--bits": args.bits != [32],
        "--exchange": args.exchange != "hybrid", "a store": is_store(args.graph),
    }  # fmt: skip
    for option in (name for name, is_given in given.items() if is_given):
        layouts = _LAYOUTS_OF.get(option, (args.layout,))
        require(
            args.layout in layouts, f"{option} with --layout {' or '.join(layouts)} (got {args.layout}): leave it out"
        )
        require(
            len(args.ranks) == 1 or option in ("--bits", "--exchange"),
            f"{option} with one number of ranks (got {len(args.ranks)}): name one",
        )
    has_batches, groups = args.batch_size is not None, args.data_groups
    require(groups == 1 or has_batches, f"--data-groups with --batch-size (got {groups}): groups draw batches")
    require(
        groups >= 1 and args.ranks[0] % groups == 0,
        f"--data-groups to divide --ranks (got {groups} groups of {args.ranks[0]} ranks)",
    )
    require(len(args.bits) <= 2, f"--bits with one number or two, forward and backward (got {len(args.bits)})")
    inputs.require_seed(args.seed)
    inputs.require_folder("--save", args.save)
    inputs.require_folder("--html", args.html)
    inputs.require_drawable(args.plot)


_MIB = 2**20


@dataclass(frozen=True)
class RankCount:
    """The predicted cost of training on one number of ranks."""

    ranks: int  # P
    layout: str  # the layout that was planned, in words
    seconds: float  # of a training step
    speedup: float  # of one process over these
    memory_bytes: int  # of the rank that needs most
    sent_bytes: int  # in one aggregation of ``width`` columns, all ranks together
    imbalance: float  # the most loaded rank over the mean, of nodes


def _compare(args: argparse.Namespace, graph: inputs.PlannedGraph, model: Model, machine: Machine) -> None:
    """Plan for each number of ranks; print a line for each, and advice."""
    width = max(args.widths, default=max(model.widths))
    plans = {count: _plan(args, graph, count, model, machine).plan for count in sorted({1, *args.ranks})}
    seconds = {count: plan.price(model, machine).seconds for count, plan in plans.items()}
    found = [
        RankCount(
            count, plan.layout, seconds[count], seconds[1] / seconds[count], max(plan.memory_bytes(model)),
            plan.halo_bytes(width), imbalance(plan.nodes),
        )
        for count, plan in plans.items() if count in args.ranks
    ]  # fmt: skip
    table = columns(
        found,
        ("ranks", lambda one: f"{one.ranks}"),
        ("layout", lambda one: one.layout),
        ("s a step", lambda one: f"{one.seconds:.4g}"),
        ("speed-up", lambda one: f"{one.speedup:.2f}x"),
        ("MiB a rank", lambda one: f"{one.memory_bytes / _MIB:,.1f}"),
        ("MiB sent", lambda one: f"{one.sent_bytes / _MIB:,.2f}"),
        ("max/mean nodes", lambda one: f"{one.imbalance:.2f}"),
        left=(1,),
    )
    about = f"predicted for a {model}; MiB sent are of one aggregation of {width} columns"
    text = fold("\n".join([about, f"constants: {machine.source}", *table, advice(found)]))
    numbers = {"model": str(model), "machine": machine.source, "width": width, "plans": [asdict(one) for one in found]}
    print(json.dumps(numbers) if args.json else text)
    if args.plot:
        plot_counts(args.plot, found)
    if args.html:
        write_page(args.html, f"plans of {Path(args.graph).name}", text, [partial(plot_counts, found=found)])


def advice(found: Sequence[RankCount]) -> str:
    """The fastest number of ranks, and the largest with a parallel efficiency of one half."""
    fastest = min(found, key=lambda one: one.seconds)
    busy = [one.ranks for one in found if one.speedup >= 0.5 * one.ranks]
    text = f"fastest: {fastest.ranks} rank{'s' * (fastest.ranks > 1)} ({fastest.speedup:.1f} times as fast as one)"
    return f"{text}; the most that are used at least half: {max(busy)}" if busy else text


def plot_counts(path: str | Path, found: Sequence[RankCount]) -> None:
    """Draw seconds, and memory and bytes, by ranks."""
    require(len(found) > 1, f"two numbers of ranks or more to draw (got {len(found)}): --ranks 1 2 4 8")
    figure = new_figure(10, 4)
    time, size = figure.subplots(1, 2)
    ranks = [one.ranks for one in found]
    time.plot(ranks, [one.speedup for one in found], marker="o", label="predicted")
    time.plot(ranks, ranks, linestyle=":", color="grey", label="ideal")
    time.set(title="speed-up over one process", xscale="log", yscale="log")
    size.plot(ranks, [one.memory_bytes / _MIB for one in found], marker="o", label="memory of the largest rank")
    size.plot(ranks, [one.sent_bytes / _MIB for one in found], marker="o", label="sent in one aggregation")
    size.set(title="MiB", xscale="log")
    for axes in (time, size):
        number_ranks(axes, ranks)
        axes.legend(fontsize="small")
    figure.savefig(path)
