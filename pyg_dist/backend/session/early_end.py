"""A rank that fails or ends before ``init``: it meets the others all the same, leaves word for them, and goes.

The others would wait for it until their timeout, under mpirun for ever. So the import of pyg_dist takes note of how the
process ends. The store where ranks meet has an inbox for each (:mod:`~pyg_dist.backend.session.failure`), which each
reads as soon as it is there. Under mpirun a rank that fails ends the run at once, as ``MPI_Abort`` does: its launcher
notices a signal, but no status. Without a launcher rank 0 holds the store, and who comes later than ten seconds
finds nobody.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
from types import TracebackType

from pyg_dist.backend.session import launch
from pyg_dist.errors import LaunchError

# How long a rank that has nothing more to do waits for the others.
_MEET_SECONDS = 10.0


_PROCESS = "_PYG_DIST_PROCESS"
"""The variable by which processes know that a rank has started them."""


class EarlyEnd:
    """Watches the end of this process until it has met the other ranks.

    Args:
        found: this rank's place.
    """

    def __init__(self, found: launch.Launch) -> None:
        """Chain into ``sys.excepthook`` and ``atexit``. Not collective."""
        self._found = found
        self._process = os.getpid()
        self._previous_hook = sys.excepthook
        self._is_on = True
        sys.excepthook = self._on_exception
        atexit.register(self._on_exit)

    def end(self) -> None:
        """The ranks have met, or need not: others watch from here on. Not collective."""
        self._is_on = False
        atexit.unregister(self._on_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        self._previous_hook(kind, error, traceback)
        if not issubclass(kind, Exception):  # Ctrl-C reaches every rank by itself
            self._is_on = False
        elif self._is_own():
            from pyg_dist.backend.session.agreement import one_line

            self._leave_word(f"rank {self._found.rank} failed: {one_line(error)}", has_failed=True)

    def _on_exit(self) -> None:
        if self._is_own():
            self._leave_word(f"rank {self._found.rank} has ended before pyg_dist.init()", has_failed=False)

    def _is_own(self) -> bool:
        """Whether the others may wait for this process: no child of it, nor one that has met them in another way."""
        from pyg_dist.backend.session import world

        return self._is_on and os.getpid() == self._process and not world.is_group_open()

    def _leave_word(self, message: str, has_failed: bool) -> None:
        from pyg_dist.backend.session import failure, rendezvous

        self._is_on = False
        place = self._found.rank, self._found.world_size
        if has_failed and self._found.launcher == "mpi":
            failure.report(f"{message}; ending the run")
            mpi = rendezvous.running_mpi()
            if mpi is not None:
                mpi.COMM_WORLD.Abort(1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(Exception):  # nobody is there, or this launcher's ranks cannot meet
            failure.leave_word(rendezvous.meet_early(self._found, _MEET_SECONDS), *place, message, _MEET_SECONDS)


_early: list[EarlyEnd] = []


def watch() -> None:
    """Watch the end of this process if it is one of several ranks. The import of pyg_dist calls it. Not collective."""
    if multiprocessing.parent_process() is not None or _early:
        return
    try:
        found = launch.detect(os.environ)
    except LaunchError:  # init raises it
        return
    # What a rank starts inherits the variables of its launcher, and may end as it likes.
    if found.world_size > 1 and os.environ.setdefault(_PROCESS, str(os.getpid())) == str(os.getpid()):
        _early.append(EarlyEnd(found))


def end() -> None:
    """See :meth:`EarlyEnd.end`."""
    while _early:
        _early.pop().end()
