"""Things of one run that cannot be pickled: who asks for it hears so, in whichever process it waits."""

from __future__ import annotations

import multiprocessing.queues
import sys
from types import FrameType
from typing import Any, NoReturn

from pyg_dist.errors import MixedRowsError, PygDistError


class OfThisRun:
    """Base of what cannot be pickled, since it has connections to other ranks or rows on them."""

    def __reduce_ex__(self, protocol: object) -> Any:
        return refuse(
            MixedRowsError(
                f"A {type(self).__name__} cannot be pickled or sent to another process: it belongs to this run; save "
                f"the input graph, and load with num_workers=0"
            )
        )


def refuse(error: PygDistError) -> object:
    """Raise ``error`` instead of a pickle, or what raises it where the pickle is read; for ``__reduce_ex__``.

    The thread of a queue between processes prints what is raised here and goes on, and who reads the queue would wait
    for ever: a loader whose worker sends a batch.
    """
    frame: FrameType | None = sys._getframe(1)
    of_queue = vars(multiprocessing.queues.Queue)
    while frame is not None:
        if frame.f_code is of_queue["_feed"].__func__.__code__:
            if frame.f_locals.get("onerror") is of_queue["_on_queue_feeder_error"].__func__:
                return _raise, (error,)
            break  # concurrent.futures has a handler of its own
        frame = frame.f_back
    raise error


def _raise(error: PygDistError) -> NoReturn:
    try:
        raise error
    finally:
        del error  # a variable of the traceback's frame would keep the loader, and its workers, until gc runs
