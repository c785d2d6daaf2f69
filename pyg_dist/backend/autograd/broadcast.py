"""Broadcast of first values: a plain tensor holds the same value on every rank, at first rank 0's."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.session.state import current


class _Synchronised(weakref.WeakValueDictionary[int, Tensor]):
    """A run's, by id, since tensors compare by value; an entry goes when its tensor does."""


def is_synchronised(tensor: Tensor) -> bool:
    """Whether :func:`broadcast_from_main` has seen ``tensor``; the same answer on every rank. Not collective."""
    return current().of(_Synchronised).get(id(tensor)) is tensor


def broadcast_from_main(tensors: Iterable[Tensor], group: Group) -> None:
    """Give ``tensors`` the values that they have on rank 0, in place (collective: a message per dtype and device)."""
    if group.size == 1:
        return
    synchronised = current().of(_Synchronised)
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
                if not torch.equal(tensor, values):  # autograd may have saved the tensor: write only what differs
                    tensor.copy_(values)
