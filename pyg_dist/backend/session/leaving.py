"""One way out: how a process of a run ends, whichever way it comes to its end.

A rank that has failed ends by :func:`leave`: what it has written is flushed, and the process ends at once. Python's own
finalization is not for it: threads of process groups would need Python while it goes (an abort), and destructors would
wait for ranks that have stopped. A good end is orderly: the session is closed first. Both have a time limit.

:class:`WayOut` is called when the script ends, well or with an exception, and the other ranks hear of it. Before
``init`` they would wait for this rank until their timeout, under mpirun for ever, so it meets them all the same and
leaves word (:mod:`~pyg_dist.backend.session.failure`). Under mpirun a rank that fails early ends the run at once: its
launcher notices a signal, but no status. Without a launcher rank 0 holds the store, and who comes later than ten
seconds finds nobody.

:func:`stop_requested` is for scripts that end well when they are asked to.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from types import FrameType, TracebackType
from typing import NoReturn

import torch.distributed as dist

from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.session import failure, launch, rendezvous, state
from pyg_dist.backend.session.agreement import Control, one_line
from pyg_dist.backend.session.failure import FailureWatch, flush, report
from pyg_dist.backend.session.mpi_store import MpiStore
from pyg_dist.errors import LaunchError

logger = logging.getLogger("pyg_dist")

_LEAVE_SECONDS = 10.0  # for a rank that has failed, whatever handlers and threads there are
_ABORT_SECONDS = 1.0  # before MPI's abort, which would cut short the rank that has failed and ends by itself
_END_SECONDS = 30.0  # for a good end
_MEET_SECONDS = 10.0  # how long a rank that has nothing more to do waits for the others, before `init`

_PROCESS = "_PYG_DIST_PROCESS"  # the variable by which processes know that a rank has started them

_STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)]
_ONCE_SECONDS = 2.0  # signals that follow one so soon are the same request: Ctrl-C comes from torchrun, too
_AGENT_SECONDS = 1.0  # for an agent of torchrun to ask as well: it looks every 0.1 s for machines that join

_leaving = threading.Lock()


def leave() -> NoReturn:
    """End this process with status 1: handlers of ``atexit`` if the main thread calls, flush, and no finalization."""
    _end_later(_LEAVE_SECONDS)
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # another thread ends the process
    if threading.current_thread() is threading.main_thread() and not way_out.is_at_exit:
        way_out.is_at_exit = True
        atexit._run_exitfuncs()
    flush()
    if threading.current_thread() is not threading.main_thread() and rendezvous.running_mpi() is not None:
        time.sleep(_ABORT_SECONDS)
    _end()


def _end() -> NoReturn:
    mpi = rendezvous.running_mpi()
    if mpi is not None:
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)


def _end_later(seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, _end)
    timer.name, timer.daemon = "pyg_dist deadline", True
    with contextlib.suppress(RuntimeError):  # Python ends, and starts no more threads
        timer.start()
    return timer


class WayOut:
    """The hooks on this process's end. Not collective.

    Attributes:
        is_at_exit: whether handlers of ``atexit`` run, or have run.
        stop: the request by which the ranks have stopped.
    """

    def __init__(self) -> None:
        self.is_at_exit = False
        self.stop: StopRequest | None = None
        self._early: launch.Launch | None = None
        self._process = 0
        self._innermost = self._previous = sys.excepthook
        self._of_threads = threading.excepthook
        self._is_shown = False

    def watch_start(self) -> None:
        """Watch this process before ``init``, if it is one of several ranks. The import of pyg_dist calls it."""
        if multiprocessing.parent_process() is not None or self._early is not None:
            return
        try:
            found = launch.detect(os.environ)
        except LaunchError:  # init raises it
            return
        # What a rank starts inherits the variables of its launcher, and may end as it likes.
        if found.world_size > 1 and os.environ.setdefault(_PROCESS, str(os.getpid())) == str(os.getpid()):
            self._early = found
            self._hook()

    def watch_run(self) -> None:
        """Watch it from here on: the ranks have met. To be called again when torch has set its hook, which ours is
        to be around: torch's holds back what is printed in it.
        """
        self._early = None
        self._hook()

    def _hook(self) -> None:
        if self._process != os.getpid():
            self._process = os.getpid()
            atexit.register(self._on_exit)
            threading.excepthook = self._on_thread_exception
        if sys.excepthook != self._on_exception:
            self._previous, sys.excepthook = sys.excepthook, self._on_exception

    def _on_exception(self, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        if self._is_shown:  # within torch's hook, which calls the one that was there before it
            self._innermost(kind, error, traceback)
            return
        self._is_shown = True

        def show() -> None:
            self._previous(kind, error, traceback)
            sys.stderr.flush()

        watch = state.current().find(FailureWatch)
        # A forked child inherits the hook but does not speak for the rank; Ctrl-C reaches every rank by itself.
        is_own, is_failure = os.getpid() == self._process, issubclass(kind, Exception)
        if is_own and watch is not None and is_failure:
            _end_later(_LEAVE_SECONDS)
            watch.on_exception(error, show)
            leave()
        if is_own and watch is not None and issubclass(kind, KeyboardInterrupt):
            report(f"interrupted; ending {watch.name}")
            return
        show()
        early, self._early = self._early, None if not is_failure else self._early
        if early is not None and early.launcher != "mpi" and isinstance(error, LaunchError):
            early = self._early = None  # it has not met the others, and would not now
        if is_own and is_failure and early is not None and not state.is_group_open():
            self._leave_word(early, f"rank {early.rank} failed: {one_line(error)}", has_failed=True)

    def _on_thread_exception(self, args: threading.ExceptHookArgs) -> None:
        """A thread of the package's that dies ends the run; others do as in any program."""
        self._of_threads(args)
        watch = state.current().find(FailureWatch)
        is_ours = args.thread is not None and args.thread.name.startswith("pyg_dist")
        if is_ours and watch is not None and args.exc_value is not None and os.getpid() == self._process:
            watch.fail(f"rank {watch.rank} failed: {one_line(args.exc_value)}")

    def _on_exit(self) -> None:
        if os.getpid() != self._process or self.is_at_exit:
            return
        self.is_at_exit = True
        if self._early is None:
            is_left = self.stop is not None and self.stop.is_for_other_machines()
            self._end_run()
            if is_left:
                report("another machine was asked to stop; this rank ends with status 1, so that torchrun restarts it")
                leave()
        elif not state.is_group_open():  # else it has met them in another way
            self._leave_word(self._early, f"rank {self._early.rank} has ended before pyg_dist.init()")
        store = state.current().meeting.store
        if isinstance(store, MpiStore):
            store.close()

    def _end_run(self) -> None:
        deadline = _end_later(_END_SECONDS)
        try:
            state.end()
        except Exception as error:  # as of a device; Python would print it and end well
            report(f"failed at the end: {one_line(error)}")
            leave()
        if state.is_group_open():  # the script's own
            dist.destroy_process_group()
        deadline.cancel()

    def _leave_word(self, found: launch.Launch, message: str, has_failed: bool = False) -> None:
        self._early = None
        if has_failed and found.launcher == "mpi":
            report(f"{message}; ending the run")
            if rendezvous.running_mpi() is not None:
                leave()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        with contextlib.suppress(Exception):  # nobody is there, or this launcher's ranks cannot meet
            meeting = state.current().meeting
            meeting.store = rendezvous.meet(found, timedelta(seconds=_MEET_SECONDS))
            store = rendezvous.watched(rendezvous.of_generation(meeting.store, 0))
            failure.leave_word(store, found.rank, found.world_size, message, _MEET_SECONDS)


way_out = WayOut()


class StopRequest:
    """Notes the signals that ask to stop, while the session lives.

    Attributes:
        number: of the first signal, or 0.
        is_told: whether the run has heard of one.
    """

    def __init__(self) -> None:
        self.number, self.is_told = 0, False
        self._may_go_on = False
        self._time = 0.0
        is_main = threading.current_thread() is threading.main_thread()  # no other thread may
        self._before = {n: signal.signal(n, self._note) for n in _STOP_SIGNALS} if is_main else {}

    def tell(self, group: Group, numbers: Sequence[int]) -> None:
        """Note the signals that the ranks have got (collective)."""
        self.is_told, way_out.stop = True, self
        agents = group.gather_counts(int(os.environ.get("GROUP_RANK") or 0))
        asked = [rank for rank, number in enumerate(numbers) if number]
        is_by_agent = not any(numbers[rank] == getattr(signal, "SIGUSR1", -1) for rank in asked)
        is_restarted = launch.num_restarts(os.environ) > 0 and state.current().launcher == "torchrun"
        self._may_go_on = is_by_agent and is_restarted and agents[group.rank] not in {agents[rank] for rank in asked}
        if group.rank == 0:
            logger.warning("rank %d got %s: the ranks stop", asked[0], signal.Signals(numbers[asked[0]]).name)

    def is_for_other_machines(self) -> bool:
        """Whether torchrun is to go on here: its agents of other machines alone have asked, within another second.

        An agent that was asked to end asks its ranks, and so does each of them when a machine joins, some a little
        later than the first. By status 0 an agent would take the run to have come to its end.
        """
        end = time.monotonic() + _AGENT_SECONDS
        while self._may_go_on and not self.number and time.monotonic() < end:
            time.sleep(0.02)
        return self._may_go_on and not self.number

    def close(self) -> None:
        """Let signals do again what they did before."""
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler or signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.number:
            self.number, self._time = number, time.monotonic()
        elif time.monotonic() > self._time + _ONCE_SECONDS:
            self.close()
            os.kill(os.getpid(), number)


def stop_requested() -> bool:
    """Return whether a rank has been asked to stop: the same answer on every rank. Collective, one small all-reduce.

    From its first call on, a rank that gets SIGTERM, SIGUSR1 (Slurm's ``--signal``) or Ctrl-C goes on. The next call
    returns True on all ranks, so that they save and end at the same step. A second signal does what it did before.
    Where torchrun restarts ranks (``--max-restarts``) and SIGTERM or Ctrl-C concerns one machine of several, the ranks
    of the others end with status 1, by which torchrun goes on with these machines.

    Example:
        >>> for epoch in range(10):
        ...     if pyg_dist.stop_requested():
        ...         break
    """
    session = state.current()
    request = session.of(StopRequest)
    group = session.of(Control).group
    numbers = group.gather_counts(request.number)
    if any(numbers) and not request.is_told:
        request.tell(group, numbers)
    return any(numbers)
