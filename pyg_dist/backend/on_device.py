"""Plans stay on the host: what a device needs of them is copied there once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

_copies = WeakIdKeyDictionary()
"""By tensor: its copies by device, which go with it."""


def copied_to(drawn: Tensor, device: torch.device) -> Tensor:
    """A tensor that is made anew on the host in each step, on ``device``: neither of the two waits. Not collective."""
    return drawn if device.type == "cpu" else drawn.pin_memory().to(device, non_blocking=True)


def on_device(plan: Tensor, device: torch.device) -> Tensor:
    """A constant tensor (indices, keys) on ``device``: itself, or a copy that lives as long. Not collective."""
    if plan.device == device:
        return plan
    copies: dict[torch.device, Tensor] = _copies.setdefault(plan, {})  # type: ignore[no-untyped-call]
    if device not in copies:
        with torch.inference_mode(False):  # it serves training, too
            copies[device] = plan.to(device)
    return copies[device]
