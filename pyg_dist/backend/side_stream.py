"""A GPU's side stream: a thread's work there neither waits for training nor delays it.

Torch's memory belongs to the stream that it was allocated on, and is reused there as soon as it is freed. So tensors
that were made on a side stream are marked as used by the stream that takes them over: their memory is not reused before
the work of that stream is done. What a side stream reads of others is marked as used by the side stream.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


class Made(NamedTuple, Generic[T]):
    """What :meth:`SideStream.make` has made; :func:`taken` hands it over."""

    item: T
    tensors: list[Tensor]
    """All that were made on the way: kept, since what is left of the item's own references is not known here."""
    is_done: Any
    """An event; None: it was made where no stream is."""


class SideStream:
    """One on ``device``; on the host there are none, and things are made at once. Not collective.

    Args:
        device: where.
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
    """Notes every tensor on a GPU that an operator of this thread returns, and marks those that it reads as used.

    Args:
        stream: where the operators run.
    """

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
