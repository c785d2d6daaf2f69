"""Moving distributed data to another device."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from pyg_dist.backend.session.agreement import one_line
from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.row_index import PickedRows

D = TypeVar("D", bound="OnDevice")


class OnDevice:
    """What data of one type and of several have in common: all that a rank has of it lies on one device."""

    @property
    def _device(self) -> torch.device:
        raise NotImplementedError  # by each kind of data

    def _lie_on(self, device: torch.device) -> None:
        """Take note of a move, before the attributes follow."""
        raise NotImplementedError  # by each kind of data

    def to(self: D, device: torch.device | str | int, *args: str, non_blocking: bool = False) -> D:
        """Move this rank's part to ``device``, in place as ``Data.to`` does (not collective).

        Raises:
            UnsupportedError: A device that is not usable here; or names of attributes where something moves: all of
                them move with the edges.

        Example:
            >>> data.to("cpu").x.device
            device(type='cpu')
        """
        there = usable_device(device, self._device, args)
        if there != self._device:
            self._lie_on(there)
            for store in self.stores:  # type: ignore[attr-defined]
                for name, value in list(store.items()):
                    moved = moved_to(value, there, non_blocking)
                    if moved is not value:
                        store[name] = moved
        return self

    def cpu(self: D, *args: str) -> D:
        """Move this rank's part to main memory."""
        return self.to("cpu", *args)

    def cuda(self: D, device: int | str | None = None, *args: str, non_blocking: bool = False) -> D:
        """Move this rank's part to a GPU."""
        return self.to("cuda" if device is None else device, *args, non_blocking=non_blocking)

    def validate(self, raise_on_error: bool = True) -> bool:
        """True: the graph was checked when it was distributed, and every assignment since."""
        return True


def usable_device(device: torch.device | str | int, here: torch.device, names: tuple[str, ...] = ()) -> torch.device:
    """The device, with its number, that all attributes move to.

    Raises:
        UnsupportedError: torch cannot use it here; or names of attributes, unless nothing moves: all of them do.
    """
    try:
        there = torch.empty(0, device=device).device
    except Exception as error:  # of any class, by device and build of torch
        raise UnsupportedError(
            f"Expected a device that torch can use here (got '{device}': {one_line(error)}): leave the data on {here}"
        ) from None
    if names and there != here:
        raise UnsupportedError(f"Expected no names of attributes, since all of them move (got {names}): leave them out")
    return there


def moved_to(value: object, device: torch.device, non_blocking: bool = False) -> object:
    """What a storage has, on another device (not collective)."""
    if isinstance(value, PickedRows):
        return value.on(device)
    if isinstance(value, RowTensor):
        return RowTensor.from_local(value.to_local().to(device, non_blocking=non_blocking), value._sharding)
    if isinstance(value, DistributedEdgeIndex):
        return value.on(value.graph.to(device))
    return value.to(device) if isinstance(value, Tensor) else value
