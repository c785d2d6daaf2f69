"""How a command reads its input graph, and what it says of what was read."""

from __future__ import annotations

import argparse
import sys
import warnings

from tqdm import tqdm

from pyg_dist.store.sources import Reading, Source
from pyg_dist.store.spool import Spool


def add_graph_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--undirected``, ``--columns`` and ``--first-id``."""
    parser.add_argument("--undirected", action="store_true", help="add the reverse of each edge; each then stands once")
    parser.add_argument("--columns", type=lambda text: tuple(text.split(",")), metavar="source,target,weight",
                        help="of a table of edges, in its order; any other word leaves a column out; default: as names "
                        "and numbers say, which is printed")  # fmt: skip
    parser.add_argument("--first-id", type=int, metavar="ID", help="of the nodes of a table of edges; default: 0")


def reading_of(args: argparse.Namespace) -> Reading:
    """What these options say."""
    return Reading(args.columns, args.first_id)


def say_what_was_read(source: Source, edges: Spool) -> None:
    """A line on stderr about a file that does not describe itself, and warnings of what is probably meant otherwise."""
    if source.understood:
        isolated = f" ({edges.num_isolated:,} without an edge)" if edges.num_isolated else ""
        weights = "weights" if edges.attributes else "no weights"
        counts = f"{edges.num_nodes:,} nodes{isolated}, {edges.num_edges:,} edges, {weights}"
        tqdm.write(f"{source.name}: {source.understood}; {counts}", file=sys.stderr)
        if edges.least_id == 1 and edges.num_isolated and source.reading.first_id is None:
            warnings.warn(
                f"ids in {source.name} begin at 1, so node 0 has no edge: if they are counted from 1, --first-id 1",
                stacklevel=2,
            )
    for name, count in edges.nan.items():
        warnings.warn(count.warning(name, "edge", edges.num_edges), stacklevel=2)
