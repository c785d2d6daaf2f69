"""``python -m pyg_dist partition GRAPH --parts P``: compare partitions, write one, or write a store.

Without an output, methods are compared for every number of parts; ``OUT.npy`` gets the part of each node; any other
output is the folder of a store. One process, nothing collective.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor
from tqdm import tqdm

from pyg_dist.cli import inputs
from pyg_dist.cli.conversion import StoreOptions, write_grid_store, write_halo_store, write_types_store
from pyg_dist.cli.inputs import Commands, require
from pyg_dist.cli.profile import peak_bytes
from pyg_dist.cli.stored_plan import plan_of_store
from pyg_dist.data.stored_types import stored_types_plan
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.partition import Batches
from pyg_dist.partition.solver import PRESETS, SOLVERS, parse_bytes, require_memory
from pyg_dist.plan.budget import solve_within
from pyg_dist.plan.parts import METHODS, PartsOptions, solve
from pyg_dist.pricing.base import columns, imbalance
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.pricing.plot import new_figure
from pyg_dist.store.manifest import Manifest
from pyg_dist.store.sources import KINDS, open_source, open_types
from pyg_dist.store.typed_store import TypesManifest


def add_command(commands: Commands) -> None:
    """Add ``partition`` to the command line."""
    parser = commands.add_parser("partition", help="compare partitions, write one, or write a store")
    parser.set_defaults(run=run, default=parser.get_default)
    parser.add_argument("graph", help=KINDS)
    parser.add_argument("out", nargs="?", help="OUT.npy: the part of each node; else the folder of a store, which each "
                        "rank reads its own part of; nothing: compare")  # fmt: skip
    parser.add_argument("--parts", type=lambda word: int(word) if word.lstrip("-").isdigit() else word,
                        nargs="+", required=True, metavar="P",  # the last word may be OUT.npy
                        help="as many as ranks, or more: a store's parts are then merged")  # fmt: skip
    parser.add_argument("--model", nargs="+", metavar="METHOD",
                        help=f"{', '.join(METHODS)}; of a store, or a .npy file of parts; default: metis")  # fmt: skip
    parser.add_argument("--compare", action="store_true", help="every method")
    parser.add_argument("--solver", choices=SOLVERS, default="mt-kahypar", help="of hypergraphs")
    parser.add_argument("--preset", choices=PRESETS, help="Mt-KaHyPar's; default: the method's own")
    parser.add_argument("--epsilon", type=float, default=0.03, help="how much heavier than the mean a part may be")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-budget", type=float, metavar="SECONDS", help="try seeds until then, keep the best")
    parser.add_argument("--batch-size", type=int, help="nodes of a stochastic mini-batch; default: a tenth")
    parser.add_argument("--theta", type=float, default=0.1, help="error of a stochastic net's connectivity")
    parser.add_argument("--delta", type=float, default=0.5, help="probability of a larger one")
    inputs.add_machine_options(parser)
    parser.add_argument("--memory", help="to use, such as 4GiB, which is a store's default")
    parser.add_argument("--layout", choices=["halo", "grid"], default="halo", help="of a store")
    parser.add_argument("--tiles", type=int, nargs=2, metavar=("R", "C"), help="of a grid store; default: 16 16")
    parser.add_argument("--mesh", type=int, nargs=3, metavar=("X", "Y", "Z"),
                        help="of a grid store; default: the planner's choice")  # fmt: skip
    inputs.add_graph_options(parser)
    parser.add_argument("--resume", action="store_true", help="go on with a store that an interrupted run has left")
    parser.add_argument("--force", action="store_true", help="replace a store, or an interrupted run's work")
    parser.add_argument("--json", action="store_true", help="print numbers instead of tables")
    parser.add_argument("--plot", type=Path, help="draw rows by parts, or the plan of a store: .png, .svg or .pdf")


def run(args: argparse.Namespace) -> None:
    """Compare, write parts, or write a store."""
    parts, methods = _checked(args)
    batches = Batches(args.batch_size, None, args.theta, args.delta)
    if _is_store(args):
        _write_store(args, parts[0], methods[0], batches if methods[0] == "stochastic" else None)
        return
    memory = None if args.memory is None else parse_bytes(args.memory)
    options = PartsOptions("random", args.epsilon, args.seed, args.solver, args.preset, memory, batches)
    machine = inputs.machine_of(args)
    lines: list[Measured] = []
    with tqdm(total=len(parts) * len(methods), desc="reading", leave=False, disable=None) as bar:
        graph = inputs.read_planned_graph(args.graph, args.undirected, inputs.reading_of(args))
        edge_index, num_nodes = graph.edge_index, graph.num_nodes
        inputs.require_parts("part", max(parts), num_nodes)
        model = Model.of_layers(num_nodes, edge_index.shape[1], graph.num_features, graph.num_classes)
        runs = [(count, method) for count in parts for method in methods]
        for count, method in runs:  # before the first begins
            require_memory(method, num_nodes, edge_index.shape[1], count, memory)
        for count, method in runs:
            bar.set_description(f"{method}, {count} parts")
            began, wanted = time.perf_counter(), (edge_index, num_nodes, count, options_for(options, method))
            if args.time_budget is None:
                found = solve(*wanted, graph.train_mask, lambda step, _: bar.set_postfix_str(step))
            else:
                found = solve_within(args.time_budget, *wanted, graph.train_mask)
            lines.append(measured(edge_index, found, count, method, time.perf_counter() - began, model, machine))
            bar.set_postfix_str("")
            bar.update()
    if args.out is not None:
        np.save(args.out, found.numpy())
    lines = beside_random(lines)
    print(json.dumps([asdict(line) for line in lines]) if args.json else table(lines))
    if args.plot:
        plot(args.plot, lines)


def _checked(args: argparse.Namespace) -> tuple[list[int], list[str]]:
    """The numbers of parts and the methods; all options are checked here, before the work begins."""
    *numbers, last = args.parts
    if isinstance(last, str) and args.out is None and numbers:
        args.out = last
    else:
        numbers = args.parts
    are_counts = all(isinstance(number, int) and number >= 1 for number in numbers)
    require(are_counts, f"--parts with numbers from 1 (got {' '.join(map(str, args.parts))})")
    require(not (args.compare and args.model), "--compare or --model (got both): one takes every method")
    methods = ["random", *(m for m in METHODS if m != "random")] if args.compare else args.model or ["metis"]
    require(
        args.out is None or len(numbers) == len(methods) == 1,
        f"one number of parts and one method to write {args.out} (got {len(numbers)} and {len(methods)}): leave the "
        f"output out to compare",
    )
    is_grid, is_store = args.layout == "grid", _is_store(args)
    require(
        not (is_grid and args.model),
        f"no --model with --layout grid, which has no parts (got {' '.join(args.model or [])})",
    )
    require(
        is_grid or not (args.tiles or args.mesh),
        "--tiles and --mesh with --layout grid (got --layout halo): leave them out",
    )
    if is_store:
        require(args.time_budget is None, "--time-budget without a store: write OUT.npy, then --model OUT.npy")
        require(not (args.resume and args.force), "--resume or --force (got both): one goes on, the other starts anew")
    for method in methods:
        require(
            method in METHODS or (is_store and method.endswith(".npy")),
            f"--model of {', '.join(METHODS)} (got {method!r}): a .npy file goes with a store",
        )
    if not is_store:
        require(not (args.resume or args.force), "--resume and --force with the folder of a store (got none)")
        require(not is_grid, "--layout grid with the folder of a store (got none): a grid has no parts")
    if args.solver != "mt-kahypar" and "cover" in methods and not args.compare:
        PartsOptions("cover", solver=args.solver)  # raises
    inputs.require_seed(args.seed)
    if args.out is not None and not is_store:
        inputs.require_folder("OUT.npy", Path(args.out))
    inputs.require_drawable(args.plot)
    return numbers, methods


def _is_store(args: argparse.Namespace) -> bool:
    return args.out is not None and not args.out.endswith(".npy")


_LEAST_MEMORY = 1 << 23
_TILES = (16, 16)


def _write_store(args: argparse.Namespace, parts: int, method: str, batches: Batches | None) -> None:
    memory = parse_bytes(args.memory or "4GiB")
    require(memory >= _LEAST_MEMORY, f"--memory of {_LEAST_MEMORY >> 20} MiB or more (got {args.memory})")
    began = time.perf_counter()
    options = StoreOptions(
        parts, method, args.epsilon, args.seed, memory, args.solver, args.preset, args.undirected,
        args.resume, args.force, batches,
    )  # fmt: skip
    out = Path(args.out)
    with tqdm(leave=False, disable=None, unit=" edges", unit_scale=True) as bar:

        def progress(step: str, count: int) -> None:
            bar.set_description(step, refresh=False)
            bar.update(count)

        types = open_types(args.graph)
        if types is not None:
            require(args.layout == "halo", "--layout halo with several types (got grid): tiles are of square matrices")
            of_parts = ("parts", "model", "solver", "preset", "epsilon", "seed", "memory")
            of_store = ("graph", "out", "resume", "force", "json", "machine", "device")
            inputs.require_only(args, "several types", *of_store, *of_parts)
            found: Manifest | TypesManifest = write_types_store(types, out, options, progress)
        elif args.layout == "grid":
            mesh = None if args.mesh is None else dict(zip("xyz", args.mesh, strict=True))
            rows, columns = args.tiles or _TILES
            source = open_source(args.graph, inputs.reading_of(args))
            found = write_grid_store(source, out, options, (rows, columns), mesh, progress=progress)
        else:
            found = write_halo_store(open_source(args.graph, inputs.reading_of(args)), out, options, progress)
    _print_store(args, out, found, {"seconds": time.perf_counter() - began, "peak_bytes": peak_bytes()})


def _print_store(
    args: argparse.Namespace, out: Path, written: Manifest | TypesManifest, took: dict[str, float]
) -> None:
    files = list(out.rglob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    if isinstance(written, TypesManifest):
        of_types = stored_types_plan(out, written.num_parts, "hybrid")
        numbers, text, nodes, edges = of_types.to_dict(), of_types.describe(), sum(of_types.nodes), sum(of_types.edges)
    else:
        plan = plan_of_store(out, written.num_parts, "hybrid")
        numbers, text = plan.to_dict(), plan.describe((), inputs.machine_of(args))
        nodes, edges = written.num_nodes, written.num_edges
        if args.plot:
            plan.plot(args.plot)
    if args.json:
        print(json.dumps(numbers | took | {"store_bytes": size, "num_nodes": nodes, "num_edges": edges}))
        return
    print(text)
    print(
        f"{out}: {nodes:,} nodes, {edges:,} edges, {len(files)} files, {size / 2**20:,.1f} MiB; "
        f"{took['seconds']:.1f} s, peak {took['peak_bytes'] / 2**20:,.0f} MiB"
    )


@dataclass(frozen=True)
class Measured:
    """One method at one number of parts."""

    method: str  # of the partition
    parts: int  # how many
    volume: int  # rows that a post exchange sends
    hybrid: int  # rows that the hybrid exchange sends
    messages: float  # of a rank in the hybrid exchange, on average
    most_messages: int  # of the rank with the most
    imbalance: float  # largest over mean of the ranks' work
    largest_sender: int  # rows of the rank that sends most in the hybrid exchange
    largest_post_sender: int  # the same of a post exchange
    epoch: float  # predicted seconds of a training step
    seconds: float  # to partition
    volume_over_random: float | None = None  # the volume over that of random parts, where these were measured
    hybrid_over_random: float | None = None  # the same of the hybrid exchange


def measured(
    edge_index: Tensor, parts: Tensor, num_parts: int, method: str, seconds: float, model: Model, machine: Machine
) -> Measured:
    """Count and price one partition."""
    plan, post = (
        Plan.of(edge_index, parts, num_parts, exchange, method, machine.ranks_per_node)
        for exchange in ("hybrid", "post")
    )
    messages = [s.messages for s in plan.sizes]
    return Measured(
        method, num_parts, plan.rows["post"], plan.rows["hybrid"], sum(messages) / num_parts, max(messages),
        imbalance([s.work for s in plan.sizes]), max(s.rows_sent for s in plan.sizes),
        max(s.rows_sent for s in post.sizes), plan.price(model, machine).seconds, seconds,
    )  # fmt: skip


def beside_random(found: Sequence[Measured]) -> list[Measured]:
    """``found`` with volumes over those of random parts, where these were measured."""
    random = {one.parts: one for one in found if one.method == "random"}

    def beside(one: Measured, base: Measured) -> Measured:
        volume = one.volume / base.volume if base.volume else None
        hybrid = one.hybrid / base.hybrid if base.hybrid else None
        return replace(one, volume_over_random=volume, hybrid_over_random=hybrid)

    return [beside(one, random[one.parts]) if one.parts in random else one for one in found]


def table(found: Sequence[Measured]) -> str:
    """A line for each method and number of parts."""

    def share(value: float | None) -> str:
        return "-" if value is None else f"{value:.3f}"

    return "\n".join(columns(
        found,
        ("parts", lambda one: f"{one.parts}"),
        ("method", lambda one: one.method),
        ("volume", lambda one: f"{one.volume:,}"),
        ("/random", lambda one: share(one.volume_over_random)),
        ("hybrid", lambda one: f"{one.hybrid:,}"),
        ("/random", lambda one: share(one.hybrid_over_random)),
        ("messages", lambda one: f"{one.messages:.1f}"),
        ("most", lambda one: f"{one.most_messages}"),
        ("work", lambda one: f"{one.imbalance:.2f}"),
        ("sender", lambda one: f"{one.largest_sender:,}"),
        ("epoch, s", lambda one: f"{one.epoch:.4g}"),
        ("seconds", lambda one: f"{one.seconds:.1f}"),
        left=(1,),
    ))  # fmt: skip


def plot(path: Path, found: Sequence[Measured]) -> None:
    """Draw volume and hybrid volume by parts, a line a method (needs matplotlib)."""
    figure = new_figure(9, 4)
    for axes, name, title in zip(
        figure.subplots(1, 2), ("volume", "hybrid"), ("post exchange", "hybrid exchange"), strict=True
    ):
        for method in dict.fromkeys(one.method for one in found):
            points = [(one.parts, getattr(one, name)) for one in found if one.method == method]
            axes.plot(*zip(*points, strict=True), label=method, marker="o")
        axes.set(xscale="log", yscale="log", xlabel="parts", ylabel="rows sent in an aggregation", title=title)
    axes.legend()
    figure.savefig(path)


def options_for(options: PartsOptions, method: str) -> PartsOptions:
    """The options of one method, without those that only other methods take."""
    is_hypergraph = method in ("hypergraph", "stochastic")
    return replace(
        options, method=method,
        solver=options.solver if is_hypergraph else "mt-kahypar",
        preset=options.preset if is_hypergraph or method == "cover" else None,
        batches=options.batches if method == "stochastic" else None,
    )  # fmt: skip
