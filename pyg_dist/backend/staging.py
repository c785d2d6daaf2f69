"""Staging: messages that a process group cannot carry go through host memory.

A group carries tensors of the devices that its backends send from. Rows on another device, such as those of ranks that
share a GPU, which nccl refuses, are copied to pinned memory, sent from there, and copied to where they belong when they
have arrived. CPU rows of a group that is nccl alone go by way of the GPU. ``PYG_DIST_STAGE=1`` sends all this way.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor

from pyg_dist.backend.session.settings import STAGE

logger = logging.getLogger("pyg_dist")

_HOST = torch.device("cpu")
_warned: set[str] = set()
_never_carried: set[str] = set()


def carry_none_of(device: str) -> None:
    """Let this session's groups carry no tensors of a kind of device, whatever their backends say. Call it first."""
    _never_carried.add(device)


def restart() -> None:
    """Forget it: the next session's ranks may have other devices."""
    _never_carried.clear()


class Stage:
    """What the messages of a process group are sent from. Not collective.

    Args:
        process_group: the group.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._is_forced = STAGE.value()
        self._rank = process_group.rank()
        by_device = (entry.split(":") for entry in str(dist.get_backend_config(process_group)).split(","))
        # gloo lacks an uneven all-to-all of GPU tensors.
        carried = {device for device, backend in by_device if device == "cpu" or backend != "gloo"}
        self._carried = carried - _never_carried

    def copies(self, tensor: Tensor) -> bool:
        """Whether a copy is sent in the place of ``tensor``."""
        return self._is_forced or tensor.device.type not in self._carried

    def lift(self, tensor: Tensor) -> Tensor:
        """What is sent in the place of ``tensor``: itself, or a copy (waits for it)."""
        return self.room(tensor).copy_(tensor) if self.copies(tensor) else tensor

    def room(self, like: Tensor) -> Tensor:
        """Where what belongs into ``like``, which is not carried, may arrive."""
        if not self._is_forced:
            self._warn(like.device.type)
        to_host = "cpu" in self._carried
        device = _HOST if to_host else torch.device(next(iter(self._carried)))
        return torch.empty(like.shape, dtype=like.dtype, device=device, pin_memory=to_host and not like.is_cpu)

    @staticmethod
    def land(arrived: Tensor, device: torch.device) -> Tensor:
        """What has arrived, on ``device``, where it belongs."""
        return arrived if arrived.device == device else arrived.to(device, non_blocking=device != _HOST)

    def _warn(self, device: str) -> None:
        if self._rank == 0 and device not in _warned:
            logger.warning(
                "messages of tensors on %s are copied to %s and back, since the process group carries those alone: "
                "give every rank a GPU of its own, and open the group with pyg_dist.init()",
                device, " and ".join(sorted(self._carried)),
            )  # fmt: skip
        _warned.add(device)
