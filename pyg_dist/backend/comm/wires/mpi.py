"""Messages of CPU tensors by MPI, through mpi4py: ranks of one machine share memory, and others their fast network.

Tensors travel as bytes, so all dtypes do. MPI's own waits spin, which takes the processor from ranks that compute
where ranks share cores; these test some times, then sleep between tests, at once where ranks outnumber the cores.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from torch import Tensor

from pyg_dist.backend.comm.checks.calls import Standing, line_in_words, message_tag
from pyg_dist.backend.comm.wires import Message
from pyg_dist.backend.comm.wires.point_to_point import PointToPoint
from pyg_dist.backend.session.state import current
from pyg_dist.errors import ConnectionLostError

LOST = ("MPI_ERR_PROC_FAILED", "MPI_ERR_REVOKED", "MPIX_ERR_PROC_FAILED", "MPIX_ERR_REVOKED")
"""What its errors about a rank that is gone have in them."""

# Tests of a request before the first sleep, some 0.5 us each. A yield instead would cost a time slice of whatever else
# runs: on two busy cores sums of 64 bytes took 1,181 us with it, 180 without, and 285 over gloo.
_SPINS = 100
_SLEEP_SECONDS, _LONGER, _LONGEST = 1e-5, 1.25, 5e-4

# Requests that were never waited for, as after an error, with the memory that MPI may still write to.
_abandoned: list[object] = []


def is_there(rank: int, world_size: int) -> bool:
    """Whether mpi4py sees the launcher's ranks (it starts MPI; collective in some libraries)."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # mpi4py raises RuntimeError where it finds no MPI library
        return False
    return (MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()) == (rank, world_size)


def library() -> str | None:
    """The MPI library that mpi4py finds; MPI is not started. Not collective."""
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc(initialize=False)
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        return None
    return str(MPI.Get_library_version().split("\n")[0].strip("\0 "))


@cache
def _communicator() -> Any:
    """One for all groups, since tags tell their calls apart; collective at its first use."""
    from mpi4py import MPI

    return MPI.COMM_WORLD.Dup()


@cache
def _num_spins() -> int:
    """Zero where ranks outnumber the cores of their machine; collective at its first use."""
    from mpi4py import MPI

    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    neighbours = _communicator().Split_type(MPI.COMM_TYPE_SHARED)
    cores = {core for of_rank in neighbours.allgather(sorted(mine)) for core in of_rank}
    return _SPINS if neighbours.Get_size() <= len(cores) else 0


class MpiWire(PointToPoint):
    """The messages among some ranks of ``COMM_WORLD``.

    Args:
        ranks: their numbers there, which are the run's.
        timeout: of a wait.
    """

    def __init__(self, ranks: Sequence[int], timeout: timedelta) -> None:
        from mpi4py import MPI

        self._comm, self._spins = _communicator(), _num_spins()
        super().__init__(list(ranks).index(self._comm.Get_rank()), ranks)
        self._num_tags = self._comm.Get_attr(MPI.TAG_UB) + 1
        self._buffer, self._byte = MPI.buffer.fromaddress, MPI.BYTE
        self._timeout = timeout.total_seconds()

    def send(self, x: Tensor, peer: int, tag: int) -> Message:
        """See :class:`PointToPoint`."""
        return self._start(self._comm.Isend, x, peer, tag)

    def receive(self, x: Tensor, peer: int, tag: int) -> Message:
        """See :class:`PointToPoint`."""
        return self._start(self._comm.Irecv, x, peer, tag)

    def _start(self, start: Any, x: Tensor, peer: int, tag: int) -> Message:
        num_bytes, other = x.nbytes, self.ranks[peer]
        buffer = self._buffer(x.data_ptr(), num_bytes)
        request = start([buffer, num_bytes, self._byte], other, message_tag(tag, num_bytes) % self._num_tags)
        return Message(_Request(request, x, self, other), other)


class _Request:
    """A message under way, and the tensor whose memory it uses."""

    __slots__ = ("_peer", "_request", "_tensor", "_wire")

    def __init__(self, request: Any, tensor: Tensor, wire: MpiWire, peer: int) -> None:
        self._request, self._tensor, self._wire, self._peer = request, tensor, wire, peer

    def __del__(self, abandoned: list[object] = _abandoned) -> None:
        if self._request:  # false once it is done
            abandoned.append((self._request, self._tensor))

    def wait(self) -> None:
        """Wait, and let signals be handled and other threads run meanwhile."""
        test = self._request.Test
        for _ in range(self._wire._spins + 1):
            if test():
                return
        end, pause = time.monotonic() + self._wire._timeout, _SLEEP_SECONDS
        while not test():
            if time.monotonic() > end:
                raise ConnectionLostError(self._overdue())
            time.sleep(pause)
            pause = min(_LONGER * pause, _LONGEST)

    def _overdue(self) -> str:
        last, wire = current().of(Standing).last, self._wire
        call = "" if last is None else f" at {line_in_words(last[4], last[5])}, {last[1]}"
        return (
            f"rank {wire.ranks[wire.rank]} has waited {wire._timeout:g} s, the timeout of init(), for rank "
            f"{self._peer}{call}: see that rank's log"
        )
