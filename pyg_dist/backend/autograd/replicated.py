"""The two adjoint functions that carry every gradient between replicated and distributed tensors.

==========  =================  ==================
function    forward            backward
==========  =================  ==================
``copy_to_ranks``   identity           sum over the ranks
``reduce_from_ranks``   sum over ranks     identity
==========  =================  ==================

A plain tensor is *replicated*: every rank holds the same value, and its gradient, too, is the same everywhere.
A row tensor is *distributed*: every rank holds other rows, and gradients with respect to them. A plain operand beside
rows is copied to the ranks; a sum over rows is reduced from them. Each one's backward applies the other, which gives
gradients of gradients. ``all_gather_rows`` is ``reduce_from_ranks`` for whole rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyg_dist.backend.autograd.gradient_bucket import LeafGradient
from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.session.state import current
from pyg_dist.errors import UnsupportedError


class _Synchronised(weakref.WeakValueDictionary[int, Tensor]):
    """A run's, by id, since tensors compare by value; an entry goes when its tensor does."""


def is_synchronised(tensor: Tensor) -> bool:
    """Whether :func:`broadcast_from_main` has seen ``tensor``; the same answer on every rank. Not collective."""
    return current().of(_Synchronised).get(id(tensor)) is tensor


def broadcast_from_main(tensors: Iterable[Tensor], group: Group) -> None:
    """Give ``tensors`` the values that they have on rank 0, in place (collective: a message per dtype and device)."""
    if group.size == 1:
        return
    synchronised, was_recording = current().of(_Synchronised), torch.is_grad_enabled()
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in {id(t): t for t in tensors}.values():  # shared weights once
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        synchronised[id(tensor)] = tensor
    for (_, device), alike in groups.items():
        # Autocast refuses to join tensors of the 16-bit type that it is not to.
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            flat = group.broadcast_(torch.cat([t.detach().reshape(-1) for t in alike]))
            for tensor, values in zip(alike, torch.split(flat, [t.numel() for t in alike]), strict=True):
                values = values.view_as(tensor)
                # autograd may have saved the tensor: write only what differs, which NaN does from itself
                if not (torch.equal(tensor, values) or _are_same(tensor, values)):
                    # torch refuses a view from under no_grad once the version that it shares has changed
                    is_entry = tensor._is_view() and not was_recording
                    (tensor.data if is_entry else tensor).copy_(values)


def _are_same(x: Tensor, y: Tensor) -> bool:
    """Whether they are equal, a NaN to a NaN."""
    if x.is_complex():
        x, y = torch.view_as_real(x.resolve_conj()), torch.view_as_real(y)
    return bool(x.isclose(y, 0, 0, equal_nan=True).all())


@dataclass(frozen=True)
class CopyToRanks:
    """Identity: a tensor that several ranks hold has another part beside it on each; ``total`` sums over these."""

    total: Callable[[Tensor], Tensor]

    @property
    def transposed(self) -> SumOverRanks:
        """The sum of what each part has made of it."""
        return SumOverRanks(self.total)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Nothing is sent."""
        return Pending(lambda: x.view_as(x))


@dataclass(frozen=True)
class SumOverRanks:
    """The sum of every rank's tensor, on every rank (:class:`CopyToRanks`): of rows, or of products that make a row."""

    total: Callable[[Tensor], Tensor]
    is_of_rows: bool = True

    @property
    def transposed(self) -> CopyToRanks:
        """Each rank's summand has the gradient of the sum."""
        return CopyToRanks(self.total)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """The collective runs when it is waited for."""
        return Pending(lambda: self.total(x))


@dataclass(frozen=True, eq=False)
class GatherRows:
    """All rows in global order, on every rank: a sum of tensors that are zero where another rank has the row.

    ``order`` is the position in the output of each row, ranks one after another; ``mine`` this rank's piece of it.
    """

    group: Group
    counts: list[int]
    order: Tensor
    mine: Tensor

    @property
    def transposed(self) -> SliceRows:
        """This rank's rows."""
        return SliceRows(self)

    def start(self, x: Tensor) -> Pending[Tensor]:
        """The collective runs when it is waited for."""
        return Pending(lambda: self._ordered(self.group.gather_rows(x, self.counts)))

    def _ordered(self, gathered: Tensor) -> Tensor:
        return torch.empty_like(gathered).index_copy_(0, self.order, gathered)


@dataclass(frozen=True, eq=False)
class SliceRows:
    """This rank's rows of a tensor that every rank holds. Nothing is sent."""

    transposed: GatherRows

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Nothing is sent."""
        return Pending(lambda: x.index_select(0, self.transposed.mine))


NO_TRANSFORMS = (
    "torch.func transforms and torch.vmap do not reach the rows of other ranks: use torch.autograd.grad, or apply them "
    "to plain tensors"
)


def refuse_transforms() -> None:
    """Raise within ``torch.vmap`` and the transforms of ``torch.func``.

    Raises:
        UnsupportedError: There, since they would see one rank's rows.
    """
    if torch._C._are_functorch_transforms_active():
        raise UnsupportedError(NO_TRANSFORMS)


def copy_to_ranks(tensor: Tensor, group: Group) -> Tensor:
    """A replicated tensor, as an operand beside rows: identity; its gradients are summed over ``group``.

    Not collective in the forward pass, except for a leaf that enters for the first time: it is given the values of
    rank 0 (:func:`broadcast_from_main`). The backward is (at once, or with all leaves at the end of the pass).

    Raises:
        UnsupportedError: Under a transform of ``torch.func`` (:func:`refuse_transforms`).
    """
    refuse_transforms()
    if group.size == 1 or not tensor.requires_grad:
        return tensor
    if tensor.is_leaf and not is_synchronised(tensor):
        broadcast_from_main([tensor], world_group())  # `group` may be one of many such groups
    if not torch.is_grad_enabled():
        return tensor
    # DDP's own hooks sit on the gradient's way into a leaf and must see the finished sum.
    is_deferred = tensor.is_leaf and DistributedDataParallel._active_ddp_module is None
    return apply(CopyToRanks(group.sum), tensor, leaf=LeafGradient(tensor, group) if is_deferred else None)


def reduce_from_ranks(tensor: Tensor, group: Group) -> Tensor:
    """The sum over ``group`` of each rank's ``tensor``, equal on every rank (collective); backward: identity."""
    return tensor if group.size == 1 else apply(SumOverRanks(group.sum), tensor)


def all_gather_rows(rows: Tensor, group: Group, counts: list[int], order: Tensor, mine: Tensor) -> Tensor:
    """:class:`GatherRows`, differentiable; backward: this rank's slice."""
    return apply(GatherRows(group, counts, order, mine), rows)
