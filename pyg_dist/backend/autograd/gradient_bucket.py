"""The one bucket: leaf parameters' partial gradients, summed once at the end of a backward pass.

One all-reduce per parameter doubled the epoch in a trial, since each waits for the slowest rank. So the backward of
:func:`pyg_dist.backend.autograd.replicated.copy_to_ranks` hands the partial gradient of a leaf to :func:`put`, gives
autograd nothing, and the engine calls the bucket when the pass (its *graph task*) ends.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node

from pyg_dist.backend.comm.group import Group


@dataclass
class _Entry:
    parameter: Tensor
    partial: Tensor
    group: Group
    order: int


class _Bucket:
    """The partial gradients of one pass, by the ids of their parameter and of the axis to sum over."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], _Entry] = {}

    def flush(self) -> None:
        """Sum the partial gradients over the ranks and add them to ``parameter.grad`` (collective)."""
        groups: dict[tuple[int, torch.dtype, torch.device], list[_Entry]] = {}
        for entry in sorted(self.entries.values(), key=lambda e: e.order):
            groups.setdefault((id(entry.group), entry.partial.dtype, entry.partial.device), []).append(entry)
        with torch.no_grad():
            for entries in groups.values():
                flat = torch.cat([entry.partial.reshape(-1) for entry in entries])
                flat = entries[0].group.all_reduce_(flat)
                for entry, total in zip(entries, torch.split(flat, [e.partial.numel() for e in entries]), strict=True):
                    gradient = total.view_as(entry.parameter).detach()  # else a view, which scripts may not write into
                    if entry.parameter.grad is None:
                        entry.parameter.grad = gradient
                    else:
                        entry.parameter.grad += gradient


# By graph task: nested (reentrant) passes have a bucket each. The engine alone keeps a bucket alive, through its
# callback: what a pass that raised has left behind goes with the pass.
_buckets: weakref.WeakValueDictionary[int, _Bucket] = weakref.WeakValueDictionary()


def accepts(parameter: Tensor, accumulator: Node) -> bool:
    """Whether the gradient of the leaf ``parameter`` may wait until the end of the running backward pass.

    It may not where somebody looks at it earlier or elsewhere: gradients of gradients, hooks on the tensor,
    and ``autograd.grad``, which returns what arrives at ``accumulator`` instead of storing it.
    """
    if torch.is_grad_enabled() or parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(accumulator))
    except RuntimeError:  # torch's answer for a leaf that autograd.grad captures
        return False


def put(parameter: Tensor, partial: Tensor, group: Group, order: int) -> None:
    """Keep ``partial``, this rank's share of the gradient of ``parameter``, until the pass ends.

    Args:
        parameter: a leaf.
        partial: shaped like ``parameter``.
        group: the ranks to sum over.
        order: the number of the ``enter`` in the forward pass. Equal on every rank, so it fixes the layout
            of the message.
    """
    task = torch._C._current_graph_task_id()
    bucket = _buckets.get(task)
    if bucket is None:
        bucket = _buckets[task] = _Bucket()
        Variable._execution_engine.queue_callback(bucket.flush)
    key = (id(parameter), id(group))
    entry = bucket.entries.get(key)
    if entry is None:
        bucket.entries[key] = _Entry(parameter, partial, group, order)
    else:  # a shared weight, or one used by several layers
        entry.partial = entry.partial + partial
        entry.order = min(entry.order, order)
