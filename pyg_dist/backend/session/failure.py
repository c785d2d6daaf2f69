"""A rank that fails makes every rank fail, with its message.

A rank that raises would leave the others waiting in a collective until its timeout. So each rank has a thread asleep on
its own key of the rendezvous store, its inbox. A rank that fails writes "rank r failed: Type: message" to every inbox;
the threads print that line and end their processes (:mod:`~pyg_dist.backend.session.leaving`), because the main thread
may sit in a C++ wait. A rank that ends well still listens until all have ended, ten seconds at most: if the others come
to a call that it does not make, it has failed with them.

* the store may live in rank 0's process: rank 0 leaves last, after waiting (a few seconds at most) until all have read;
* a rank that ends well wakes its own thread and waits for it: a daemon thread in a C++ wait can crash an interpreter;
* only the first failure is spread. Later ones are usually its consequences, such as closed connections. A mistake that
  all ranks make is shown once: a rank waits a second or two for rank 0 to come upon it, and leaves the traceback to it.

A rank that is killed leaves no message: its closed connections raise in its partners, which then spread the word. What
the transport says of that names no rank, and whoever is first to notice would get the blame, so it is said in words of
ours (:mod:`~pyg_dist.backend.comm.connection`). If rank 0 is killed and holds the store, nothing can be spread: each
rank finds the store gone and says so in the same words.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from pyg_dist.backend.comm.connection import is_lost, loss_of
from pyg_dist.backend.session.agreement import LONGEST_WAIT, one_line
from pyg_dist.backend.session.rendezvous import STORE_ERRORS, has_agent_store, own_connection
from pyg_dist.errors import ConnectionLostError, DivergenceError

logger = logging.getLogger("pyg_dist")

_READ_SECONDS = 3.0  # for all to read a message: far beyond a round trip through the store
_LEAVE_SECONDS = 10.0  # for another thread to end this process
_END_SECONDS = 10.0  # in which most ranks that still train come to a call that this one, which has ended, does not make
_NEWS_SECONDS = 0.5  # from the first rank that leaves with a message to the last that reads it
_SAME_SECONDS = 1.5  # for rank 0 to find the mistake that another rank has found, too: then one traceback is enough
_SOON_SECONDS = 0.3  # likewise, where it is no mistake but a lost connection, or known of another rank already
_HOST_SECONDS = 0.3  # the others' stores print stacks when the host goes while they hear that all have read


def leave_word(store: dist.Store, rank: int, world_size: int, message: str, seconds: float) -> None:
    """Tell the other ranks why this one, which has no watch, is about to end. Not collective.

    Rank 0, which may hold the store, waits for so many seconds for the others to read it, or to end as well.
    """
    if store.add("num_failures", 1) == 1:
        _write_to_all(store, world_size, message)
    store.set(f"read/{rank}", "")
    if rank == 0:
        store.wait([f"read/{other}" for other in range(world_size)], timedelta(seconds=seconds))
        time.sleep(_HOST_SECONDS)


def _write_to_all(store: dist.Store, world_size: int, message: str) -> None:
    inboxes = [f"inbox/{rank}" for rank in range(world_size)]
    store.multi_set(inboxes, [message] * world_size)  # type: ignore[attr-defined]  # not in the stub


class FailureWatch:
    """Spreads this rank's failure to the others and listens for theirs.

    It uses the store alone below its prefix. ``leave`` ends this process at once; ``before_store_goes`` is called when
    rank 0, which may hold the store, is about to end.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        leave: Callable[[], NoReturn],
        before_store_goes: Callable[[], None],
    ) -> None:
        self.rank, self.name = rank, f"rank {rank} of {world_size}"
        self._store, self._world_size = store, world_size
        self._leave, self._before_store_goes = leave, before_store_goes
        self._is_ending = False
        # Held while talking to the store at the end: rank 0 is not to go while this rank still needs its store.
        self._ending = threading.Lock()
        self._has_failed = False  # this rank, or another one of which it has heard
        self._main_leaves = False  # the main thread waits for the listening one, and then leaves
        self._own_line = ""  # of an error that is no consequence of another rank's
        self._showing = threading.Lock()  # taken by the thread that shows the error, and kept
        self._losing = threading.Lock()  # taken by the thread that says that the store is gone, and kept
        self._has_heard = threading.Event()
        own_store = own_connection(store)
        self._thread = threading.Thread(target=self._listen, args=(own_store,), name="pyg_dist failures", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End together with the other ranks: this one still hears of a failure that comes while it waits for them.

        It waits for late ranks for ten seconds. Rank 0, whose store they may need, tells them before it goes.
        """
        if self._has_failed:
            return
        self._main_leaves = True
        try:
            if self._store.add("num_ended", 1) == self._world_size:
                _write_to_all(self._store, self._world_size, "end")
            self._thread.join(_END_SECONDS)
            with self._ending:
                if self._thread.is_alive() and not self._has_heard.is_set():
                    self._is_ending = True
                    self._store.set(f"inbox/{self.rank}", "end")
                    self._store.set(f"read/{self.rank}", "")
                    if self.rank == 0:
                        _write_to_all(self._store, self._world_size, "host ends")
                        self._wait_until_read(self._store)
        except STORE_ERRORS:  # the store's process was killed at this very moment: no rank is left to inform
            pass
        self._thread.join(_LEAVE_SECONDS if self._has_heard.is_set() else _READ_SECONDS)
        if self._has_failed:
            self._leave()
        if self.rank == 0:
            time.sleep(_HOST_SECONDS)

    def fail(self, message: str, store_answers: bool = True) -> None:
        """End every rank with a message. For another thread than the main one, which may sit in a C++ wait."""
        if self._is_ending:
            return
        self._has_failed = True
        if not store_answers:
            report(f"{message}; ending {self.name}")
            self._leave()
        try:
            self._spread(message, shows=True)
        except STORE_ERRORS:
            report(f"{message}; ending {self.name}, which cannot reach the others")
        self._leave()

    def listen_first(self) -> None:
        """Give the main thread, which has lost a connection, time to hear why; if it hears, its process ends here."""
        if self._has_heard.wait(_NEWS_SECONDS):
            self._thread.join(_LEAVE_SECONDS)
            self._leave()

    def is_gone(self, rank: int) -> None:
        """Keep nobody waiting for a rank, which has been killed, to read a message."""
        with contextlib.suppress(*STORE_ERRORS):
            self._store.set(f"read/{rank}", "")

    def on_exception(self, error: BaseException, show: Callable[[], object]) -> None:
        """Tell the others of the exception that has ended this rank's script; ``show`` prints its traceback."""
        if self._is_ending:
            show()
            return
        self._has_failed = self._main_leaves = True
        if not (isinstance(error, (ConnectionLostError, DivergenceError)) or is_lost(error)):
            self._own_line = one_line(error)
        _tell_torchrun(one_line(error))
        try:
            told = self._told_by_rank_0()
        except STORE_ERRORS:
            self._report_lost_store()
            if self._own_line and not isinstance(error, dist.DistError):
                show()
            return
        if told is not None:
            self._show_own_unless(told)
        elif self._showing.acquire(blocking=False):
            show()
        try:
            self._spread(_what_happened(self.rank, error))
        except STORE_ERRORS:
            self._report_lost_store()

    def _spread(self, message: str, shows: bool = False) -> None:
        """Write to all inboxes, unless another rank has; ``shows``: print it here, too."""
        if self._store.add("num_failures", 1) > 1:
            self._thread.join(_LEAVE_SECONDS)  # prints the first failure's line
            return
        self._is_ending = True
        if shows:
            self._has_heard.set()
            report(f"{message}; ending {self.name}")
        _write_to_all(self._store, self._world_size, message)
        self._acknowledge(self._store)
        self._wait_until_read(self._store)
        if self.rank == 0:
            time.sleep(_HOST_SECONDS)

    def _show_own_unless(self, told: str) -> None:
        """Show this rank's error, if there is one, unless ``told`` says the same or it has been shown."""
        if self._own_line and self._showing.acquire(blocking=False) and not told.endswith(self._own_line):
            report(f"rank {self.rank} failed: {self._own_line}")

    def _told_by_rank_0(self) -> str | None:
        """The line of the error that rank 0 has come upon as well; ``None``: it has not, or this is rank 0."""
        if self.rank == 0:
            self._store.set("error of rank 0", self._own_line)
            return None
        end = time.monotonic() + (_SAME_SECONDS if self._own_line else _SOON_SECONDS)
        while not self._store.check(["error of rank 0"]):  # a wait that runs out makes torch log warnings
            if time.monotonic() > end:
                return None
            time.sleep(0.02)
        return self._store.get("error of rank 0").decode()

    def _listen(self, store: dist.Store) -> None:
        try:
            store.wait([f"inbox/{self.rank}"], LONGEST_WAIT)
        except STORE_ERRORS:
            if not self._is_ending:
                self._report_lost_store()
                self._has_failed = True
                self._has_heard.set()
                time.sleep(1.0)  # the main thread may be about to show a mistake of its own
                self._leave()
            return
        if self._is_ending:
            return
        try:
            message = store.get(f"inbox/{self.rank}").decode()
        except STORE_ERRORS:  # rank 0 waits for readers of a failure, but goes when its own work is done
            message = "host ends"
        if message == "end":
            return
        if message == "host ends":
            with self._ending:
                self._before_store_goes()
                self._is_ending = True
                self._acknowledge(store)
            return
        self._has_failed = True
        self._has_heard.set()
        _tell_torchrun(message)
        end = time.monotonic() + _SOON_SECONDS
        while not self._own_line and time.monotonic() < end:
            time.sleep(0.02)
        if not (self._own_line and message.endswith(f" failed: {self._own_line}")):
            report(f"{message}; ending {self.name}")
            self._show_own_unless(message)
        self._acknowledge(store)
        # Rank 0 may hold the store, and the first rank to end makes launchers kill the others, before they printed.
        self._wait_until_read(store)
        if self.rank == 0:
            time.sleep(_HOST_SECONDS)
        if not self._main_leaves:
            self._leave()

    def _report_lost_store(self) -> None:
        """Say that the store is gone, and so who holds it, unless the other thread has."""
        if self._losing.acquire(blocking=False):
            agent = f"rank {self.rank} lost its connection to torchrun's agent, which holds the store"
            report(f"{agent if has_agent_store() else loss_of(self.rank, 0)}; ending {self.name}")

    def _acknowledge(self, store: dist.Store) -> None:
        flush()  # under mpirun the first rank that leaves ends all
        with contextlib.suppress(*STORE_ERRORS):
            store.set(f"read/{self.rank}", "")

    def _wait_until_read(self, store: dist.Store) -> None:
        with contextlib.suppress(*STORE_ERRORS):  # a rank is gone or busy: the others are not kept for it
            store.wait([f"read/{rank}" for rank in range(self._world_size)], timedelta(seconds=_READ_SECONDS))


def _what_happened(rank: int, error: BaseException) -> str:
    if isinstance(error, (ConnectionLostError, DivergenceError)):
        return error.message
    return loss_of(rank, None) if is_lost(error) else f"rank {rank} failed: {one_line(error)}"


def _tell_torchrun(message: str) -> None:
    """Leave the message where torchrun's summary of the run finds it; the first one stays."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path and not os.path.exists(path):
        with contextlib.suppress(OSError), open(path, "w") as file:
            json.dump({"message": message, "timestamp": int(time.time())}, file)


def report(line: str) -> None:
    """Write ``line`` to stderr, where launchers collect it, and to the log if the script has one."""
    if logger.hasHandlers():
        logger.critical(line)
    sys.stderr.write(f"pyg_dist: {line}\n")
    sys.stderr.flush()


def flush() -> None:
    """Write out what this process has printed and logged."""
    for write_out in (sys.stdout.flush, sys.stderr.flush, logging.shutdown):
        with contextlib.suppress(Exception):  # a closed file, a handler of the script's
            write_out()
