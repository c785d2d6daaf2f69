"""Where a rank's time goes: named phases of the code, recorded inside of ``pyg_dist.profile()``.

=============  =======================================================================================
aggregate      products of local edges
pack           rows and partial sums written into messages
quantize       packing into and adding from messages of fewer bits, sums included: it is one pass
exchange       sending and receiving messages, as far as no computation hides it
wait           waiting for slower ranks before an exchange (only without overlap)
unpack         what has arrived, multiplied and added
sums           sums over all ranks: losses, metrics, gradients of parameters
dense          products with weights
sampling       making a mini-batch, or waiting for the thread that makes it
other          everything else
=============  =======================================================================================

Without a recorder a phase costs a function call. Its name is also a label in torch's own profiler.

On a GPU the host only queues work, so phases are timed there: an event of the current stream at each begin and end,
which are read when the recording ends.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Literal, NamedTuple

import torch

PHASES = ("aggregate", "pack", "quantize", "exchange", "wait", "unpack", "sums", "dense", "sampling", "other")

OUTSIDE = 0  # the layer of everything that belongs to no layer


class Span(NamedTuple):
    """One stretch of time; ``own`` leaves out the stretches inside of it."""

    phase: int
    layer: int
    begin: float
    seconds: float
    own: float


class HostClock:
    """Marks in time for a recorder, whose distances are known once it has settled. This one has the host's time."""

    def now(self) -> object:
        """A mark."""
        return time.perf_counter()

    def settle(self) -> None:
        """Wait until all marks are known."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one mark to another."""
        return float(end - begin)


class DeviceClock(HostClock):
    """The time at which a GPU's current stream comes to what is queued then."""

    def now(self) -> object:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def settle(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1000


class _Stretch(NamedTuple):
    """As a recorder notes it: marks, and the marks of the stretches right inside."""

    phase: int
    layer: int
    begin: object
    end: object
    inner: list[tuple[object, object]]


class Recorder:
    """Collects spans of the thread that made it, and of backward passes, on one rank. Not collective.

    ``overlaps``: whether messages travel while local edges are multiplied, as they do without a recorder; ``clock``: by
    default a GPU's if this process has started one, else the host's.

    Attributes:
        sent_bytes: bytes of halos or tiles.
        id_bytes: bytes of ids of mini-batches.
        hidden_seconds: what another thread has worked on mini-batches, waited for or not.

    A stretch of a forward pass belongs to the layer that is running; one of a backward pass to the layer that ran when
    autograd numbered the node whose derivative it is.
    """

    def __init__(self, overlaps: bool, clock: HostClock | None = None) -> None:
        self.overlaps = overlaps
        is_on_gpu = torch.cuda.is_initialized()
        self.clock: HostClock = clock or (DeviceClock() if is_on_gpu else HostClock())
        self._stretches: list[_Stretch] = []
        self.sent_bytes = self.id_bytes = 0
        self.hidden_seconds = 0.0
        self.thread = threading.get_ident()
        self._open: list[list[tuple[object, object]]] = [[]]  # marks of what has ended inside of each open stretch
        self._begin = self.clock.now()
        self._layer = OUTSIDE
        self._numbered: list[tuple[int, int, int]] = []  # layer, first and last number of its nodes, exclusive

    def end(self) -> tuple[float, list[Span]]:
        """Seconds since the recorder was made, and the stretches in the order of their ends; waits for the device."""
        last, seconds = self.clock.now(), self.clock.seconds
        self.clock.settle()
        return seconds(self._begin, last), [
            Span(phase, layer, seconds(self._begin, begin), whole, whole - sum(seconds(*marks) for marks in inner))
            for phase, layer, begin, end, inner in self._stretches
            for whole in (seconds(begin, end),)
        ]

    def begin_layer(self, layer: int) -> tuple[int, int]:
        """A layer's forward begins; returns what :meth:`end_layer` takes."""
        before, self._layer = self._layer, layer
        return before, torch._C._autograd._get_sequence_nr()

    def end_layer(self, begun: tuple[int, int]) -> None:
        """The layer's forward has ended."""
        self._numbered.append((self._layer, begun[1], torch._C._autograd._get_sequence_nr()))
        self._layer = begun[0]

    @property
    def layer(self) -> int:
        """The layer that time belongs to now."""
        node = torch._C._current_autograd_node()
        if node is None or self._layer != OUTSIDE:  # a checkpoint runs its layer again inside of a backward pass
            return self._layer
        number = node._sequence_nr()
        return next((layer for layer, low, high in reversed(self._numbered) if low <= number < high), OUTSIDE)


class _Phase:
    """An open phase of a recorder."""

    def __init__(self, name: str, recorder: Recorder) -> None:
        self._name, self._recorder = name, recorder
        self._label = torch.profiler.record_function(f"pyg_dist: {name}")

    def __enter__(self) -> None:
        self._layer = self._recorder.layer
        self._label.__enter__()
        self._recorder._open.append([])
        self._begin = self._recorder.clock.now()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder, end = self._recorder, self._recorder.clock.now()
        inner = recorder._open.pop()
        recorder._open[-1].append((self._begin, end))
        recorder._stretches.append(_Stretch(PHASES.index(self._name), self._layer, self._begin, end, inner))
        self._label.__exit__(kind, error, trace)


_recorder: Recorder | None = None
_NOTHING: AbstractContextManager[None] = nullcontext()


def record(recorder: Recorder | None) -> None:
    """Make ``recorder`` the one that phases report to; None ends it."""
    global _recorder
    _recorder = recorder


def is_recording() -> bool:
    """Whether a recorder is active."""
    return _recorder is not None


def add_to(what: Literal["sent_bytes", "id_bytes", "hidden_seconds"], number: float) -> None:
    """Add to what the recorder counts; from any thread."""
    if _recorder is not None:
        setattr(_recorder, what, getattr(_recorder, what) + number)


def phase(name: str) -> AbstractContextManager[None]:
    """Context of the phase ``name``, one of ``PHASES``."""
    if _recorder is not None:
        is_in_backward = torch._C._current_graph_task_id() != -1  # on a device in another thread, which is waited for
        if is_in_backward or _recorder.thread == threading.get_ident():
            return _Phase(name, _recorder)
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"pyg_dist: {name}")
    return _NOTHING


def overlaps() -> bool:
    """Whether messages may be in flight while something else is done."""
    return _recorder is None or _recorder.overlaps
