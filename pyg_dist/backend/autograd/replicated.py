"""The two adjoint functions that carry every gradient between replicated and distributed tensors.

==========  =================  ==================
function    forward            backward
==========  =================  ==================
``copy_to_ranks``   identity           sum over the ranks
``reduce_from_ranks``   sum over ranks     identity
==========  =================  ==================

A plain tensor is *replicated*: every rank holds the same value, and its gradient, too, is the same everywhere.
A row tensor is *distributed*: every rank holds other rows, and gradients with respect to them. A plain tensor
that meets rows enters; a sum over rows leaves. Each one's backward applies the other, so gradients of gradients
hold as well. ``all_gather_rows`` is ``reduce_from_ranks`` for whole rows.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyg_dist.backend.autograd import broadcast, gradient_bucket
from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.errors import UnsupportedError

_order = itertools.count()  # every rank runs the same calls, so the numbers agree


class _CopyToRanks(LocalFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.order = next(_order)
        # DDP's own hooks sit on the gradient's way into a leaf and must see the finished sum.
        ddp = DistributedDataParallel._active_ddp_module is not None
        ctx.leaf = tensor if tensor.is_leaf and not ddp else None
        ctx.set_materialize_grads(False)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        if ctx.leaf is not None and gradient_bucket.accepts(ctx.leaf, ctx.next_functions[0][0]):
            gradient_bucket.put(ctx.leaf, grad, ctx.group, ctx.order)
            return None, None
        return reduce_from_ranks(grad, ctx.group), None


class _ReduceFromRanks(LocalFunction):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return group.all_reduce_(tensor.clone())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return copy_to_ranks(grad, ctx.group), None


class _AllGatherRows(LocalFunction):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group, counts: list[int], order: Tensor, mine: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(mine)
        gathered = group.gather_rows(rows, counts)
        return torch.empty_like(gathered).index_copy_(0, order, gathered)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (mine,) = ctx.saved_tensors
        return copy_to_ranks(grad, ctx.group).index_select(0, mine), None, None, None, None


def copy_to_ranks(tensor: Tensor, group: Group) -> Tensor:
    """A replicated tensor, about to meet distributed rows: identity; its gradients are summed over ``group``.

    Not collective in the forward pass, except for a leaf that enters for the first time: it is given the values of
    rank 0 (:mod:`pyg_dist.backend.broadcast`). The backward is (at once, or with all leaves at the end of the pass).

    Raises:
        UnsupportedError: Under a transform of ``torch.func``, which would see one rank's rows.
    """
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(
            "torch.func transforms and torch.vmap do not reach the rows of other ranks: use torch.autograd.grad, "
            "or apply them to plain tensors"
        )
    if group.size == 1 or not tensor.requires_grad:
        return tensor
    if tensor.is_leaf and not broadcast.is_synchronised(tensor):
        broadcast.broadcast_from_main([tensor], world_group())  # `axis` may be one of many such groups
    return _CopyToRanks.apply(tensor, group) if torch.is_grad_enabled() else tensor  # type: ignore[no-untyped-call]


def reduce_from_ranks(tensor: Tensor, group: Group) -> Tensor:
    """The sum over ``group`` of each rank's ``tensor``, equal on every rank (collective); backward: identity."""
    if group.size == 1:
        return tensor
    return _ReduceFromRanks.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]


def all_gather_rows(rows: Tensor, group: Group, counts: list[int], order: Tensor, mine: Tensor) -> Tensor:
    """All rows in global order, equal on every rank (collective); backward: this rank's slice.

    Args:
        rows: ``[counts[rank], ...]``, this rank's rows.
        group: the ranks that hold the others.
        counts: rows by rank.
        order: ``[sum(counts)]``, the position in the output of each row, ranks one after another.
        mine: ``[counts[rank]]``, this rank's piece of ``order``.
    """
    return _AllGatherRows.apply(rows, group, counts, order, mine)  # type: ignore[no-any-return, no-untyped-call]
