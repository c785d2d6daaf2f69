"""Devices: what plans are copied there, once; streams and their memory; CUDA graphs.

Plans stay on the host. Nothing here synchronises, and nothing starts a device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import NamedTuple

T = TypeVar("T")

_copies = WeakIdKeyDictionary()
"""By tensor: its copies by device, which go with it."""


def copied_to(drawn: Tensor, device: torch.device) -> Tensor:
    """A tensor that is made anew on the host in each step, on ``device``: neither of the two waits. Not collective."""
    return drawn if device.type == "cpu" else drawn.pin_memory().to(device, non_blocking=True)


def numbered(device: torch.device | str) -> torch.device:
    """A device with its number, as its tensors have it: "cuda" is the current GPU, another one in another thread."""
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else torch.device(device)


C = TypeVar("C", bound="CopiedToDevices")


class CopiedToDevices:
    """A graph, or a part of one, of which each device that needs it has one copy.

    Attributes:
        device: where this one is.
        parent: of a batch, the graph, which goes along.
    """

    device: torch.device
    parent: Any = None
    _elsewhere: dict[torch.device, Any]

    def __deepcopy__(self: C, memo: object) -> C:
        return self  # immutable, apart from caches

    def to(self: C, device: torch.device | str) -> C:
        device = numbered(device)
        if device == self.device:
            return self
        if device not in self._elsewhere:
            moved = copy.copy(self)
            moved._build_on(device)
            if self.parent is not None:
                moved.parent = self.parent.to(device)
            self._elsewhere[device] = moved
        there: C = self._elsewhere[device]
        return there

    def _build_on(self, device: torch.device) -> None:
        """Make there, in a copy, what depends on the device."""
        raise NotImplementedError  # by each kind of graph


def on_device(plan: Tensor, device: torch.device) -> Tensor:
    """A constant tensor (indices, keys) on ``device``: itself, or a copy that lives as long. Not collective."""
    if plan.device == device:
        return plan
    copies: dict[torch.device, Tensor] = _copies.setdefault(plan, {})
    if device not in copies:
        with torch.inference_mode(False):  # it serves training, too
            copies[device] = plan.to(device)
    return copies[device]


def part_of(plan: Tensor, first: int, last: int) -> Tensor:
    """Some entries of a constant tensor, whose copies are parts of those that it has now. Not collective."""
    part = plan[first:last]
    _copies[part] = {device: there[first:last] for device, there in _copies.get(plan, {}).items()}
    return part


def to_host(made: Tensor) -> Tensor:
    """A constant tensor of a device, on the host (waits); :func:`on_device` finds the device's again."""
    if made.is_cpu:
        return made
    plan = made.cpu()
    _copies[plan] = {made.device: made}
    return plan


def is_capturing() -> bool:
    """Whether what is queued on the current stream becomes part of a CUDA graph: the host may then not wait for it."""
    is_started = torch.cuda.is_initialized()
    return is_started and torch.cuda.is_current_stream_capturing()


def use_here(*tensors: Tensor) -> None:
    """Let no memory of these be given to others before what is queued on the current stream is done. Not collective.

    Torch otherwise gives it, once it is freed, to what comes next on the stream that it was allocated on.
    """
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))


class Made(NamedTuple, Generic[T]):
    """The result of :meth:`SideStream.make`; :func:`taken` hands it over."""

    item: T
    tensors: list[Tensor]
    """All that were made on the way: kept, since what is left of the item's own references is not known here."""
    is_done: torch.cuda.Event | None
    """An event; None: it was made where no stream is."""


class SideStream:
    """A stream on which a thread's work neither waits for training nor delays it; on the host there is none.

    Torch reuses memory on the stream that it was allocated on as soon as it is freed. So tensors that were made here
    are marked as used by the stream that takes them over, and what is read here as used by this one. Not collective.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def follow(self) -> None:
        """Have what is made from now on see what is queued on the current stream; the thread that trains calls it."""
        if self.device.type == "cuda":
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.device)
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
    """The result of a side stream, for the current stream, which waits for it; the host does not."""
    if made.is_done is not None:
        torch.cuda.current_stream().wait_event(made.is_done)
        use_here(*made.tensors)
    return made.item


class _Notes(TorchDispatchMode):
    """Notes every tensor on a GPU that an operator of this thread returns, and marks those that it reads as used."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        TorchDispatchMode.__init__(self)
        self.tensors: list[Tensor] = []
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        out = func(*args, **(kwargs or {}))
        for read in _on_gpu((args, kwargs)):
            read.record_stream(self._stream)
        self.tensors += _on_gpu(out)
        return out


def _on_gpu(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.is_cuda]
