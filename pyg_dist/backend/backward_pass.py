"""Torch's backward passes while distributed rows live: memory that is short is explained, and losses are compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import out_of_memory
from pyg_dist.backend.autograd.replicated import GatherRows, SumOverRanks
from pyg_dist.backend.comm.checks.replicas import noted
from pyg_dist.backend.local_function import LocalFunction

_autograd: Any = torch.autograd
_run = _autograd._engine_run_backward


def watch(is_watched: bool) -> None:
    """Begin or end it. Not collective."""
    _autograd._engine_run_backward = _watched if is_watched else _run


def _watched(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
    is_outermost = torch._C._current_graph_task_id() == -1  # else it is one of checkpointing's
    losses = [x for x in outputs if _is_of_all_ranks(x)] if is_outermost and noted.is_on else []
    try:
        gradients = _run(outputs, *args, **options)
    except (RuntimeError, MemoryError) as error:  # of the engine's own functions: no Python runs there
        if _has_own_function(outputs):  # else it is somebody else's
            out_of_memory.explain(error, out_of_memory.IN_BACKWARD)
        raise
    for loss in losses:
        noted.loss(loss)
    return gradients


def _is_of_all_ranks(output: Any) -> bool:
    """Whether an output is a number that is made of sums over all ranks' rows, or of all rows, and of no other rows.

    One of this rank's rows, ``out.to_local().sum()``, may differ between ranks.
    """
    if type(output) is not Tensor or output.numel() != 1:
        return False
    maps = [getattr(node, "map", None) for node in _first_own_functions([output])]
    of_all = [isinstance(a, GatherRows) or (isinstance(a, SumOverRanks) and a.is_of_rows) for a in maps]
    return bool(of_all) and all(of_all)


def _has_own_function(outputs: Any) -> bool:
    """Whether a function of this package is in the graph behind ``outputs``, tensors or edges of the graph."""
    return next(_first_own_functions(outputs), None) is not None


def _first_own_functions(outputs: Any) -> Iterator[Any]:
    """The functions of this package that the engine comes to first on its ways from ``outputs``."""
    nodes = [getattr(output, "node", None) or output.grad_fn for output in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if issubclass(getattr(node, "_forward_cls", object), LocalFunction):
            yield node
            continue
        following = {inner for inner, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        nodes += following
