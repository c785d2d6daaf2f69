"""Options that commands share: the input graph, the machine to price, and names of files to write."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyg_dist.errors import DataError, OptionError, refusing
from pyg_dist.partition.inputs import as_parts
from pyg_dist.pricing.machine import Machine
from pyg_dist.store.source import AS_IT_IS, Reading, Source
from pyg_dist.store.sources import open_source
from pyg_dist.store.spool import Spool, spool

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""The subparsers, to which each command adds its parser."""
DEVICES = ("cpu", "cuda")
_SUFFIXES = (".png", ".svg", ".pdf")
_MEMORY = 4 << 30


def add_graph_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--undirected``, ``--columns`` and ``--first-id``."""
    parser.add_argument("--undirected", action="store_true", help="add the reverse of each edge; each then stands once")
    parser.add_argument("--columns", type=lambda text: tuple(text.split(",")), metavar="source,target,weight",
                        help="of a table of edges, in its order; any other word leaves a column out; default: as names "
                        "and numbers say, which is printed")  # fmt: skip
    parser.add_argument("--first-id", type=int, metavar="ID", help="of the nodes of a table of edges; default: 0")


def reading_of(args: argparse.Namespace) -> Reading:
    """The values of :func:`add_graph_options`, without ``--undirected``."""
    return Reading(args.columns, args.first_id)


class PlannedGraph(NamedTuple):
    """The edges of a graph, and the facts that a plan needs."""

    edge_index: Tensor  # int64 ``[2, E]``, both directions
    num_nodes: int  # N
    train_mask: Tensor | None  # bool ``[N]``, if there is one; of several splits, the first
    num_features: int | None  # columns of x, if there is one
    num_classes: int | None  # of y, if it is of integers


def read_planned_graph(graph: str | Path, undirected: bool = False, reading: Reading = AS_IT_IS) -> PlannedGraph:
    """Read the edges of an input; its features stay on disk."""
    source = open_source(str(graph), replace(reading, is_strict=False))
    with tempfile.TemporaryDirectory(prefix="pyg_dist") as folder:
        edges = spool(source, Path(folder) / "spool", undirected, _MEMORY, lambda count: None)
        say_what_was_read(source, edges)
        edge_index = edges.edge_index()
    mask = train_mask_of(source)
    if mask is not None and mask.dim() == 2:
        mask = mask[:, 0].contiguous()
    return PlannedGraph(edge_index, edges.num_nodes, mask, *model_columns(source))


def say_what_was_read(source: Source, edges: Spool) -> None:
    """Print how a file that does not describe itself was read; warn of probable mistakes."""
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


def read_parts(path: str) -> Tensor:
    """A part for each node, from an ``.npy`` file."""
    kinds = (ValueError, TypeError, EOFError, OSError)
    with refusing(DataError, f"{path} to be .npy with a part per node", "write it with numpy.save", *kinds):
        return as_parts(np.load(path, allow_pickle=False))


def train_mask_of(source: Source) -> Tensor | None:
    """The training nodes, bool ``[N]`` or ``[N, K]``, if the input has them."""
    for attribute in source.nodes:
        if attribute.name == "train_mask" and attribute.dtype == "BOOL" and len(attribute.shape) < 2:
            return torch.from_numpy(np.concatenate(list(attribute.rows(1 << 22))))
    return None


def model_columns(source: Source) -> tuple[int | None, int | None]:
    """The number of columns of x and of classes of y, as in ``DistributedData``."""
    in_channels = out_channels = None
    for attribute in source.nodes:
        if attribute.name == "x" and len(attribute.shape) == 1:
            in_channels = attribute.shape[0]
        if attribute.name == "y" and attribute.dtype in ("I64", "I32", "I16", "I8", "U8"):
            largest = [int(rows.max()) for rows in attribute.rows(1 << 22) if rows.size]
            out_channels = max(max(largest) + 1, 1) if largest else None
    return in_channels, out_channels


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--machine`` and ``--device``."""
    parser.add_argument("--machine", type=Path, help="constants of `bench`; default: those measured here")
    parser.add_argument("--device", choices=DEVICES, help="where products and messages are; default: cpu, or the one "
                        "of the constants")  # fmt: skip


def machine_of(args: argparse.Namespace) -> Machine:
    """The constants to use: of the given file, measured here for the device, or the defaults of the device."""
    machine = Machine.load(args.machine, args.device or "cpu")
    if args.device not in (None, machine.device):
        raise OptionError(
            f"Expected constants of {args.device} for --device {args.device} (got those of {machine.device}): measure "
            f"them with `python -m pyg_dist bench --device {args.device}`, or leave the option out"
        )
    return machine


def require(holds: bool, expected: str) -> None:
    """Refuse options that contradict each other; ``expected`` is the message after that word."""
    if not holds:
        raise OptionError(f"Expected {expected}")


def require_only(args: argparse.Namespace, graph: str, *taken: str) -> None:
    """Refuse every given option that is not in ``taken``; ``graph`` names the kind of input that does not use it."""
    for name, value in vars(args).items():
        is_given = name not in ("command", "run", "default") and value != args.default(name)
        require(name in taken or not is_given, f"no --{name.replace('_', '-')} with {graph} (got one): leave it out")


def require_seed(seed: int) -> None:
    """Refuse a seed beyond 64 bits."""
    require(-(2**63) <= seed < 2**63, f"--seed to be an integer of 64 bits (got {seed})")


def require_parts(kind: str, parts: int, nodes: int) -> None:
    """Refuse more parts than nodes; ``kind`` is "part" or "rank", for the message."""
    require(parts <= nodes, f"at most a {kind} for each of {nodes:,} nodes (got {parts:,} {kind}s)")


def require_drawable(path: Path | None) -> None:
    """Refuse a file that matplotlib could not write in the end."""
    if path is not None:
        is_drawable = path.suffix.lower() in _SUFFIXES
        require(is_drawable, f"--plot with a name that ends in {', '.join(_SUFFIXES)} (got {path.name!r})")
        require_folder("--plot", path)


def require_folder(option: str, path: Path | None) -> None:
    """Refuse a file in a folder that does not exist."""
    if path is not None:
        require(path.parent.is_dir(), f"{option} in a folder that exists (got {path.parent})")
