"""``python -m pyg_dist simulate --nodes N --edges E --features F``: predict the cost of training from statistics."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from pyg_dist.cli.inputs import Commands, add_machine_options, machine_of, require, require_drawable
from pyg_dist.plan import prices
from pyg_dist.plan.prices import GROWTH, Epoch, GraphStatistics
from pyg_dist.pricing.base import columns
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.pricing.plot import new_figure

RANKS = [2**k for k in range(4, 14)]
Results = list[tuple[Model, list[Epoch]]]


def add_command(commands: Commands) -> None:
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
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="default: 16 to 8192")
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 128, 256], help="of the hidden layers")
    parser.add_argument("--conv", choices=["gcn", "sage"], default="sage")
    parser.add_argument("--bits", type=int, nargs="+", default=[32], choices=[32, 16, 8, 4, 2], help="of halo messages")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="draw the speedup of fewer bits by ranks (SuperGCN, Fig. 7): "
                        ".png, .svg or .pdf")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Price every number of ranks, layers and widths, with 32 bits first; print tables and crossovers."""
    is_positive = min((*args.ranks, *args.layers, *args.widths)) >= 1
    require(is_positive, "positive numbers of ranks, layers and columns (got 0 or less)")
    require_drawable(args.plot)
    rows, ranks = args.halo_rows or (prices.ROWS_BY_EDGE * args.edges, prices.KNOWN_RANKS)
    graph = GraphStatistics(args.nodes, args.edges, args.features, args.classes, round(ranks), rows, args.growth,
                            "rows as given" if args.halo_rows else "rows by edge: SuperGCN, Table 5")  # fmt: skip
    machine, bits, counts = machine_of(args), list(dict.fromkeys([32, *args.bits])), sorted(set(args.ranks))
    models = [prices.model_of(graph, layers, width, args.conv) for layers in args.layers for width in args.widths]
    results = [(model, [prices.epoch(graph, model, count, machine, bits) for count in counts]) for model in models]
    print(json.dumps(to_dict(graph, machine, results)) if args.json else tables(graph, machine, results))
    if args.plot:
        plot(args.plot, graph, machine, [n for n in counts if n > 1], max(args.widths), bits[1:] or [2])


def plot(
    path: Path, graph: GraphStatistics, machine: Machine, ranks: list[int], width: int, narrow_bits: list[int]
) -> None:
    """Draw the speedup of the widest layers' exchange with fewer bits, by the price model and by eq. 8."""
    figure = new_figure(6, 4)
    axes = figure.subplots()
    for b in narrow_bits:
        loads = {n: prices.even_load(graph, n, machine.ranks_per_node) for n in ranks}
        pairs = [prices.speedup(load, width, machine, n, b) for n, load in loads.items()]
        axes.plot(ranks, [p for p, _ in pairs], label=f"int{b}", marker="o")
        axes.plot(ranks, [e for _, e in pairs], label=f"int{b}, eq. 8", linestyle=":")
    axes.set(xscale="log", xlabel="ranks", ylabel="speedup of an exchange", title=machine.source)
    axes.legend()
    figure.savefig(path)


def tables(graph: GraphStatistics, machine: Machine, results: Results) -> str:
    """A table for each model."""
    lines = [f"graph: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges ({graph.source})",
             f"machine: {machine.source}", "Seconds of a full-batch epoch; every number is predicted."]  # fmt: skip
    for model, epochs in results:
        ranks = prices.crossover(epochs)
        verdict = f"the grid is cheaper from {ranks} ranks on" if ranks else "the halo is cheaper at the most ranks"
        lines += ["", str(model), *_table(epochs), verdict]
    return "\n".join(lines)


def _table(epochs: list[Epoch]) -> list[str]:
    def halo(bits: int) -> tuple[str, Callable[[Epoch], str]]:
        return f"halo int{bits}" if bits < 32 else "halo", lambda line: f"{line.halo[bits].seconds:.4g}"

    def faster(header: str, bits: int, number: int) -> tuple[str, Callable[[Epoch], str]]:
        return header, lambda line: f"{line.speedups[bits][number]:.2f}" if line.speedups else "-"

    all_bits = list(epochs[0].halo)
    gains = [faster(*of) for b in all_bits if b != 32 for of in ((f"32/{b} bits", b, 0), ("eq. 8", b, 1))]
    return columns(
        epochs,
        ("ranks", lambda line: f"{line.ranks}"),
        ("owned+halo", lambda line: f"{line.halo_nodes:,.0f}"),
        *map(halo, all_bits),
        ("grid", lambda line: f"{line.grid.seconds:.4g}"),
        ("cheaper", lambda line: "grid" if line.grid.seconds < line.halo[32].seconds else "halo"),
        *gains,
        ("grid mesh, sums", lambda line: f"{line.shape}, {line.sums}"),
        left=(3 + len(all_bits), 4 + len(all_bits) + len(gains)),
    )


def to_dict(graph: GraphStatistics, machine: Machine, results: Results) -> dict[str, object]:
    """The same numbers, for JSON."""

    def of_ranks(line: Epoch) -> dict[str, object]:
        return {
            "ranks": line.ranks,
            "owned_and_halo_nodes": round(line.halo_nodes),
            "halo_seconds": {str(b): price.seconds for b, price in line.halo.items()},
            "exchange_speedup": {str(b): {"model": ours, "eq_8": eq_8} for b, (ours, eq_8) in line.speedups.items()},
            "grid_seconds": line.grid.seconds,
            "mesh": {axis: line.shape[axis] for axis in "xyz"},
            "sums": line.sums,
        }

    def of_model(model: Model, epochs: list[Epoch]) -> dict[str, object]:
        return {
            "layers": len(model.widths) - 1,
            "width": model.widths[1] if len(model.widths) > 2 else model.widths[0],
            "crossover": prices.crossover(epochs),
            "epochs": [of_ranks(line) for line in epochs],
        }

    return {"source": graph.source, "machine": machine.source, "models": [of_model(*one) for one in results]}
