"""Ranks of a pool (``workers``) that mpirun starts: they send by MPI.

A process that has started MPI must not be forked, so these are launched, and connect to the tests' process by a socket.
Like all launches of tests (``launching``), each is forked from a server before MPI starts in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Client, Connection

import forked_python
import limits
import psutil
import workers
from launching import mpirun, plain_environ
from workers import Rank


class _Launched:
    """A rank's process, which is no child of this one."""

    exitcode = None  # its launcher's to know

    def __init__(self, pid: int) -> None:
        self.pid: int | None = pid

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end; a zombie has ended."""
        end = time.monotonic() + (timeout or 0.0)
        while time.monotonic() < end and is_running(self.pid):
            time.sleep(0.05)


def is_running(pid: int | None) -> bool:
    """Whether a process is there, and no zombie."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@contextlib.contextmanager
def by_mpirun(world_size: int) -> Iterator[list[Rank]]:
    """Ranks of one ``mpirun``; a single one is forked, since it sends nothing."""
    if world_size == 1:
        with workers.forked(1) as ranks:
            yield ranks
        return
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pyg_dist_mpi_"))
        listener, address = stack.enter_context(socket.socket(socket.AF_UNIX)), os.path.join(folder, "pool")
        listener.bind(address)
        listener.listen(world_size)
        listener.settimeout(limits.STALL_SECONDS)
        command = [*mpirun(world_size), forked_python.executable(), __file__, address]
        launcher = subprocess.Popen(command, env=plain_environ(), stdin=subprocess.DEVNULL, start_new_session=True)
        stack.callback(_end, launcher)
        found: dict[int, Rank] = {}
        for _ in range(world_size):
            connection = stack.enter_context(Connection(listener.accept()[0].detach()))
            rank, pid = connection.recv()
            output = workers.new_output(folder, rank)
            connection.send(output)
            found[rank] = Rank(_Launched(pid), connection, output)
        yield [found[rank] for rank in range(world_size)]


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Ranks end with their launcher."""
    if launcher.poll() is None:
        launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.wait(limits.GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()


def _main(address: str) -> None:
    from pyg_dist.backend.session.launch import detect

    with Client(address) as connection:
        connection.send((detect(os.environ).rank, os.getpid()))
        workers.serve(connection, connection.recv())


if __name__ == "__main__":
    _main(sys.argv[1])
