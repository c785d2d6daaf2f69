"""Errors found on a device: they are raised when they are known, without synchronisation.

An op writes what is wrong, or -1, into a cell on the device, which is copied to pinned memory behind it. Whoever runs
such an op looks at the copies that have arrived by then: at the latest an op of the next step finds it.

In a CUDA graph nothing is watched: each replay would write into memory that has long been given to others. What an op
finds there is seen in its results alone, which are NaN.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend.capture import is_capturing

# Copies that may be under way, more than the messages of a step; the oldest is waited for.
_MAX_FLYING = 64


class _Cell(NamedTuple):
    copy: Tensor
    arrives: torch.Event
    error: Callable[[int], Exception]


_flying: deque[_Cell] = deque()


def watch(found: Tensor, error: Callable[[int], Exception]) -> None:
    """Have ``error(found)`` raised by a later call, if the device finds what is not negative. Not collective.

    Args:
        found: int64 ``[1]`` on the device, written by an op before.
        error: makes the exception.

    Raises:
        Exception: What an earlier one has found.
    """
    if is_capturing():
        return
    raise_found()
    copy = torch.empty(1, dtype=found.dtype, pin_memory=True)
    copy.copy_(found, non_blocking=True)
    arrives = torch.Event(found.device)
    arrives.record()
    _flying.append(_Cell(copy, arrives, error))


def raise_found() -> None:
    """Raise the first error of those that are known now; none while a CUDA graph is captured. Not collective."""
    if is_capturing():
        return
    while _flying and (len(_flying) > _MAX_FLYING or _flying[0].arrives.query()):
        cell = _flying.popleft()
        cell.arrives.synchronize()
        found = int(cell.copy)
        if found >= 0:
            _flying.clear()
            raise cell.error(found)
