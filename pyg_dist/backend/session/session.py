"""Start anywhere, end cleanly: one session per process, alone or among the ranks of any launcher.

``init`` finds the other ranks, opens torch's default process group, compares versions, shares the random state and
installs the failure watch. ``rank``, ``world_size``, ``local_rank`` and ``is_main`` work before it too.
"""

from __future__ import annotations

import atexit
import importlib.metadata
import itertools
import logging
import os
from datetime import timedelta
from typing import Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist

from pyg_dist import errors
from pyg_dist.backend import staging
from pyg_dist.backend.comm.checks.calls import here
from pyg_dist.backend.comm.connection import set_reason
from pyg_dist.backend.comm.group import Group, close_groups, world_group
from pyg_dist.backend.session import devices, early_end, generators, launch, world
from pyg_dist.backend.session.agreement import require_equal
from pyg_dist.backend.session.divergence import DivergenceWatch
from pyg_dist.backend.session.failure import FailureWatch
from pyg_dist.backend.session.rendezvous import meet, of_generation, running_mpi, watched
from pyg_dist.backend.session.world import World, is_initialized, is_main, local_rank, rank, world_size
from pyg_dist.errors import LaunchError, MissingPackageError, OptionError

__all__ = ["init", "is_initialized", "is_main", "local_rank", "rank", "shutdown", "world_size"]

logger = logging.getLogger("pyg_dist")

DEFAULT_BACKEND = "auto"
DEFAULT_TIMEOUT = timedelta(minutes=10)


class Closable(Protocol):
    """What ends with the session."""

    def close(self) -> None:
        """End it; more than once does no harm."""


_options: tuple[str, timedelta] = (DEFAULT_BACKEND, DEFAULT_TIMEOUT)
_watch: FailureWatch | None = None
_divergence: DivergenceWatch | None = None
_owns_group = False
# The store outlives a shutdown: another rank may still read from the one that this process hosts.
_store: dist.Store | None = None
_generations = itertools.count()
_closing: WeakSet[Closable] = WeakSet()


def init(backend: str = DEFAULT_BACKEND, timeout: timedelta = DEFAULT_TIMEOUT) -> None:
    """Join the other ranks; implied by ``DistributedData``. Collective.

    Without a launcher nothing is started and the world size is 1. Under a launcher, torch's default process group is
    opened (or used, if the script has opened one), and the versions on the ranks are compared. Generators of torch (the
    CPU's and the GPUs'), numpy and Python that differ are set to rank 0's states. A second call does nothing.

    Args:
        backend: torch.distributed backend; "auto" is gloo, and also nccl for CUDA tensors if each rank has its own
            GPU. Ranks that share a GPU send CUDA tensors through host memory.
        timeout: Longest wait of any collective before it raises.

    Raises:
        LaunchError: If the environment contradicts itself, or ``init`` ran before with other arguments.
        AgreementError: If the ranks run different versions of pyg_dist, torch or torch_geometric.
        OptionError: If an argument is not valid.
        MissingPackageError: Under mpirun without mpi4py and without MASTER_ADDR and MASTER_PORT.

    Example:
        >>> from datetime import timedelta
        >>> pyg_dist.init(timeout=timedelta(minutes=30))
    """
    global _options
    if is_initialized():
        _check_same_options(backend, timeout)
        return
    if not isinstance(timeout, timedelta) or timeout <= timedelta(0):
        raise OptionError(f"Expected 'timeout' to be a positive timedelta (got {timeout!r})")
    if world.is_group_open():
        found = _adopt_group(backend, timeout)
    else:
        found = _open_group(launch.detect(os.environ), backend, timeout)
    _options = (backend, timeout)
    world.set_current(found)
    errors.set_rank(found.rank, found.world_size)
    if found.store is None:
        return
    _start_watch(found)
    try:
        require_equal(_versions(), "install the same versions in every rank's environment")
    except errors.AgreementError:
        shutdown()
        raise
    generators.share(found.control)
    logger.info("rank %d of %d, started by %s", found.rank, found.world_size, found.launcher)


def shutdown() -> None:
    """End the session, and the process group if ``init`` opened it. Every rank calls it, none waits for a slow one.

    Runs by itself when the process ends; ``init`` may be called again.
    """
    global _watch, _divergence, _owns_group
    for thing in list(_closing):
        thing.close()
    if _divergence is not None:
        _divergence.close()
    _divergence = None
    if _watch is not None:
        _watch.close()
    _watch = None
    world.set_current(None)
    close_groups()
    if _owns_group and world.is_group_open():  # the script may have destroyed it
        dist.destroy_process_group()
    _owns_group = False
    errors.set_rank(0, 1)


def close_at_shutdown(thing: Closable) -> None:
    """Have the session close it when it ends. It is not kept alive for that."""
    _closing.add(thing)


def _check_same_options(backend: str, timeout: timedelta) -> None:
    given = {"backend": (backend, DEFAULT_BACKEND, _options[0]), "timeout": (timeout, DEFAULT_TIMEOUT, _options[1])}
    for name, (value, default, current) in given.items():
        # DistributedData calls init() without arguments, after the script may have chosen its own.
        if value not in (current, default):
            raise LaunchError(
                f"Expected '{name}' as in the first init (got {value}, it was {current}); call init once, at the top"
            )


def _adopt_group(backend: str, timeout: timedelta) -> World:
    """Use the default process group that the script has opened."""
    current = dist.get_backend()
    if backend not in (DEFAULT_BACKEND, current):
        raise LaunchError(f"Expected backend 'auto' or '{current}', the open process group's (got {backend!r})")
    own_rank, size, own_local_rank = world.place()
    if size == 1:
        return World(0, 1, own_local_rank, "env", timeout)
    store = dist.distributed_c10d._get_default_store()  # there is no public way to it
    store = of_generation(store, next(_generations))
    _watch_failures(store, own_rank, size).hook_exceptions()
    gpus = devices.gpus_of_all(store, own_rank, size, devices.own_gpu(own_local_rank))
    if devices.sharing(gpus):  # nccl would fail in its first message
        devices.backend_for("nccl" if current == "nccl" else "gloo", DEFAULT_BACKEND, gpus)
        staging.carry_none_of("cuda")
    return World(own_rank, size, own_local_rank, "env", timeout, store, _control(timeout))


def _open_group(found: launch.Launch, backend: str, timeout: timedelta) -> World:
    """Meet the other ranks and open the default process group."""
    global _store, _owns_group
    place = (found.rank, found.world_size, found.local_rank, found.launcher, timeout)
    if found.world_size == 1:
        return World(*place)
    if not dist.is_available():
        raise MissingPackageError(
            "Expected a torch build with torch.distributed for more than one rank; pip install torch"
        )
    if _store is None:
        _store = meet(found, timeout)
    store = of_generation(_store, next(_generations))
    watch = _watch_failures(store, found.rank, found.world_size)
    gpus = devices.gpus_of_all(store, found.rank, found.world_size, devices.own_gpu(found.local_rank))
    backend = devices.backend_for(backend, DEFAULT_BACKEND, gpus)
    if "nccl" in backend:  # its kernels then start while others run
        os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    try:
        dist.init_process_group(backend, store=store, rank=found.rank, world_size=found.world_size, timeout=timeout)
    except (ValueError, AssertionError) as error:
        raise OptionError(
            f"Expected 'backend' to be 'auto' or one of torch.distributed's (got {backend!r}): {error}"
        ) from error
    finally:
        watch.hook_exceptions()
    _owns_group = True
    return World(*place, store, _control(timeout))


def _control(timeout: timedelta) -> Group:
    """The group of all ranks that carries CPU tensors: the default group's if it can."""
    if "cpu" in str(dist.get_backend_config()):
        return world_group()
    return Group(dist.new_group(backend="gloo", timeout=timeout), "control")


def _watch_failures(store: dist.Store, own_rank: int, size: int) -> FailureWatch:
    """Hear of other ranks' failures, as soon as there is a store: one of them may not come further."""
    global _watch

    def leave_store() -> None:
        if _divergence is not None:
            _divergence.leave_store()

    early_end.end()
    if _watch is None:  # else an init that failed has left it
        _watch = FailureWatch(watched(store), own_rank, size, leave=_leave, before_store_goes=leave_store)
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)
    return _watch


def _start_watch(found: World) -> None:
    global _divergence
    assert found.store is not None
    assert _watch is not None

    def why_lost(peer: int | None) -> str | None:
        if _watch is None or _divergence is None:
            return None
        _watch.listen_first()
        return _divergence.why_lost(peer)

    place = (found.rank, found.world_size)
    _divergence = DivergenceWatch(dist.PrefixStore("calls", found.store), *place, here, _watch.fail)
    set_reason(why_lost)


def _at_exit() -> None:
    if _watch is None or not _watch.has_failed:
        shutdown()
    elif running_mpi() is not None:
        # MPI_Finalize, which mpi4py runs last of all, would wait for ranks that have stopped.
        _leave()


def _leave() -> None:
    """End this process at once, with status 1."""
    mpi = running_mpi()
    if mpi is not None:
        mpi.COMM_WORLD.Abort(1)
    os._exit(1)


def _versions() -> dict[str, str]:
    versions = {"torch": str(torch.__version__)}
    for package in ("pyg_dist", "torch_geometric"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:  # run from a source tree
            versions[package] = "not installed"
    return versions
