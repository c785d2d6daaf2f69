"""Devices: what plans are copied there, once; errors that are found there; a side stream; CUDA graphs.

Plans stay on the host. Nothing here synchronises, and nothing starts a device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pyg_dist.backend.session.state import current

T = TypeVar("T")

_copies = WeakIdKeyDictionary()
"""By tensor: its copies by device, which go with it."""

# Copies of errors that may be under way, more than the messages of a step; the oldest is waited for.
_MAX_FLYING = 64


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


def is_capturing() -> bool:
    """Whether what is queued on the current stream becomes part of a CUDA graph: the host may then not wait for it."""
    is_started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_started and torch.cuda.is_current_stream_capturing()


class _Cell(NamedTuple):
    copy: Tensor
    arrives: torch.Event
    error: Callable[[int], Exception]


class _Flying(deque[_Cell]):
    """What devices have found, on its way to the host."""


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
    copy = torch.empty(1, dtype=found.dtype, pin_memory=True)
    copy.copy_(found, non_blocking=True)
    arrives = torch.Event(found.device)
    arrives.record()
    current().of(_Flying).append(_Cell(copy, arrives, error))


def raise_found() -> None:
    """Raise the first error of those that are known now; none while a CUDA graph is captured. Not collective."""
    if is_capturing():
        return
    flying = current().of(_Flying)
    while flying and (len(flying) > _MAX_FLYING or flying[0].arrives.query()):
        cell = flying.popleft()
        cell.arrives.synchronize()
        found = int(cell.copy)
        if found >= 0:
            flying.clear()
            raise cell.error(found)


class Made(NamedTuple, Generic[T]):
    """What :meth:`SideStream.make` has made; :func:`taken` hands it over."""

    item: T
    tensors: list[Tensor]
    """All that were made on the way: kept, since what is left of the item's own references is not known here."""
    is_done: Any
    """An event; None: it was made where no stream is."""


class SideStream:
    """A stream on which a thread's work neither waits for training nor delays it; on the host there is none.

    Torch reuses memory on the stream that it was allocated on as soon as it is freed. So tensors that were made here
    are marked as used by the stream that takes them over, and what is read here as used by this one. Not collective.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: Any = None

    def follow(self) -> None:
        """Have what is made from now on see what is queued on the current stream; the thread that trains calls it."""
        if self.device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def make(self, function: Callable[[], T]) -> Made[T]:
        """``function()`` with this stream as the current one; :meth:`follow` has been called before."""
        if self._stream is None:
            return Made(function(), [], None)
        # A new thread's current device is GPU 0: it would start that one, whose memory may be another rank's.
        torch.cuda.set_device(self.device)
        with torch.cuda.stream(self._stream), _Notes(self._stream) as notes:
            item = function()
        return Made(item, notes.tensors, self._stream.record_event())


def taken(made: Made[T]) -> T:
    """What was made, for the current stream, which waits for it; the host does not."""
    if made.is_done is not None:
        stream = torch.cuda.current_stream()
        stream.wait_event(made.is_done)
        for tensor in made.tensors:
            tensor.record_stream(stream)
    return made.item


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every tensor on a GPU that an operator of this thread returns, and marks those that it reads as used."""

    def __init__(self, stream: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Tensor] = []
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for read in _on_gpu((args, kwargs)):
            read.record_stream(self._stream)
        self.tensors += _on_gpu(out)
        return out


def _on_gpu(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_cuda]
