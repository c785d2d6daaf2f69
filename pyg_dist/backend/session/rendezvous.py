"""Where ranks meet: a store that all share, held by torchrun's agent, by rank 0, or reached by MPI's messages."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pyg_dist.backend.session.launch import LOOPBACK, Launch
from pyg_dist.backend.session.mpi_store import MpiStore
from pyg_dist.backend.session.settings import MPI_PROGRESS
from pyg_dist.errors import LaunchError, MissingPackageError, describe_ranks

STORE_ERRORS = (dist.DistError, RuntimeError)  # of stores: those of sockets, and those of files and of memory

_ASK_SECONDS = 0.01  # from one look for questions of ranks to the next
_LISTENS_SECONDS = 0.1  # from one look whether rank 0 has come to the next
_SILENT_SECONDS = 20.0  # in which a store answers that listens


def meet(launch: Launch, timeout: timedelta) -> dist.Store:
    """Return a store that all ranks share; torchrun's agent, or else rank 0, holds it. Collective.

    Raises:
        LaunchError: If the ranks do not meet within ``timeout``, or mpi4py and mpirun are of different MPI libraries.
        MissingPackageError: If the address has to come through MPI and mpi4py is missing.
    """
    if launch.master_addr is None or launch.master_port is None:
        return _meet_through_mpi(launch, timeout)
    if launch.master_addr in LOOPBACK:
        _use_loopback()
    host = f"[{launch.master_addr}]" if ":" in launch.master_addr else launch.master_addr
    began = time.monotonic()
    try:
        if launch.rank == 0 and not has_agent_store() and launch.master_addr in LOOPBACK:
            return _store_on_loopback(launch.master_addr, launch.master_port, launch.world_size, timeout)
        # torch's own rendezvous, because torchrun's agent may already hold the store.
        meeting = dist.rendezvous(f"tcp://{host}:{launch.master_port}", launch.rank, launch.world_size, timeout=timeout)
        store = next(meeting)[0] if launch.rank == 0 else _asked(meeting, launch, timeout)
        return of_round(store, launch.rank, launch.world_size, timeout)
    except (dist.DistError, OSError) as error:
        raise LaunchError(
            f"Expected {launch.world_size} ranks to meet at {host}:{launch.master_port} "
            f"(got, after {time.monotonic() - began:.1f} s of {timeout.total_seconds():g}: "
            f"{str(error).splitlines()[0]}); check MASTER_ADDR, MASTER_PORT and that every rank has started"
        ) from error


def _asked(meeting: Iterator[Any], launch: Launch, timeout: timedelta) -> dist.Store:
    """The store of a rendezvous. Torch would wait for ever for a program on that port which is no store."""
    _await_listener((str(launch.master_addr), launch.master_port or 0), timeout)
    found = Future[dist.Store]()

    def ask() -> None:
        try:
            found.set_result(next(meeting)[0])
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=ask, name="rendezvous", daemon=True).start()
    if not wait([found], min(_SILENT_SECONDS, timeout.total_seconds())).done:
        raise ConnectionError("another program listens there, which does not answer as rank 0's store")
    return found.result()


def _await_listener(address: tuple[str, int], timeout: timedelta) -> None:
    end = time.monotonic() + timeout.total_seconds()
    while True:
        try:
            socket.create_connection(address, 1.0).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(_LISTENS_SECONDS)


def has_agent_store() -> bool:
    """Whether torchrun's agent holds the store, else rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def of_round(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """The part of the store that is of these ranks alone (collective).

    That of torchrun's agent outlives the ranks, which it may start again: it still has what those before them have left
    there, such as word of their failure. No variable numbers these rounds, since an agent that has joined later counts
    its own. So rank 0 draws a name for the round, and tells it whoever asks; the asker's question has a name, too,
    because that of a rank before it may still be there.

    Raises:
        TimeoutError: Not all ranks have asked.
    """
    if not has_agent_store():
        return store
    if rank:
        question = secrets.token_hex(8)
        store.set(f"pyg_dist/question/{rank}", question)
        store.wait([f"pyg_dist/answer/{question}"], timeout)
        own = dist.PrefixStore(store.get(f"pyg_dist/answer/{question}").decode(), store)
        own.set(f"here/{rank}", "")
        return own
    name, missing, answered = f"pyg_dist/{secrets.token_hex(8)}", {*range(1, world_size)}, set[bytes]()
    own, end = dist.PrefixStore(name, store), time.monotonic() + timeout.total_seconds()
    while missing := {rank for rank in missing if not own.check([f"here/{rank}"])}:
        for key in [f"pyg_dist/question/{rank}" for rank in missing]:
            if store.check([key]) and (asked := store.get(key)) not in answered:
                store.set(f"pyg_dist/answer/{asked.decode()}", name)
                answered.add(asked)
        if time.monotonic() > end:
            raise TimeoutError(f"no word of {describe_ranks([*missing])}")
        time.sleep(_ASK_SECONDS)
    return own


def of_generation(store: dist.Store, number: int) -> dist.Store:
    """The part of the store that is a session's: ``init`` may follow a ``shutdown``."""
    return dist.PrefixStore(f"pyg_dist/{number}", store)


def watched(store: dist.Store) -> dist.Store:
    """The part of a session's store that its :class:`~pyg_dist.backend.session.failure.FailureWatch` uses."""
    return dist.PrefixStore("failure", store)


def _meet_through_mpi(launch: Launch, timeout: timedelta) -> dist.Store:
    """A store that MPI's messages reach, or else one on a port that MPI tells the others."""
    try:
        MPI = start_mpi()
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
    if is_one_machine:
        _use_loopback()
    # Threads of nccl ask a store at times when Python may have ended.
    if comm.allreduce(torch.cuda.is_available() or MPI.Query_thread() < MPI.THREAD_MULTIPLE, MPI.LOR):
        return _store_of_rank_0(comm, LOOPBACK[0] if is_one_machine else socket.gethostname(), timeout)
    return MpiStore(timeout)


def _store_of_rank_0(comm: Any, host: str, timeout: timedelta) -> dist.Store:
    store = None
    if comm.Get_rank() == 0:
        if host in LOOPBACK:
            store = _store_on_loopback(host, 0, None, timeout)
        else:
            store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
    host, port = comm.bcast(None if store is None else (store.host, store.port))
    return store or dist.TCPStore(host, port, is_master=False, timeout=timeout)


def _store_on_loopback(host: str, port: int, world_size: int | None, timeout: timedelta) -> dist.TCPStore:
    """A store that other machines cannot reach: torch's own would listen on every interface.

    It waits until ``world_size`` ranks have come, ``None``: for none. Port 0 is any that is free.
    """
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    waits = world_size is not None
    return dist.TCPStore(
        host, port, world_size, is_master=True, timeout=timeout, wait_for_workers=waits, multi_tenant=True,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


def _use_loopback() -> None:
    """Make gloo use the loopback interface: all ranks are on this machine, whose name may not resolve."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


def start_mpi() -> Any:
    """The ``mpi4py.MPI`` module, whose import starts MPI (collective in some libraries)."""
    if MPI_PROGRESS.value() == "library":
        for variable in ("MPIR_CVAR_ASYNC_PROGRESS", "I_MPI_ASYNC_PROGRESS"):
            os.environ.setdefault(variable, "1")
    from mpi4py import MPI

    return MPI


def running_mpi() -> Any | None:
    """Return the ``mpi4py.MPI`` module if MPI runs in this process, else None. Not collective."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized() else None


def own_connection(store: dist.Store) -> dist.Store:
    """Another connection to what ``store`` is one to: one that waits is locked until its key is set."""
    other: dist.Store = store.clone()  # type: ignore[attr-defined]  # not in the stub
    return other
