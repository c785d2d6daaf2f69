"""Torch's backward passes while distributed rows live: memory that is short is explained, and losses are compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import out_of_memory
from pyg_dist.backend.comm.replicas import noted
from pyg_dist.backend.local_function import LocalFunction

_autograd: Any = torch.autograd
_run = _autograd._engine_run_backward


def watch(is_watched: bool) -> None:
    """Begin or end it. Not collective."""
    _autograd._engine_run_backward = _watched if is_watched else _run


def _watched(outputs: Sequence[Any], *args: Any, **options: Any) -> Any:
    is_outermost = torch._C._current_graph_task_id() == -1  # else it is one of checkpointing's
    if is_outermost:
        noted.has_summed = False
    try:
        gradients = _run(outputs, *args, **options)
    except (RuntimeError, MemoryError) as error:  # of the engine's own functions: no Python runs there
        if _has_own_function(outputs):  # else it is somebody else's
            out_of_memory.explain(error, out_of_memory.IN_BACKWARD)
        raise
    # A loss of this rank's rows alone may differ between ranks, one of all rows may not.
    if is_outermost and noted.is_on and noted.has_summed:
        for output in outputs:
            if type(output) is Tensor and output.numel() == 1:
                noted.loss(output)
    return gradients


def _has_own_function(outputs: Any) -> bool:
    """Whether a function of this package is in the graph behind ``outputs``, tensors or edges of the graph."""
    nodes = [getattr(output, "node", None) or output.grad_fn for output in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        if issubclass(getattr(node, "_forward_cls", object), LocalFunction):
            return True
        following = {inner for inner, _ in getattr(node, "next_functions", ())} - seen
        seen |= following
        nodes += following
    return False
