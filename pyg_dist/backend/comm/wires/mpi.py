"""Messages of CPU tensors by MPI, through mpi4py: ranks of one machine share memory, and others their fast network.

Tensors travel as bytes, so all dtypes do. MPI's own waits spin, which takes the processor from ranks that compute
where ranks share cores; these test some times, then sleep between tests, at once where ranks outnumber the cores.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from torch import Tensor

from pyg_dist.backend.comm.checks.calls import Standing, line_in_words, message_tag
from pyg_dist.backend.comm.wires.point_to_point import PointToPoint
from pyg_dist.backend.comm.wires.wire import Message
from pyg_dist.backend.session import rendezvous
from pyg_dist.backend.session.settings import MPI_PROGRESS
from pyg_dist.backend.session.state import current
from pyg_dist.errors import ConnectionLostError, describe_ranks

logger = logging.getLogger("pyg_dist")

# Tests of a request before the first sleep, which takes 60 us and more: about as long as another rank is late. With a
# quarter of them an all-to-all of 4 KiB took 25 to 58 us, not 11, and sums twice as long; on two busy cores both are
# the same. A yield instead would cost a time slice of whatever else runs: there sums of 64 bytes took 1,181 us with it.
_SPINS = 400
# Further tests while a large message of so many bytes is copied, up to so many: a sleep takes 60 us and more.
_BYTES_A_SPIN, _MOST_BYTES_SPUN = 1 << 11, 1 << 22
_SLEEP_SECONDS, _LONGER, _LONGEST = 1e-5, 1.25, 5e-4

# A larger message waits, in MPI libraries, for its receiver, and so for calls of MPI on both ranks.
_EAGER_BYTES = 1 << 13
_PROGRESS_SECONDS = 1e-3

_MOST_BYTES = 1 << 30
"""Of a message that is counted in bytes."""

# A process of one rank: with what a launcher says, it would wait for the others.
_LAUNCHERS = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "MPI_", "HYDI_", "HYDRA_")
_QUESTION = """
from mpi4py import MPI
levels = {getattr(MPI, f"THREAD_{name}"): name for name in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
name = MPI.Get_library_version().splitlines()[0].strip(chr(0)).split()
print(*name, f"MPI_THREAD_{levels[MPI.Query_thread()]}")
"""

# Requests that were never waited for, as after an error, with the memory that MPI may still write to.
_abandoned: deque[object] = deque()


def is_there(rank: int, world_size: int) -> bool:
    """Whether mpi4py sees the launcher's ranks (it starts MPI; collective in some libraries)."""
    try:
        MPI = rendezvous.start_mpi()
    except (ImportError, RuntimeError):  # mpi4py raises RuntimeError where it finds no MPI library
        return False
    return (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()) == (rank, world_size)


def library() -> tuple[str, str] | None:
    """The MPI library that mpi4py finds, and its thread level, as another process has them. Not collective."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}
    command = [sys.executable, "-c", _QUESTION]
    try:
        told = subprocess.run(command, env=environ, capture_output=True, text=True, check=True, timeout=30).stdout
    except subprocess.SubprocessError:  # no mpi4py, no library, or one that starts by its launcher alone
        return None
    name, _, level = told.strip().rpartition(" ")
    return name, level


@cache
def _communicator() -> Any:
    """One for all groups, since tags tell their calls apart; collective at its first use."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


@cache
def _neighbours() -> Any:
    """The ranks of this machine; collective at its first use."""
    from mpi4py import MPI

    return _communicator().Split_type(MPI.COMM_TYPE_SHARED)


@cache
def _num_spins() -> int:
    """Zero where ranks outnumber the cores of their machine; collective at its first use."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    cores = {core for of_rank in _neighbours().allgather(sorted(mine)) for core in of_rank}
    return _SPINS if _neighbours().Get_size() <= len(cores) else 0


def _has_thread() -> bool:
    """Whether a thread moves large messages on: it pays where they cross a network."""
    asked = MPI_PROGRESS.value()
    is_one_machine = bool(_neighbours().Get_size() == _communicator().Get_size())
    return asked == "thread" or (asked == "auto" and not is_one_machine)


@cache
def _type_of(num_bytes: int) -> object:
    """The type of a message as one element: MPI libraries of MPI 3, as Open MPI 5, have counts of 31 bits."""
    from mpi4py import MPI

    num_chunks, num_left = divmod(num_bytes, _MOST_BYTES)
    chunk = MPI.BYTE.Create_contiguous(_MOST_BYTES)
    return MPI.Datatype.Create_struct([num_chunks, num_left], [0, num_bytes - num_left], [chunk, MPI.BYTE]).Commit()


class MpiWire(PointToPoint):
    """The messages among some ranks of ``COMM_WORLD``.

    ``timeout`` is that of a wait.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        from mpi4py import MPI

        self._comm, self.num_spins = _communicator(), _num_spins()
        super().__init__(list(ranks).index(self._comm.Get_rank()), ranks)
        self._num_tags = self._comm.Get_attr(MPI.TAG_UB) + 1
        self._buffer, self._byte = MPI.buffer.fromaddress, MPI.BYTE
        self.timeout = timeout.total_seconds()
        self._progress = current().of(Progress) if _has_thread() else None

    def send(self, x: Tensor, peer: int, tag: int) -> Message:
        return self._start(self._comm.Isend, x, 0, x.nbytes, peer, tag)

    def receive(self, x: Tensor, peer: int, tag: int) -> Message:
        return self._start(self._comm.Irecv, x, 0, x.nbytes, peer, tag)

    def send_rows(self, x: Tensor, low: int, high: int, peer: int, tag: int) -> Message:
        """See :class:`PointToPoint`; by their address, since a view of them would take longer than all the rest."""
        row_bytes = x.nbytes // x.shape[0]  # len(x) is Python's, and takes five times as long
        return self._start(self._comm.Isend, x, low * row_bytes, (high - low) * row_bytes, peer, tag)

    def receive_rows(self, x: Tensor, low: int, high: int, peer: int, tag: int) -> Message:
        row_bytes = x.nbytes // x.shape[0]
        return self._start(self._comm.Irecv, x, low * row_bytes, (high - low) * row_bytes, peer, tag)

    def _start(self, start: Any, x: Tensor, first: int, num_bytes: int, peer: int, tag: int) -> Message:
        other, buffer = self.ranks[peer], self._buffer(x.data_ptr() + first, num_bytes)
        content = [buffer, num_bytes, self._byte] if num_bytes <= _MOST_BYTES else [buffer, 1, _type_of(num_bytes)]
        request = start(content, other, message_tag(tag, num_bytes) % self._num_tags)
        progress = self._progress if num_bytes > _EAGER_BYTES else None
        return Message(_Request(request, x, self, other, num_bytes, progress), other)


class _Request:
    """A message under way, and the tensor whose memory it uses."""

    __slots__ = ("_num_bytes", "_peer", "_progress", "_request", "_tensor", "_wire")

    def __init__(
        self, request: Any, tensor: Tensor, wire: MpiWire, peer: int, num_bytes: int, progress: Progress | None
    ) -> None:
        self._request, self._tensor, self._wire, self._peer = request, tensor, wire, peer
        self._num_bytes, self._progress = num_bytes, progress
        if progress is not None:
            progress.begin(self)

    def __del__(self, abandoned: deque[object] = _abandoned) -> None:
        if self._request:  # false once it is done
            abandoned.append((self._request, self._tensor))
            self._end()

    def wait(self) -> None:
        """Wait, and let signals be handled and other threads run meanwhile."""
        test = self._request.Test
        if not test():
            self._wait_for(test)
        self._end()

    def _wait_for(self, test: Callable[[], bool]) -> None:
        wire = self._wire
        for _ in range(wire.num_spins and wire.num_spins + min(self._num_bytes, _MOST_BYTES_SPUN) // _BYTES_A_SPIN):
            if test():
                return
        end, pause = time.monotonic() + wire.timeout, _SLEEP_SECONDS
        while not test():
            if time.monotonic() > end:
                raise ConnectionLostError(self._overdue())
            time.sleep(pause)
            pause = min(_LONGER * pause, _LONGEST)

    def _end(self) -> None:
        if self._progress is not None:
            self._progress.end(self)
            self._progress = None

    def _overdue(self) -> str:
        waited = current().of(Standing).wait
        call = None if waited is None else waited.call
        what = ""
        if waited is not None and call is not None:
            group = describe_ranks(sorted(waited.calls.ranks))
            what = f" at {line_in_words(call.file, call.line)}, {call.what} among {group}"
        return (
            f"rank {self._wire.ranks[self._wire.rank]} has waited {self._wire.timeout:g} s, the timeout of init(), for "
            f"rank {self._peer}{what}: see that rank's log"
        )


class Progress:
    """Moves large messages on while Python computes; MPI does so only within its calls.

    A thread asks MPI each millisecond while such messages are under way. Native ops let it run.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._ask = _communicator().Iprobe
        self._under_way: set[int] = set()
        self._has_some, self._is_closed = threading.Event(), False
        self._thread: threading.Thread | None = None
        if MPI.Query_thread() == MPI.THREAD_MULTIPLE:
            self._thread = threading.Thread(target=self._run, name="pyg_dist progress", daemon=True)
            self._thread.start()
        else:
            logger.warning("large messages wait for the next call of MPI, which is not for several threads here")

    def begin(self, request: _Request) -> None:
        """One more is under way."""
        self._under_way.add(id(request))
        self._has_some.set()

    def end(self, request: _Request) -> None:
        """It has left or arrived."""
        self._under_way.discard(id(request))

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._has_some.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            self._has_some.wait()
            self._has_some.clear()
            while self._under_way and not self._is_closed:
                time.sleep(_PROGRESS_SECONDS)
                self._ask()
