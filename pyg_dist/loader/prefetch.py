"""A thread that makes the next step's batch while this one trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Generic, TypeVar

import torch
from typing_extensions import NamedTuple

from pyg_dist.backend import timing
from pyg_dist.backend.on_device import Made, SideStream, taken
from pyg_dist.backend.session.agreement import Control
from pyg_dist.backend.session.state import current

T = TypeVar("T")


class _Begun(NamedTuple, Generic[T]):
    step: int
    device: torch.device
    future: Future[Made[T]]


class _Work:
    """Counts the tasks that the thread has not finished."""

    def __init__(self) -> None:
        self._left, self._changed = 0, threading.Condition()
        self.error: BaseException | None = None  # of a task that was done ahead

    def add(self, number: int) -> None:
        with self._changed:
            self._left += number
            self._changed.notify_all()

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._left == 0)

    def check(self) -> None:
        """Raise the error of a task that was done ahead: other ranks may have gone on, so it is not tried again."""
        if self.error is not None:
            raise self.error

    close = wait  # at the end of the session, which takes the connections away


class Prefetcher(Generic[T]):
    """Makes the item of a step, in advance if possible, by a thread that lasts until :meth:`stop`.

    The thread also ends with the session, and with the last reference to the prefetcher. Collective if ``make`` is.

    Args:
        make: makes the item of a step, without torch's generators; :meth:`take` raises its errors.
        device: gives the device of the next item; on a GPU the thread has a stream of its own.
        sends: whether ``make`` sends messages, over a group that nothing else uses. Then one item is made at a time,
            each that is begun is made, and the main thread notes for which it waits.
        ahead: called by the thread with the next step after an item is made; the next :meth:`take` raises its errors.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        device: Callable[[], torch.device] = lambda: torch.device("cpu"),
        sends: bool = False,
        ahead: Callable[[int], object] | None = None,
    ) -> None:
        self._make, self._device, self._sends, self._ahead = make, device, sends, ahead
        self._stream = SideStream(device())
        self._thread: ThreadPoolExecutor | None = None
        self._next: _Begun[T] | None = None
        self._work = _Work()

    def begin(self, step: int) -> None:
        """Have the thread make the item of a step; an item that was not taken is dropped."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pyg_dist sampling")
            current().close_at_end(self)
            current().close_at_end(self._work)
        device = self._device()
        if device != self._stream.device:
            self._stream = SideStream(device)
        self._stream.follow()
        # Not self, which would be a cycle: the thread ends with the last reference to this.
        self._work.add(1 if self._ahead is None else 2)
        future = self._thread.submit(_timed, self._stream, partial(self._make, step), self._work)
        if self._ahead is not None:
            self._thread.submit(_timed, self._stream, partial(self._ahead, step + 1), self._work, True)
        self._next = _Begun(step, device, future)

    def take(self, step: int) -> T:
        """The item of a step; it is made now unless it was begun, for the present device."""
        begun, self._next = self._next, None
        if begun is None or (begun.step, begun.device) != (step, self._device()):
            return self.alone(partial(self._make, step))
        with timing.phase("sampling"), self._called():
            return taken(begun.future.result())

    def alone(self, make: Callable[[], T]) -> T:
        """Call ``make`` once the thread has nothing to do."""
        with timing.phase("sampling"), self._called():
            self._work.wait()
            self._work.check()
            return make()

    def close(self) -> None:
        """:meth:`stop`, and wait."""
        self.stop(waits=True)

    def stop(self, waits: bool = False) -> None:
        """End the thread after its present task; ``waits``: wait for that."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(wait=waits)

    def _called(self) -> AbstractContextManager[None]:
        """Context that notes a call, so that ranks which take different items are found like those with other calls."""
        if not self._sends:
            return nullcontext()
        _, _, call = current().of(Control).group.begin("mini-batch", torch.empty(0, device="cpu"), 0)
        return call


def _timed(stream: SideStream, make: Callable[[], T], work: _Work, is_ahead: bool = False) -> Made[T]:
    begin = time.perf_counter()
    try:
        work.check()
        return stream.make(make)
    except BaseException as error:
        work.error = error if is_ahead else work.error
        raise
    finally:
        timing.add_to("hidden_seconds", time.perf_counter() - begin)
        work.add(-1)
