"""The best parts that seeds one after another find within a time budget, in a process that can be ended."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pyg_dist import errors
from pyg_dist.errors import OptionError, PygDistError
from pyg_dist.halo.plan.cover import RemoteEdges
from pyg_dist.partition import Batches
from pyg_dist.partition.hypergraph import build_stochastic_model
from pyg_dist.plan.parts import PartsOptions, Report, solve

_START_SECONDS = 300  # for Python and torch to come up on a busy machine


def solve_within(
    seconds: float,
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    options: PartsOptions,
    train_mask: Tensor | None = None,
) -> Tensor:
    """Return the parts with the fewest rows of ``options.exchange`` that were found in time: int32 ``[N]``.

    Parts of "stochastic" compare by the rows of mini-batches that no seed was solved for.

    A process of its own solves with ``options.seed``, then with the seeds that follow; it is ended when the time is up,
    and what an unfinished seed has found so far counts. So a solver that hangs, or is killed for the memory it takes,
    is an error here and not the end of this process. Not collective.
    """
    if not isinstance(options.method, str) or not seconds > 0:
        raise OptionError(
            f"Expected a time budget above 0 with a method that finds parts (got {seconds} s, "
            f"{options.method if isinstance(options.method, str) else 'given parts'!r}): leave it out"
        )
    if options.batches is not None and options.batches.draw is not None:
        raise OptionError("Expected uniform mini-batches with a time budget (got a callable): leave the budget out")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "edge_index.npy", edge_index.numpy())
        if train_mask is not None:
            np.save(folder / "train_mask.npy", train_mask.numpy())
        task = {"num_nodes": num_nodes, "num_parts": num_parts, "options": asdict(options)}
        (folder / "task").write_text(json.dumps(task))
        child = subprocess.Popen([sys.executable, "-m", "pyg_dist.plan.budget", name], stdout=subprocess.DEVNULL)
        try:
            ended = _wait(child, folder, seconds)
        finally:
            child.kill()
            child.wait()
        found = folder / "parts.npy"
        if found.exists():
            return torch.from_numpy(np.load(found))
    if ended is not None:
        raise OptionError(f"Expected {options.method!r} to find parts (its process ended with {ended}): choose another")
    raise OptionError(
        f"Expected {options.method!r} to find parts within {seconds:g} s (it did not): give it more time, or "
        f"choose metis or stream"
    )


def _wait(child: subprocess.Popen[bytes], folder: Path, seconds: float) -> int | None:
    """Until the time is up, which begins when the solver does; the status of a process that ended before."""
    deadline = time.monotonic() + _START_SECONDS
    has_begun = False
    while child.poll() is None and time.monotonic() < deadline:
        if not has_begun and (folder / "begun").exists():
            has_begun, deadline = True, time.monotonic() + seconds
        time.sleep(0.02)
    if (folder / "error").exists():
        kind, message = (folder / "error").read_text().split("\n", 1)
        raise getattr(errors, kind)(message)
    return child.poll()


def _measure(
    edge_index: Tensor, num_nodes: int, num_parts: int, options: PartsOptions, train_mask: Tensor | None
) -> Callable[[Tensor], int]:
    """What parts are compared by: the rows of one aggregation, or of mini-batches that no seed was solved for."""
    if options.method != "stochastic" or not 1 < num_parts < num_nodes:

        def rows_sent(parts: Tensor) -> int:
            cover = RemoteEdges.of(edge_index, parts, num_parts).cover(options.exchange)
            return int(cover.left.sum() + cover.right.sum())

        return rows_sent
    batches = options.batches or Batches()
    fresh = build_stochastic_model(edge_index, num_nodes, num_parts, batches, options.seed - 1, train_mask)
    return lambda parts: fresh.connectivity(parts.numpy())


def _main(folder: Path) -> None:
    """The process: solve by one seed after another until it is ended, and leave the best parts in the folder."""
    task = json.loads((folder / "task").read_text())
    num_nodes, num_parts, batches = task["num_nodes"], task["num_parts"], task["options"].pop("batches")
    options = PartsOptions(**task["options"], batches=None if batches is None else Batches(**batches))
    edge_index = torch.from_numpy(np.load(folder / "edge_index.npy"))
    mask = folder / "train_mask.npy"
    train_mask = torch.from_numpy(np.load(mask)) if mask.exists() else None
    least: int | None = None

    def keep(step: str, parts: Tensor) -> None:
        nonlocal least
        rows = measure(parts)
        if least is None or rows < least:
            least = rows
            np.save(folder / "new.npy", parts.numpy())
            (folder / "new.npy").replace(folder / "parts.npy")  # at once: the process may be ended at any time

    report: Report = keep
    (folder / "begun").touch()
    try:
        measure = _measure(edge_index, num_nodes, num_parts, options, train_mask)
        for seed in count(options.seed):
            keep("", solve(edge_index, num_nodes, num_parts, replace(options, seed=seed), train_mask, report))
    except PygDistError as error:
        (folder / "error").write_text(f"{type(error).__name__}\n{error.message}")


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
