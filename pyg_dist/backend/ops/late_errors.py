"""Late errors: a device finds them when the op has long returned, and a later call raises them. Nothing here waits.

Who raises them: each native op, what reads values on the host, and the end of the session, which waits for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.on_device import is_capturing
from pyg_dist.backend.ops.library import call, native
from pyg_dist.backend.session.state import current

# Copies of errors that may be under way, more than the messages of a step; the oldest is waited for.
_MAX_FLYING = 64


class _Cell(NamedTuple):
    copy: Tensor
    arrives: torch.Event
    error: Callable[[int], Exception]


class LateErrors(deque[_Cell]):
    """Errors that devices have found, on their way to the host; a part of the session."""

    def close(self) -> None:
        """Wait for the device, and raise the first error that nobody has heard of."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.raise_found()

    def raise_found(self) -> None:
        """Raise the first error of those that have arrived."""
        while self and (len(self) > _MAX_FLYING or self[0].arrives.query()):
            cell = self.popleft()
            cell.arrives.synchronize()
            found = int(cell.copy)
            if found >= 0:
                self.clear()
                raise cell.error(found)
        call(native.raise_bad_index.default)


def raise_later(found: Tensor, error: Callable[[int], Exception]) -> None:
    """Have ``error(found)`` raised by a later call, if the device finds what is not negative. Not collective.

    An op has written what is wrong, or -1, into the cell ``found``, int64 ``[1]``, which is copied to pinned memory
    behind it. An op of the next step finds it there at the latest. In a CUDA graph nothing is watched: each replay
    would write into memory that has long been given to others, and results are NaN.

    Raises:
        Exception: What an earlier one has found.
    """
    if is_capturing():
        return
    raise_found()
    copy = host.empty(1, dtype=found.dtype, pin_memory=True)
    copy.copy_(found, non_blocking=True)
    arrives = torch.Event(found.device)
    arrives.record()
    current().of(LateErrors).append(_Cell(copy, arrives, error))


def raise_found() -> None:
    """Raise the first error of those that are known now; none while a CUDA graph is captured. Not collective."""
    if not is_capturing():
        current().of(LateErrors).raise_found()
