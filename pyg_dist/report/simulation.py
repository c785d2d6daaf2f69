"""``python -m pyg_dist simulate papers100M --ranks 16 64 ... 8192``: published graphs, from their statistics."""

from __future__ import annotations

import argparse
import json
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from pyg_dist.errors import MissingPackageError, OptionError
from pyg_dist.plan.machine import Machine
from pyg_dist.plan.model import Model
from pyg_dist.plan.published import GRAPHS, MACHINES, PublishedGraph
from pyg_dist.plan.simulate import Comparison, Epoch, comparisons, crossover, epoch, even_load, model_of, speedup
from pyg_dist.report.output_file import require_drawable

RANKS = [2**k for k in range(4, 14)]


def add_command(commands: Any) -> None:
    """Add ``simulate`` to the command line."""
    parser = commands.add_parser("simulate", help="what training a published graph would cost, from its statistics")
    parser.set_defaults(run=run)
    parser.add_argument("graph", choices=list(GRAPHS))
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="default: 16 to 8192")
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--widths", type=int, nargs="+", default=[50, 128, 256], help="of the hidden layers")
    parser.add_argument("--conv", choices=["gcn", "sage"], default="sage")
    parser.add_argument("--bits", type=int, nargs="+", default=[32], choices=[32, 16, 8, 4, 2], help="of halo messages")
    parser.add_argument("--undirected", action="store_true", help="count every edge in both directions (papers100M)")
    parser.add_argument("--machine", default="fugaku", help=f"{', '.join(MACHINES)}, here, or a file of `bench`")
    parser.add_argument(
        "--batch", type=int, default=1 << 20, help="nodes of a mini-batch of ScaleGNN, not printed there"
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plot", type=Path, help="draw the speedup of fewer bits by ranks (SuperGCN, Fig. 7): "
                        ".png, .svg or .pdf")  # fmt: skip


def run(args: argparse.Namespace) -> None:
    """Price every number of ranks, layers and widths; print tables, crossovers and the papers' numbers."""
    if min((*args.ranks, *args.layers, *args.widths, args.batch)) < 1:
        raise OptionError("Expected positive numbers of ranks, layers, columns and nodes (got 0 or less)")
    require_drawable(args.plot)
    graph = GRAPHS[args.graph].undirected() if args.undirected else GRAPHS[args.graph]
    machine = MACHINES[args.machine]() if args.machine in MACHINES else _stored(args.machine)
    bits = list(dict.fromkeys([32, *args.bits]))
    ranks = sorted(set(args.ranks))
    results = []
    for layers in args.layers:
        for width in args.widths:
            model = model_of(graph, layers, width, args.conv)
            results.append((model, [epoch(graph, model, count, machine, bits) for count in ranks]))
    printed = comparisons(args.batch)
    if args.json:
        print(json.dumps(_to_dict(args, graph, machine, results, printed)))
    else:
        print(_text(args.graph, graph, machine, results, printed, bits))
    if args.plot:
        plot(args.plot, graph, machine, ranks, max(args.widths), [b for b in bits if b != 32] or [2])


def plot(path: Path, graph: PublishedGraph, machine: Machine, ranks: list[int], width: int, bits: list[int]) -> None:
    """Draw how much faster an exchange is with fewer bits: the price model, and eq. 8.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            f"Expected matplotlib for --plot (got: {error}); pip install 'pyg-dist[plot]'"
        ) from error
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for b in bits:
        pairs = [speedup(even_load(graph, n, machine.ranks_per_node), width, machine, n, b) for n in ranks if n > 1]
        axes.plot([n for n in ranks if n > 1], [p for p, _ in pairs], label=f"int{b}", marker="o")
        axes.plot([n for n in ranks if n > 1], [e for _, e in pairs], label=f"int{b}, eq. 8", linestyle=":")
    axes.set(xscale="log", xlabel="ranks", ylabel="speedup of an exchange", title=machine.source)
    axes.legend()
    figure.savefig(path)


def _stored(name: str) -> Machine:
    return Machine.load() if name == "here" else Machine.load(Path(name))


def _text(
    name: str,
    graph: PublishedGraph,
    machine: Machine,
    results: list[tuple[Model, list[Epoch]]],
    printed: list[Comparison],
    bits: list[int],
) -> str:
    lines = [f"{name}: {graph.num_nodes:,} nodes, {graph.num_edges:,} edges ({graph.source})",
             f"machine: {machine.source}", "Seconds of a full-batch epoch; every number is predicted."]  # fmt: skip
    for model, epochs in results:
        halo = "".join(f"{f'halo int{b}' if b < 32 else 'halo':>12}" for b in bits)
        faster = "".join(f"{f'32/{b} bits':>11}{'eq. 8':>7}" for b in bits if b != 32)
        lines += [
            "",
            str(model),
            f"{'ranks':>6}{'owned+halo':>14}{halo}{'grid':>12}  {'cheaper':<8}{faster}  grid mesh, sums",
        ]
        for line in epochs:
            lines.append(_line(line, model, graph, machine, bits))
        ranks = crossover(epochs)
        lines.append(f"the grid is cheaper from {ranks} ranks on" if ranks else "the halo is cheaper at the most ranks")
    lines += ["", "Beside what the papers print:"]
    for note, group in groupby(printed, key=lambda c: c.note):
        is_off = False
        for c in group:
            lines.append(f"{c.what}: {c.predicted:.4g} {c.unit}, printed {c.printed:.4g}, ratio {c.ratio:.2f}")
            is_off |= not 0.5 <= c.ratio <= 2
        why = "off by more than 2x: " if is_off else ""
        lines.append(textwrap.fill(why + note, 118, initial_indent="    ", subsequent_indent="    "))
    return "\n".join(lines)


def _line(line: Epoch, model: Model, graph: PublishedGraph, machine: Machine, bits: list[int]) -> str:
    halo = "".join(f"{line.halo[b].seconds:>12.4g}" for b in bits)
    cheaper = "grid" if line.grid.seconds < line.halo[32].seconds else "halo"
    speedups, faster = _speedups(line, model, graph, machine), ""
    for b in (b for b in bits if b != 32):
        faster += "{:>11.2f}{:>7.2f}".format(*speedups[b]) if speedups else f"{'-':>11}{'-':>7}"
    return (f"{line.ranks:>6}{line.halo_nodes:>14,.0f}{halo}{line.grid.seconds:>12.4g}  {cheaper:<8}{faster}  "
            f"{line.shape}, {line.sums}")  # fmt: skip


def _speedups(line: Epoch, model: Model, graph: PublishedGraph, machine: Machine) -> dict[int, tuple[float, float]]:
    """By bits, what an exchange of the widest layer gains, by the price model and by eq. 8; empty for one rank."""
    if line.ranks == 1:
        return {}
    load, width = even_load(graph, line.ranks, machine.ranks_per_node), max(model.widths[1:])
    return {b: speedup(load, width, machine, line.ranks, b) for b in line.halo if b != 32}


def _to_dict(
    args: argparse.Namespace,
    graph: PublishedGraph,
    machine: Machine,
    results: list[tuple[Model, list[Epoch]]],
    printed: list[Comparison],
) -> dict[str, Any]:
    return {
        "graph": args.graph,
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
        "printed": [vars(c) | {"ratio": c.ratio} for c in printed],
    }
