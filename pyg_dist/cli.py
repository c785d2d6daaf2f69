"""The command line: ``python -m pyg_dist COMMAND``. One process, no launch, nothing collective.

``plan GRAPH --ranks P`` prints what training on P ranks would send, multiply and hold; ``doctor`` what is used on this
machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from pyg_dist.errors import DataError, PygDistError
from pyg_dist.partition import METHODS, partition
from pyg_dist.plan import Machine, Plan
from pyg_dist.plan.remote import EXCHANGES
from pyg_dist.report import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except (PygDistError, OSError) as error:
        print(f"pyg_dist {args.command}: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pyg_dist", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="what training on some number of ranks would send, multiply and hold")
    plan.set_defaults(run=_plan)
    plan.add_argument("graph", type=Path, help=".npz with num_nodes, edge_index [2, E] and, if each edge stands once "
                      "for both directions, undirected")  # fmt: skip
    plan.add_argument("--ranks", type=int, required=True)
    plan.add_argument("--partition", default="metis", help=f"{', '.join(METHODS)}, or a .npy file with a part per node")
    plan.add_argument("--layout", choices=["halo"], default="halo")
    plan.add_argument("--exchange", choices=EXCHANGES, default="hybrid")
    plan.add_argument(
        "--epsilon", type=float, default=0.03, help="how much heavier than the mean METIS may make a part"
    )
    plan.add_argument("--seed", type=int, default=0)
    plan.add_argument("--widths", type=int, nargs="+", default=[], metavar="F", help="columns of each layer's input")
    plan.add_argument("--machine", type=Path, help="JSON with latency, bandwidth, aggregation (benchmarks/network.py)")
    plan.add_argument("--json", action="store_true", help="print plan.to_dict() instead of a table")
    plan.add_argument("--plot", type=Path, help="draw it: .png, .svg or .pdf")
    plan.add_argument("--save", type=Path, help="write the plan with its parts, for Plan.load")
    doctor.add_command(commands)
    return parser


def _plan(args: argparse.Namespace) -> None:
    machine = Machine(**json.loads(args.machine.read_text())) if args.machine else Machine()
    steps = tqdm(total=3, desc=f"plan {args.graph.name}", leave=False, disable=None, unit="step")
    with steps:
        steps.set_postfix_str("reading")
        edge_index, num_nodes, train_mask = read_npz(args.graph)
        steps.update()
        steps.set_postfix_str("partitioning")
        method = _parts(args.partition) if args.partition.endswith(".npy") else args.partition
        parts = partition(
            edge_index, num_nodes, args.ranks, method, train_mask=train_mask, epsilon=args.epsilon, seed=args.seed
        )
        steps.update()
        steps.set_postfix_str("counting")
        plan = Plan.of(edge_index, parts, args.ranks, args.exchange, Path(args.partition).name)
        steps.update()
    print(json.dumps(plan.to_dict(args.widths, machine)) if args.json else plan.describe(args.widths))
    if args.plot:
        plan.plot(args.plot, max(args.widths, default=256))
    if args.save:
        plan.save(args.save)


def read_npz(path: Path) -> tuple[Tensor, int, Tensor | None]:
    """Edges (int64 ``[2, E]``, both directions), number of nodes and training mask of a graph in an ``.npz`` file.

    Raises:
        DataError: It is not such a file.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays: dict[str, Any] = {
                name: file[name] for name in ("num_nodes", "edge_index", "undirected", "train_mask") if name in file
            }
        edge_index = torch.from_numpy(arrays["edge_index"].astype(np.int64))
        num_nodes = int(arrays["num_nodes"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"Expected {path} to be .npz with num_nodes and edge_index [2, E] (got: {error})") from error
    if bool(arrays.get("undirected", False)):
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
        # A reversed edge that was there already, and a loop, count once.
        key = torch.unique(edge_index[0] * num_nodes + edge_index[1])
        edge_index = torch.stack([key // num_nodes, key % num_nodes])
    mask = arrays.get("train_mask")
    if mask is not None:
        mask = torch.from_numpy(mask if mask.ndim == 1 else mask[0])
    return edge_index, num_nodes, mask


def _parts(path: str) -> Tensor:
    try:
        return torch.from_numpy(np.load(path, allow_pickle=False))
    except (ValueError, TypeError) as error:
        raise DataError(f"Expected {path} to be .npy with a part per node (got: {error})") from error
