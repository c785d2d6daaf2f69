"""Where the ranks meet: a store that all of them share, found through the launcher's address or through MPI."""

from __future__ import annotations

import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pyg_dist.backend.session.launch import Launch
from pyg_dist.errors import LaunchError, MissingPackageError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def meet(launch: Launch, timeout: timedelta) -> dist.Store:
    """Return a store that all ranks share; torchrun's agent, or else rank 0, holds it. Collective.

    Raises:
        LaunchError: If the ranks do not meet within ``timeout``, or mpi4py and mpirun are of different MPI libraries.
        MissingPackageError: If the address has to come through MPI and mpi4py is missing.
    """
    if launch.master_addr is None or launch.master_port is None:
        return _meet_through_mpi(launch, timeout)
    if launch.master_addr in _LOOPBACK:
        _use_loopback()
    host = f"[{launch.master_addr}]" if ":" in launch.master_addr else launch.master_addr
    began = time.monotonic()
    try:
        # torch's own rendezvous, because torchrun's agent may already hold the store.
        meeting = dist.rendezvous(f"tcp://{host}:{launch.master_port}", launch.rank, launch.world_size, timeout=timeout)
        store: dist.Store = next(meeting)[0]
    except dist.DistError as error:
        raise LaunchError(
            f"Expected {launch.world_size} ranks to meet at {host}:{launch.master_port} "
            f"(got, after {time.monotonic() - began:.1f} s of {timeout.total_seconds():g}: "
            f"{str(error).splitlines()[0]}); check MASTER_ADDR, MASTER_PORT and that every rank has started"
        ) from error
    return store


def of_generation(store: dist.Store, number: int) -> dist.Store:
    """The part of the store that is a session's: ``init`` may follow a ``shutdown``."""
    return dist.PrefixStore(f"pyg_dist/{number}", store)


def watched(store: dist.Store) -> dist.Store:
    """The part of a session's store that its :class:`~pyg_dist.backend.session.failure.FailureWatch` uses."""
    return dist.PrefixStore("failure", store)


def meet_early(launch: Launch, seconds: float) -> dist.Store:
    """What the watches of the first session use, for a rank that ends before it. Collective, but for the time limit."""
    return watched(of_generation(meet(launch, timedelta(seconds=seconds)), 0))


def _meet_through_mpi(launch: Launch, timeout: timedelta) -> dist.Store:
    """Let rank 0 open a store on a free port and MPI broadcast its address."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError where it finds no MPI library
        raise MissingPackageError(
            f"Expected mpi4py under mpirun, or MASTER_ADDR and MASTER_PORT (got: {error}); pip install mpi4py"
        ) from error
    comm = MPI.COMM_WORLD
    if comm.Get_size() != launch.world_size:
        library = MPI.Get_library_version().split("\n")[0].strip("\0 ")
        raise LaunchError(
            f"Expected mpi4py to see the {launch.world_size} ranks of mpirun (got {comm.Get_size()}, with {library}); "
            "use the mpirun of that MPI library or set MASTER_ADDR and MASTER_PORT"
        )
    is_one_machine = comm.Split_type(MPI.COMM_TYPE_SHARED).Get_size() == comm.Get_size()
    store = None
    if comm.Get_rank() == 0:
        host = _LOOPBACK[0] if is_one_machine else socket.gethostname()
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    host, port = comm.bcast(None if store is None else (store.host, store.port))
    if is_one_machine:
        _use_loopback()
    return store or dist.TCPStore(host, port, is_master=False, timeout=timeout)


def _use_loopback() -> None:
    """Make gloo use the loopback interface: all ranks are on this machine, whose name may not resolve."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def running_mpi() -> Any | None:
    """Return the ``mpi4py.MPI`` module if MPI runs in this process, else None. Not collective."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None
