"""Options that several commands have: how a graph is read, the machine that is priced, output files."""

from __future__ import annotations

import argparse
from pathlib import Path

from pyg_dist.errors import OptionError
from pyg_dist.pricing.machine import Machine
from pyg_dist.store.sources import Reading

DEVICES = ("cpu", "cuda")
SUFFIXES = (".png", ".svg", ".pdf")


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


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add both."""
    parser.add_argument("--machine", type=Path, help="constants of `bench`; default: those measured here")
    parser.add_argument("--device", choices=DEVICES, help="where products and messages are; default: cpu, or the one "
                        "of the constants")  # fmt: skip


def machine_of(args: argparse.Namespace) -> Machine:
    """The constants that were asked for: of a file, measured here for the device, or assumed of it."""
    machine = Machine.load(args.machine, args.device or "cpu")
    if args.device not in (None, machine.device):
        raise OptionError(
            f"Expected constants of {args.device} for --device {args.device} (got those of {machine.device}): measure "
            f"them with `python -m pyg_dist bench --device {args.device}`, or leave the option out"
        )
    return machine


def require_drawable(path: Path | None) -> None:
    """Refuse a file that matplotlib could not write in the end; None is no file. Not collective."""
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise OptionError(f"Expected --plot with a name that ends in {', '.join(SUFFIXES)} (got {path.name!r})")
    require_folder("--plot", path)


def require_folder(option: str, path: Path | None) -> None:
    """Refuse a file in a folder that does not exist; None is no file. Not collective."""
    if path is not None and not path.parent.is_dir():
        raise OptionError(f"Expected {option} in a folder that exists (got {path.parent})")
