"""``python -m pyg_dist simulate --nodes N --edges E --features F``: what training would cost, by statistics."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pyg_dist.cli.options import add_machine_options, machine_of, require_drawable
from pyg_dist.errors import OptionError
from pyg_dist.plan.simulate import (
    GROWTH,
    KNOWN_RANKS,
    ROWS_BY_EDGE,
    Epoch,
    GraphStatistics,
    crossover,
    epoch,
    even_load,
    model_of,
    speedup,
)
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.pricing.plot import new_figure

RANKS = [2**k for k in range(4, 14)]


def add_command(commands: Any) -> None:
    """Add ``simulate`` to the command line."""
    parser = commands.add_parser("simulate", help="what training a graph would cost, from its statistics alone")
    parser.set_defaults(run=run)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--edges", type=int, required=True, help="both directions of undirected edges counted")
    parser.add_argument("--features", type=int, required=True, help="columns of x")
    parser.add_argument("--classes", type=int, help="columns of the output; default: as many as the hidden layers have")
    parser.add_argument("--halo-rows", type=float, nargs=2, metavar=("ROWS", "RANKS"), help="rows that a post exchange "
                        "on so many ranks sends, as `plan` counts them; default: as many by edge as mag240M at 2,048 "
                        "ranks (SuperGCN, Table 5)")  # fmt: skip
    parser.add_argument("--growth", type=float, default=GROWTH,
                        help=f"exponent of these rows with the number of ranks; default: {GROWTH}")  # fmt: skip
    add_machine_options(parser)
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for any graph: ranks, models, bits, and the form of the output."""
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="default: 16 to 8192")
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 128, 256], help="of the hidden layers")
    parser.add_argument("--conv", choices=["gcn", "sage"], default="sage")
    parser.add_argument("--bits", type=int, nargs="+", default=[32], choices=[32, 16, 8, 4, 2], help="of halo messages")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="draw the speedup of fewer bits by ranks (SuperGCN, Fig. 7): "
                        ".png, .svg or .pdf")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Price every number of ranks, layers and widths; print tables and crossovers."""
    check_options(args)
    rows, ranks = args.halo_rows or (ROWS_BY_EDGE * args.edges, KNOWN_RANKS)
    graph = GraphStatistics(args.nodes, args.edges, args.features, args.classes, round(ranks), rows, args.growth,
                            "rows as given" if args.halo_rows else "rows by edge: SuperGCN, Table 5")  # fmt: skip
    machine = machine_of(args)
    results = epochs_of(graph, machine, args)
    print(json.dumps(to_dict(graph, machine, results)) if args.json else tables("graph", graph, machine, results))
    if args.plot:
        plot(args.plot, graph, machine, args)


def check_options(args: argparse.Namespace) -> None:
    """Refuse what cannot be priced or written."""
    if min((*args.ranks, *args.layers, *args.widths)) < 1:
        raise OptionError("Expected positive numbers of ranks, layers and columns (got 0 or less)")
    require_drawable(args.plot)


Results = list[tuple[Model, list[Epoch]]]


def epochs_of(graph: GraphStatistics, machine: Machine, args: argparse.Namespace) -> Results:
    """For each requested model, an epoch on every number of ranks; with 32 bits first."""
    bits = list(dict.fromkeys([32, *args.bits]))
    models = [model_of(graph, layers, width, args.conv) for layers in args.layers for width in args.widths]
    return [(m, [epoch(graph, m, count, machine, bits) for count in sorted(set(args.ranks))]) for m in models]


def plot(path: Path, graph: GraphStatistics, machine: Machine, args: argparse.Namespace) -> None:
    """Draw how much faster an exchange of the widest layers is with fewer bits: the price model, and eq. 8."""
    figure = new_figure(6, 4)
    axes = figure.subplots()
    ranks, width = [n for n in sorted(set(args.ranks)) if n > 1], max(args.widths)
    for b in [b for b in dict.fromkeys(args.bits) if b != 32] or [2]:
        pairs = [speedup(even_load(graph, n, machine.ranks_per_node), width, machine, n, b) for n in ranks]
        axes.plot(ranks, [p for p, _ in pairs], label=f"int{b}", marker="o")
        axes.plot(ranks, [e for _, e in pairs], label=f"int{b}, eq. 8", linestyle=":")
    axes.set(xscale="log", xlabel="ranks", ylabel="speedup of an exchange", title=machine.source)
    axes.legend()
    figure.savefig(path)


def tables(name: str, graph: GraphStatistics, machine: Machine, results: Results) -> str:
    """A table for each model, for people."""
    lines = [f"{name}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges ({graph.source})",
             f"machine: {machine.source}", "Seconds of a full-batch epoch; every number is predicted."]  # fmt: skip
    for model, epochs in results:
        bits = list(epochs[0].halo)
        halo = "".join(f"{f'halo int{b}' if b < 32 else 'halo':>12}" for b in bits)
        faster = "".join(f"{f'32/{b} bits':>11}{'eq. 8':>7}" for b in bits if b != 32)
        lines += [
            "",
            str(model),
            f"{'ranks':>6}{'owned+halo':>14}{halo}{'grid':>12}  {'cheaper':<8}{faster}  grid mesh, sums",
        ]
        lines += [_line(line, model, graph, machine, bits) for line in epochs]
        ranks = crossover(epochs)
        lines.append(f"the grid is cheaper from {ranks} ranks on" if ranks else "the halo is cheaper at the most ranks")
    return "\n".join(lines)


def _line(line: Epoch, model: Model, graph: GraphStatistics, machine: Machine, bits: list[int]) -> str:
    halo = "".join(f"{line.halo[b].seconds:>12.4g}" for b in bits)
    cheaper = "grid" if line.grid.seconds < line.halo[32].seconds else "halo"
    speedups, faster = _speedups(line, model, graph, machine), ""
    for b in (b for b in bits if b != 32):
        faster += "{:>11.2f}{:>7.2f}".format(*speedups[b]) if speedups else f"{'-':>11}{'-':>7}"
    return (f"{line.ranks:>6}{line.halo_nodes:>14,.0f}{halo}{line.grid.seconds:>12.4g}  {cheaper:<8}{faster}  "
            f"{line.shape}, {line.sums}")  # fmt: skip


def _speedups(line: Epoch, model: Model, graph: GraphStatistics, machine: Machine) -> dict[int, tuple[float, float]]:
    """By bits, what an exchange of the widest layer gains, by the price model and by eq. 8; empty for one rank."""
    if line.ranks == 1:
        return {}
    load, width = even_load(graph, line.ranks, machine.ranks_per_node), max(model.widths[1:])
    return {b: speedup(load, width, machine, line.ranks, b) for b in line.halo if b != 32}


def to_dict(graph: GraphStatistics, machine: Machine, results: Results) -> dict[str, Any]:
    """The same numbers, for programs."""
    return {
        "source": graph.source,
        "machine": machine.source,
        "models": [
            {
                "layers": len(model.widths) - 1,
                "width": model.widths[1] if len(model.widths) > 2 else model.widths[0],
                "crossover": crossover(epochs),
                "epochs": [
                    {
                        "ranks": line.ranks,
                        "owned_and_halo_nodes": round(line.halo_nodes),
                        "halo_seconds": {str(b): price.seconds for b, price in line.halo.items()},
                        "exchange_speedup": {
                            str(b): {"model": ours, "eq_8": eq_8}
                            for b, (ours, eq_8) in _speedups(line, model, graph, machine).items()
                        },
                        "grid_seconds": line.grid.seconds,
                        "mesh": {axis: line.shape[axis] for axis in "xyz"},
                        "sums": line.sums,
                    }
                    for line in epochs
                ],
            }
            for model, epochs in results
        ],
    }
