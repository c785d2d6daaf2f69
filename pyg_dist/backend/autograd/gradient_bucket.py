"""Gradient all-reduce: the partial gradients of leaf parameters in one bucket, summed at the end of a backward pass.

One all-reduce per parameter doubled the epoch in a trial, since each waits for the slowest rank. So the backward of
:func:`pyg_dist.backend.autograd.replicated.copy_to_ranks` hands the partial gradient of a leaf to
:meth:`LeafGradient.defer`, gives autograd nothing, and the engine calls the bucket when the pass (its *graph task*)
ends.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node

from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.session.state import current


@dataclass
class _Entry:
    partial: Tensor
    leaf: LeafGradient


class _Bucket:
    """The partial gradients of one pass, by the ids of their parameter and of the axis to sum over."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], _Entry] = {}

    def flush(self) -> None:
        """Sum the partial gradients over the ranks and add them to ``parameter.grad`` (collective)."""
        groups: dict[tuple[int, torch.dtype, torch.device], list[_Entry]] = {}
        for entry in sorted(self.entries.values(), key=lambda e: e.leaf.order):
            groups.setdefault((id(entry.leaf.group), entry.partial.dtype, entry.partial.device), []).append(entry)
        for (_, _, device), entries in groups.items():
            with torch.no_grad(), torch.autocast(device.type, enabled=False):  # as in broadcast_from_main
                flat = torch.cat([entry.partial.reshape(-1) for entry in entries])
                flat = entries[0].leaf.group.all_reduce_(flat)
                for entry, total in zip(entries, torch.split(flat, [e.partial.numel() for e in entries]), strict=True):
                    parameter = entry.leaf.parameter
                    gradient = total.view_as(parameter).detach()  # else a view, which scripts may not write into
                    if parameter.grad is None:
                        parameter.grad = gradient
                    else:
                        parameter.grad += gradient


class _Uses:
    """A run's leaves.

    Attributes:
        buckets: by graph task: nested (reentrant) passes have a bucket each. The engine alone keeps a bucket alive,
            through its callback: what a pass that raised has left behind goes with the pass.
        order: every rank runs the same calls, so the numbers agree.
    """

    def __init__(self) -> None:
        self.buckets: weakref.WeakValueDictionary[int, _Bucket] = weakref.WeakValueDictionary()
        self.order = itertools.count()


@dataclass(frozen=True)
class LeafGradient:
    """Where the gradient of one use of a leaf goes; ``order`` numbers the uses, equally on every rank."""

    parameter: Tensor
    group: Group
    order: int = field(default_factory=lambda: next(current().of(_Uses).order))

    def defer(self, partial: Tensor, accumulator: Node) -> bool:
        """Keep ``partial``, this rank's share of the gradient, until the pass ends; ``False``: it may not wait.

        It may not where it is read earlier or elsewhere: gradients of gradients, hooks on the tensor, and
        ``autograd.grad``, which returns what arrives at ``accumulator`` instead of storing it.
        """
        if torch.is_grad_enabled() or self.parameter._backward_hooks or self.parameter._post_accumulate_grad_hooks:
            return False
        try:
            if not torch._C._will_engine_execute_node(accumulator):
                return False
        except RuntimeError:  # torch's answer for a leaf that autograd.grad captures
            return False
        task = torch._C._current_graph_task_id()
        buckets = current().of(_Uses).buckets
        bucket = buckets.get(task)
        if bucket is None:
            bucket = buckets[task] = _Bucket()
            Variable._execution_engine.queue_callback(bucket.flush)
        key = (id(self.parameter), id(self.group))
        entry = bucket.entries.get(key)
        if entry is None:
            bucket.entries[key] = _Entry(partial, self)
        else:  # a shared weight, or one used by several layers
            entry.partial = entry.partial + partial
            entry.leaf = min(entry.leaf, self, key=lambda leaf: leaf.order)
        return True
