"""A thread that makes the next step's batch while this one trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import torch

from pyg_dist.backend import timing
from pyg_dist.backend.on_device import Made, SideStream, taken
from pyg_dist.backend.session.state import current

P = TypeVar("P")
T = TypeVar("T")


class _Begun(NamedTuple, Generic[P, T]):
    step: int
    device: torch.device
    prepared: P
    future: Future[Made[T]]


class Prefetcher(Generic[P, T]):
    """Makes the item of a step, in advance if possible, by a thread that lasts until :meth:`close`.

    The thread ends with the session, too, and with the last reference to the prefetcher. Items are not kept here once
    they have been taken. Collective only if ``prepare`` is.

    Args:
        prepare: makes what the item of a step needs, on the thread that calls :meth:`begin` or :meth:`take`.
        make: makes the item of a step from that. It sends nothing and draws from no generator; what it raises reaches
            :meth:`take`.
        device: where items made from now on lie, asked each time; on a GPU the thread has a stream of its own.
    """

    def __init__(
        self,
        prepare: Callable[[int], P],
        make: Callable[[int, P], T],
        device: Callable[[], torch.device] = lambda: torch.device("cpu"),
    ) -> None:
        self._prepare, self._make, self._device = prepare, make, device
        self._stream = SideStream(device())
        self._thread: ThreadPoolExecutor | None = None
        self._next: _Begun[P, T] | None = None

    def begin(self, step: int) -> None:
        """Have the thread make the item of a step; one that was not taken is dropped."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pyg_dist sampling")
            current().close_at_end(self)
        device = self._device()
        if device != self._stream.device:
            self._stream = SideStream(device)
        self._stream.follow()
        with timing.phase("sampling"):
            prepared = self._prepare(step)
        # Not self, which would be a cycle: the thread ends with the last reference to this.
        future = self._thread.submit(_timed, self._stream, partial(self._make, step, prepared))
        self._next = _Begun(step, device, prepared, future)

    def take(self, step: int) -> T:
        """The item of a step: the one that was begun, waited for, or else made now, as where the device is another."""
        begun, self._next = self._next, None
        with timing.phase("sampling"):
            if begun is None or begun.step != step:
                return self._make(step, self._prepare(step))
            if begun.device != self._device():
                return self._make(step, begun.prepared)
            return taken(begun.future.result())

    def close(self) -> None:
        """End the thread once it has made what it is making."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)


def _timed(stream: SideStream, make: Callable[[], T]) -> Made[T]:
    begin = time.perf_counter()
    try:
        return stream.make(make)
    finally:
        timing.count_hidden(time.perf_counter() - begin)
