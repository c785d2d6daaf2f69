"""What training a published graph would cost, and the cost models beside printed times and volumes.

python benchmarks/papers/simulate.py papers100M --ranks 16 64 256 --bits 32 2
python benchmarks/papers/simulate.py mag240M --machine perlmutter --json
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from comparisons import Comparison, comparisons
from published import GRAPHS, MACHINES, undirected

from pyg_dist.cli.simulation import add_options, check_options, epochs_of, plot, tables, to_dict
from pyg_dist.errors import OptionError, PygDistError
from pyg_dist.pricing.machine import Machine


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", choices=list(GRAPHS))
    parser.add_argument("--undirected", action="store_true", help="count every edge in both directions (papers100M)")
    parser.add_argument("--machine", default="fugaku", help=f"{', '.join(MACHINES)}, here, or a file of `bench`")
    parser.add_argument("--batch", type=int, default=1 << 20, help="nodes of ScaleGNN's mini-batch, not printed there")
    add_options(parser)
    try:
        run(parser.parse_args(arguments))
    except (PygDistError, OSError) as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 1
    return 0


def run(args: argparse.Namespace) -> None:
    check_options(args)
    if args.batch < 1:
        raise OptionError(f"Expected --batch of one node or more (got {args.batch})")
    graph = undirected(GRAPHS[args.graph]) if args.undirected else GRAPHS[args.graph]
    if args.machine in MACHINES:
        machine = MACHINES[args.machine]()
    else:
        machine = Machine.load() if args.machine == "here" else Machine.load(Path(args.machine))
    results, printed = epochs_of(graph, machine, args), comparisons(args.batch)
    if args.json:
        beside = [vars(c) | {"ratio": c.ratio} for c in printed]
        print(json.dumps({"graph": args.graph, **to_dict(graph, machine, results), "printed": beside}))
    else:
        print(tables(args.graph, graph, machine, results), "", *beside_papers(printed), sep="\n")
    if args.plot:
        plot(args.plot, graph, machine, args)


def beside_papers(printed: Sequence[Comparison]) -> list[str]:
    """A line for each printed number, and why the two are apart."""
    lines = ["Beside what the papers print:"]
    for note, group in groupby(printed, key=lambda c: c.note):
        is_off = False
        for c in group:
            lines.append(f"{c.what}: {c.predicted:.4g} {c.unit}, printed {c.printed:.4g}, ratio {c.ratio:.2f}")
            is_off |= not 0.5 <= c.ratio <= 2
        why = "off by more than 2x: " if is_off else ""
        lines.append(textwrap.fill(why + note, 118, initial_indent="    ", subsequent_indent="    "))
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
