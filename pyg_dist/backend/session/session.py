"""Start anywhere, end cleanly: one session per process, alone or among the ranks of any launcher.

``init`` finds the other ranks, opens torch's default process group, compares versions, shares the random state and
installs the watches. ``rank``, ``world_size``, ``local_rank`` and ``is_main`` work before it too.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from datetime import timedelta
from typing import get_args

import torch
import torch.distributed as dist

from pyg_dist.backend.comm.checks.calls import Standing
from pyg_dist.backend.comm.connection import LossReason
from pyg_dist.backend.comm.group import Group, Groups, world_group
from pyg_dist.backend.comm.wires import factory, mpi
from pyg_dist.backend.comm.wires.wire import Carriers
from pyg_dist.backend.ops import library
from pyg_dist.backend.ops.late_errors import LateErrors
from pyg_dist.backend.ops.memory import keep_freed_blocks
from pyg_dist.backend.session import devices, generators, launch, rendezvous
from pyg_dist.backend.session.agreement import Control, require_equal
from pyg_dist.backend.session.divergence import DivergenceWatch
from pyg_dist.backend.session.failure import FailureWatch
from pyg_dist.backend.session.leaving import leave, way_out
from pyg_dist.backend.session.settings import WIRE, Wire
from pyg_dist.backend.session.state import (
    Session,
    current,
    end,
    is_group_open,
    is_initialized,
    is_main,
    local_rank,
    place,
    rank,
    world_size,
)  # fmt: skip
from pyg_dist.errors import AgreementError, LaunchError, MissingPackageError, OptionError

__all__ = ["init", "is_initialized", "is_main", "local_rank", "rank", "shutdown", "world_size"]

logger = logging.getLogger("pyg_dist")

DEFAULT_BACKEND = "auto"
DEFAULT_TIMEOUT = timedelta(minutes=10)


def init(backend: str = DEFAULT_BACKEND, timeout: timedelta = DEFAULT_TIMEOUT, wire: Wire = "auto") -> None:
    """Join the other ranks; implied by ``DistributedData``. Collective.

    Without a launcher nothing is started and the world size is 1. Under a launcher, torch's default process group is
    opened (or used, if the script has opened one), and the versions on the ranks are compared. Generators of torch (the
    CPU's and the GPUs'), numpy and Python that differ are set to rank 0's states. A second call does nothing.

    Args:
        backend: torch.distributed backend; "auto" is gloo, and also nccl for CUDA tensors if each rank has its own
            GPU. Ranks that share a GPU send CUDA tensors through host memory.
        timeout: Longest wait of any collective before it raises.
        wire: What carries the package's messages of CPU tensors, "gloo" or "mpi"; "auto" is ``PYG_DIST_WIRE``, or else
            MPI under mpirun, if mpi4py sees all its ranks. Sums have the same bits on both.

    Raises:
        LaunchError: If the environment contradicts itself, or ``init`` ran before with other arguments.
        AgreementError: If the ranks run different versions of pyg_dist, torch or torch_geometric.
        OptionError: If an argument is not valid.
        MissingPackageError: Under mpirun without mpi4py and without MASTER_ADDR and MASTER_PORT.

    Example:
        >>> from datetime import timedelta
        >>> pyg_dist.init(timeout=timedelta(minutes=30))
    """
    session = current()
    if session.is_joined:
        _check_same_options(session, backend, timeout, wire)
        return
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise OptionError(f"Expected 'timeout' to be a positive timedelta (got {timeout!r})")
    if is_group_open():
        _adopt_group(session, backend, wire, timeout)
    else:
        _open_group(session, launch.detect(os.environ), backend, wire, timeout)
    session.backend, session.timeout, session.wire, session.is_joined = backend, timeout, wire, True
    session.of(LateErrors)
    keep_freed_blocks()
    if session.store is None:
        if "cuda" in library.devices():  # its late errors are raised at the end
            way_out.watch_run()
        return
    session.of(Control).group = _control(timeout)
    _start_watch(session, session.store)
    try:
        require_equal(_versions(), "install the same versions in every rank's environment")
    except AgreementError:
        end()
        raise
    generators.share(session.of(Control).group)
    logger.info("rank %d of %d, started by %s", session.rank, session.world_size, session.launcher)


def shutdown() -> None:
    """End the session, and the process group if ``init`` opened it. Every rank calls it; late ones are waited for.

    Runs by itself when the process ends; ``init`` may be called again.
    """
    end()


def _check_same_options(session: Session, backend: str, timeout: timedelta, wire: Wire) -> None:
    given = {
        "backend": (backend, DEFAULT_BACKEND, session.backend),
        "timeout": (timeout, DEFAULT_TIMEOUT, session.timeout),
        "wire": (wire, "auto", session.wire),
    }
    for name, (value, default, chosen) in given.items():
        # DistributedData calls init() without arguments, after the script may have chosen its own.
        if value not in (chosen, default):
            raise LaunchError(
                f"Expected '{name}' as in the first init (got {value}, it was {chosen}); call init once, at the top"
            )


def _adopt_group(session: Session, backend: str, wire: Wire, timeout: timedelta) -> None:
    opened = dist.get_backend()
    if backend not in (DEFAULT_BACKEND, opened):
        raise LaunchError(f"Expected backend 'auto' or '{opened}', the open process group's (got {backend!r})")
    session.launcher, (session.rank, session.world_size, session.local_rank) = "env", place()
    if session.world_size == 1:
        return
    store = dist.distributed_c10d._get_default_store()  # there is no public way to it
    store = rendezvous.of_round(store, session.rank, session.world_size, timeout)
    session.store, gpus = _watch_failures(session, store)
    _choose_wire(session, session.store, wire, timeout)
    if devices.sharing(gpus):  # nccl would fail in its first message
        devices.backend_for("nccl" if opened == "nccl" else "gloo", DEFAULT_BACKEND, gpus)
        session.of(Carriers).refused.add("cuda")


def _open_group(session: Session, found: launch.Launch, backend: str, wire: Wire, timeout: timedelta) -> None:
    session.launcher = found.launcher
    session.rank, session.world_size, session.local_rank = found.rank, found.world_size, found.local_rank
    if found.world_size == 1:
        return
    if not dist.is_available():
        raise MissingPackageError(
            "Expected a torch build with torch.distributed for more than one rank; pip install torch"
        )
    if session.meeting.store is None:
        session.meeting.store = rendezvous.meet(found, timeout)
    store, gpus = _watch_failures(session, session.meeting.store)
    backend = devices.backend_for(backend, DEFAULT_BACKEND, gpus)
    if "nccl" in backend:  # its kernels then start while others run
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    _choose_wire(session, store, wire, timeout)
    if session.of(Carriers).mpi is not None:  # the script alone may send by it: no connection before it does
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    try:
        dist.init_process_group(backend, store=store, rank=found.rank, world_size=found.world_size, timeout=timeout)
    except (ValueError, AssertionError) as error:
        raise OptionError(
            f"Expected 'backend' to be 'auto' or one of torch.distributed's (got {backend!r}): {error}"
        ) from error
    finally:
        way_out.watch_run()
    session.store, session.of(Groups).is_own = store, True


def _choose_wire(session: Session, store: dist.Store, asked: Wire, timeout: timedelta) -> None:
    """Find out whether messages of CPU tensors go by MPI (collective)."""
    asked = WIRE.value() if asked == "auto" else asked
    if asked not in get_args(Wire):
        raise OptionError(f"Expected 'wire' to be 'auto', 'gloo' or 'mpi' (got {asked!r})")
    if asked != "mpi" and session.launcher != "mpi":
        return
    able = asked != "gloo" and mpi.is_there(session.rank, session.world_size)
    store.add("num_mpi", able)
    if store.add("num_asked", 1) == session.world_size:  # all have told
        store.set("have_mpi", str(int(store.add("num_mpi", 0) == session.world_size)))
    have_mpi = store.get("have_mpi") == b"1"
    if asked == "mpi" and not have_mpi:
        raise LaunchError(
            f"Expected mpi4py to see the {session.world_size} ranks, for wire='mpi' (got another number, or no "
            "mpi4py): start them with the mpirun of its MPI library, or take wire='gloo'"
        )
    session.of(Carriers).mpi = timeout if have_mpi else None


def _control(timeout: timedelta) -> Group:
    """The group of all ranks that carries CPU tensors: the default group's if it can."""
    if "cpu" in str(dist.get_backend_config()):
        return world_group()
    return Group(factory.wires_of(dist.new_group(backend="gloo", timeout=timeout)), "control")


def _watch_failures(session: Session, store: dist.Store) -> tuple[dist.Store, list[str]]:
    """Hear of other ranks' failures from the moment there is a store: one of them may fail before it joins the session.

    Returns the session's part of the store, and all ranks' GPUs.
    """
    store = rendezvous.of_generation(store, next(session.meeting.numbers))

    def leave_store() -> None:
        divergence = session.find(DivergenceWatch)
        if divergence is not None:
            divergence.leave_store()

    if session.find(FailureWatch) is None:  # else an init that failed has left it
        watch = FailureWatch(rendezvous.watched(store), session.rank, session.world_size, leave, leave_store)
        session.add(watch, closes_last=True)
    way_out.watch_run()
    own = devices.own_gpu(session.local_rank)
    return store, devices.gpus_of_all(store, session.rank, session.world_size, own)


def _start_watch(session: Session, store: dist.Store) -> None:
    watch = session.find(FailureWatch)
    assert watch is not None
    calls = dist.PrefixStore("calls", store)
    divergence = session.add(DivergenceWatch(calls, session.rank, session.world_size, session.of(Standing), watch.fail))

    def why_lost(peer: int | None) -> str | None:
        watch.listen_first()
        reason = divergence.why_lost(peer)
        if reason is None and peer is not None:
            watch.is_gone(peer)
        return reason

    session.add(LossReason(why_lost))


def installed_version(package: str) -> str | None:
    """The version of a package; None: it is missing, or runs from a source tree. Not collective."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str]:
    packages = ("pyg_dist", "torch_geometric")
    return {"torch": str(torch.__version__)} | {name: installed_version(name) or "not installed" for name in packages}
