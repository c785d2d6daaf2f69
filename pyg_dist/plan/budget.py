"""The best parts that seeds one after another find within a time budget, in a process that can be ended."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection

import numpy as np
import torch
from torch import Tensor

from pyg_dist.errors import OptionError, PygDistError
from pyg_dist.halo.plan.cover import RemoteEdges
from pyg_dist.partition import Batches
from pyg_dist.partition.hypergraph import build_stochastic_model
from pyg_dist.partition.inputs import Array
from pyg_dist.plan.parts import PartsOptions, solve

_START_SECONDS = 300  # for Python and torch to come up on a busy machine


def solve_within(
    seconds: float,
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    options: PartsOptions,
    train_mask: Tensor | None = None,
) -> Tensor:
    """The parts, int32 ``[N]``, with the fewest rows of ``options.exchange`` that were found in time. Not collective.

    Parts of "stochastic" are compared by mini-batches other than those they were made for. A process of its own solves
    for ``options.seed`` and the seeds that follow, until the time is up; the best of an unfinished seed counts, too. So
    a solver that hangs, or is killed for its memory, raises an error here.
    """
    if not isinstance(options.method, str) or not seconds > 0:
        raise OptionError(
            f"Expected a time budget above 0 with a method that finds parts (got {seconds} s, "
            f"{options.method if isinstance(options.method, str) else 'given parts'!r}): leave it out"
        )
    if options.batches is not None and options.batches.draw is not None:
        raise OptionError("Expected uniform mini-batches with a time budget (got a callable): leave the budget out")
    processes = multiprocessing.get_context("spawn")
    here, there = processes.Pipe(duplex=False)
    mask = None if train_mask is None else train_mask.numpy()
    child = processes.Process(target=_solve, args=(there, edge_index.numpy(), num_nodes, num_parts, options, mask))
    child.start()
    there.close()
    best: Array | None = None
    has_ended, deadline = False, time.monotonic() + _START_SECONDS
    try:
        while here.poll(max(deadline - time.monotonic(), 0)):
            found = here.recv()
            if found is None:
                deadline = time.monotonic() + seconds
            elif isinstance(found, PygDistError):
                raise found
            else:
                best = found
    except (EOFError, OSError):
        has_ended = True
        child.join()
    finally:
        status = child.exitcode
        child.kill()
        child.join()
        here.close()
    if best is not None:
        return torch.from_numpy(best)
    if has_ended:
        raise OptionError(
            f"Expected {options.method!r} to find parts (its process ended with {status}): choose another"
        )
    raise OptionError(
        f"Expected {options.method!r} to find parts within {seconds:g} s (it did not): give it more time, or "
        f"choose metis or stream"
    )


def _measure(
    edge_index: Tensor, num_nodes: int, num_parts: int, options: PartsOptions, train_mask: Tensor | None
) -> Callable[[Tensor], int]:
    """Gives the rows that parts send in one aggregation, or, of "stochastic", in mini-batches of another seed."""
    if options.method != "stochastic" or not 1 < num_parts < num_nodes:

        def rows_sent(parts: Tensor) -> int:
            cover = RemoteEdges.of(edge_index, parts, num_parts).cover(options.exchange)
            return int(cover.left.sum() + cover.right.sum())

        return rows_sent
    batches = options.batches or Batches()
    fresh = build_stochastic_model(edge_index, num_nodes, num_parts, batches, options.seed - 1, train_mask)
    return lambda parts: fresh.connectivity(parts.numpy())


def _solve(
    pipe: Connection, edges: Array, num_nodes: int, num_parts: int, options: PartsOptions, mask: Array | None
) -> None:
    """The process. It sends None when it begins, then parts that are better than all before, or its error."""
    edge_index, train_mask = torch.from_numpy(edges), None if mask is None else torch.from_numpy(mask)
    least: float = np.inf

    def keep(step: str, parts: Tensor) -> None:
        nonlocal least
        rows = measure(parts)
        if rows < least:
            least = rows
            pipe.send(parts.numpy())

    pipe.send(None)
    try:
        measure = _measure(edge_index, num_nodes, num_parts, options, train_mask)
        for seed in count(options.seed):
            keep("", solve(edge_index, num_nodes, num_parts, replace(options, seed=seed), train_mask, keep))
    except PygDistError as error:
        pipe.send(error)
