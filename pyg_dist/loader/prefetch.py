"""One thread that makes what the next step needs while this one trains."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from pyg_dist.backend import timing
from pyg_dist.backend.session import session

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Makes the item of a step, or has it made before it is asked for, by a thread that lasts until :meth:`close`.

    The thread ends with the session, too, and with the last reference to the prefetcher. Items are not kept here once
    they have been taken. Not collective.

    Args:
        make: makes the item of a step. It sends nothing and draws from no generator; what it raises reaches
            :meth:`take`.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._thread: ThreadPoolExecutor | None = None
        self._next: tuple[int, Future[T]] | None = None

    def begin(self, step: int) -> None:
        """Have the thread make the item of a step; one that nobody has taken is dropped."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pyg_dist sampling")
            session.close_at_shutdown(self)
        self._next = step, self._thread.submit(_timed, self._make, step)

    def take(self, step: int) -> T:
        """The item of a step: the one that was begun, waited for, or else made now."""
        begun, self._next = self._next, None
        with timing.phase("sampling"):
            return self._make(step) if begun is None or begun[0] != step else begun[1].result()

    def close(self) -> None:
        """End the thread once it has made what it is making."""
        thread, self._thread, self._next = self._thread, None, None
        if thread is not None:
            thread.shutdown(cancel_futures=True)


def _timed(make: Callable[[int], T], step: int) -> T:
    begin = time.perf_counter()
    try:
        return make(step)
    finally:
        timing.count_hidden(time.perf_counter() - begin)
