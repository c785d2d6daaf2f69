"""Processes that run test bodies together, one per rank.

``Workers(3).run(body, *args)`` calls the module-level function ``body`` in three processes that see the environment of
torchrun's workers, and returns the three results. The processes start once and are used again until a body fails. They
are forked from a server process that has only imported modules, so that each starts clean and in milliseconds. Those of
another launcher come by another function in place of :func:`forked` (``mpirun_ranks``).

Bodies of all modules share them. Each body finds the same random numbers to draw, and fails if it leaves anything
behind (see ``leftovers``) or the ranks apart. A session that it has opened goes on.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import importlib.util
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, Protocol

import leftovers
import limits
import psutil
import pytest
import torch
import torch.distributed as dist

# What a rank's environment must not inherit from a launcher around pytest, or from another pool.
LAUNCHER_PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "TORCHELASTIC_",
    "PMI",
    "MPI_",
    "OMPI",
    "SLURM_",
)

# A rank has some 60 MB for itself, so two runs of tests side by side keep within 2 GB. It holds the sizes 1 to 4.
MAX_RANKS = 12

# Less processor time than this within ``limits.STALL_SECONDS`` is none: threads that only wait wake up now and then.
_IDLE_SECONDS = 0.1

_ENVIRON = dict(os.environ)  # before any test has set a variable
_starting = threading.Lock()  # the environment is everyone's
_MEET = b"meet"
_num_meetings = 0
_left: leftovers.State | None = None  # what the last body found and left; none after an import


class WorkersError(AssertionError):
    """A body failed, hung or left something behind; the message has what every rank raised, or where it stood."""


class _Outcome(NamedTuple):
    """What a rank sends back: the value or the traceback, and whether torch's default group is open."""

    kind: str  # "value", "error", "skip", "dead" or "late"
    content: Any
    has_group: bool = False


class Process(Protocol):
    """Of a rank."""

    @property
    def pid(self) -> int | None:
        """Its number."""

    @property
    def exitcode(self) -> int | None:
        """How it has ended, where that is known."""

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end."""


@dataclass
class Rank:
    """A process that serves bodies: see :func:`serve`."""

    process: Process
    connection: Connection
    output: str  # path of the file that holds its stdout and stderr


Start = Callable[[int], contextlib.AbstractContextManager[list[Rank]]]
"""Starts so many ranks, by number; on leaving, they end."""


class Workers:
    """A pool of ``world_size`` ranks; the processes start with the first ``run`` and anew after a failure."""

    def __init__(self, world_size: int, start: Start | None = None) -> None:
        self.world_size, self._start = world_size, start or forked
        self._ranks: list[Rank] = []
        self._pool = contextlib.ExitStack()

    def run(
        self, function: Callable[..., Any], *args: Any, patience: float = limits.STALL_SECONDS, **kwargs: Any
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank and return the results by rank.

        ``function`` is a module-level function; arguments and results are pickled.

        Raises:
            WorkersError: If any rank raises, dies, leaves something behind, is not done after ``limits.BODY_SECONDS``,
                or if all that are not done have used no processor time for ``patience`` seconds.
        """
        if not self._ranks:
            self._ranks = self._pool.enter_context(self._start(self.world_size))
        job = _pickle_job(function, args, kwargs)
        marks = [os.path.getsize(rank.output) for rank in self._ranks]
        outcomes = self._serve(job, patience)
        kinds = {outcome.kind for outcome in outcomes}
        if kinds not in ({"value"}, {"skip"}):
            self._fail(function, outcomes, marks, patience)
        if any(outcome.has_group for outcome in outcomes):
            # A rank that has called one collective more than others would meet them in the wrong ones from now on.
            met = self._serve(_MEET, patience)
            if {outcome.kind for outcome in met} != {"value"}:
                self._fail(function, met, marks, patience, "left its ranks in different collectives")
        if kinds == {"skip"}:
            pytest.skip(outcomes[0].content)
        return [pickle.loads(outcome.content) for outcome in outcomes]

    @property
    def num_processes(self) -> int:
        """How many there are now."""
        return len(self._ranks)

    def close(self) -> None:
        """End the processes."""
        self._ranks = []
        self._pool.close()

    def _serve(self, job: bytes, patience: float) -> list[_Outcome]:
        for rank in self._ranks:
            with contextlib.suppress(
                BrokenPipeError, ConnectionResetError
            ):  # it died between two jobs, which _collect finds out
                rank.connection.send_bytes(job)
        return self._collect(patience)

    def _collect(self, patience: float) -> list[_Outcome]:
        outcomes: dict[int, _Outcome] = {}
        pids = [rank.process.pid for rank in self._ranks]
        end, used, moved = time.monotonic() + limits.BODY_SECONDS, 0.0, time.monotonic()
        while len(outcomes) < self.world_size:
            now, seconds = time.monotonic(), _processor_seconds(pids)
            if seconds >= used + _IDLE_SECONDS:
                used, moved = seconds, now
            if now >= min(end, moved + patience):
                break
            waiting = {self._ranks[rank].connection: rank for rank in range(self.world_size) if rank not in outcomes}
            for connection in multiprocessing.connection.wait(list(waiting), min(1.0, patience)):
                rank = waiting[connection]
                try:
                    outcomes[rank] = _Outcome(*pickle.loads(connection.recv_bytes()))
                except (EOFError, ConnectionResetError):
                    self._ranks[rank].process.join(limits.GRACE_SECONDS)
                    outcomes[rank] = _Outcome("dead", f"ended with exit code {self._ranks[rank].process.exitcode}")
                if outcomes[rank].kind in ("error", "dead"):
                    end = min(end, time.monotonic() + limits.GRACE_SECONDS)
        self._dump_stacks([rank for rank in range(self.world_size) if rank not in outcomes])
        late = _Outcome("late", "had not ended; where it stood:")
        return [outcomes.get(rank, late) for rank in range(self.world_size)]

    def _dump_stacks(self, late: list[int]) -> None:
        """Let ranks write their stacks into their outputs, and wait until they have."""
        sizes = {self._ranks[rank].output: os.path.getsize(self._ranks[rank].output) for rank in late}
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._ranks[rank].process.pid, signal.SIGUSR1)
        end = time.monotonic() + limits.DUMP_SECONDS
        while any(os.path.getsize(path) == size for path, size in sizes.items()) and time.monotonic() < end:
            time.sleep(0.05)
        if late:
            time.sleep(0.5)  # a dump is written line by line

    def _fail(
        self,
        function: Callable[..., Any],
        outcomes: list[_Outcome],
        marks: list[int],
        patience: float,
        reason: str = "",
    ) -> NoReturn:
        """End the processes and raise what they report, each with what it has written since ``marks``."""
        if not reason and {outcome.kind for outcome in outcomes} & {"error", "dead"}:
            reason = "failed"
        reason = reason or f"hung (no progress for {patience:g} s, or no end after {limits.BODY_SECONDS:g} s)"
        lines = [f"{function.__qualname__} {reason} on {self.world_size} rank(s)"]
        for rank, outcome in enumerate(outcomes):
            lines.append(f"--- rank {rank}: {'ended well' if outcome.kind == 'value' else outcome.content}")
            with open(self._ranks[rank].output, errors="replace") as output:
                output.seek(marks[rank])
                lines.append(output.read()[-20_000:])
        self.close()
        raise WorkersError("\n".join(line.rstrip() for line in lines if line.strip()))


def _processor_seconds(pids: list[int | None]) -> float:
    """Of all that are still there."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total += times.user + times.system
    return total


def on_ranks(*sizes: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a body a test that runs it on so many ranks of a pool, or on each number of several.

    Parameters of the body are the test's; it may ask for the number, as ``world_size`` or ``num_ranks``. Without
    ``sizes``, that is a parameter of the test's own. ``conftest`` tells which numbers are slow.
    """

    def made(body: Callable[..., None]) -> Callable[..., None]:
        taken = inspect.signature(body).parameters
        marks = [mark.args[0] for mark in getattr(body, "pytestmark", []) if mark.name == "parametrize"]
        name = "num_ranks" if "num_ranks" in taken or any("num_ranks" in names for names in marks) else "world_size"

        names = ["workers", *([] if len(sizes) == 1 else [name]), *(key for key in taken if key != name)]
        parameters = [inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD) for key in names]
        signature = inspect.Signature(parameters)

        def test(*args: Any, **kwargs: Any) -> None:
            values = signature.bind(*args, **kwargs).arguments
            size = values.get(name, *sizes[:1])
            values["workers"](size).run(body, **{key: size if key == name else values[key] for key in taken})

        functools.update_wrapper(test, body)
        test.__signature__ = signature  # type: ignore[attr-defined]
        test.body = body  # type: ignore[attr-defined]
        body.__qualname__ += ".body"  # as ranks find it
        return pytest.mark.parametrize(name, sizes)(test) if len(sizes) > 1 else test

    return made


Pools = Callable[[int], Workers]
"""From a number of ranks to their pool."""


@contextlib.contextmanager
def pools(start: Start | None = None) -> Iterator[Pools]:
    """Yield a function that returns the pool of a world size, the same one each time; end all pools on leaving.

    Pools with more than ``MAX_RANKS`` processes together are not kept: those that have not been asked for the longest
    end, and start again when they are.
    """
    by_size: dict[int, Workers] = {}  # the latest last

    def pool_of(world_size: int) -> Workers:
        by_size[world_size] = by_size.pop(world_size, None) or Workers(world_size, start)
        for other in list(by_size)[:-1]:
            if (
                sum(pool.num_processes for pool in by_size.values() if pool.world_size != world_size) + world_size
                > MAX_RANKS
            ):
                by_size[other].close()
        return by_size[world_size]

    try:
        yield pool_of
    finally:
        for pool in by_size.values():
            pool.close()


@contextlib.contextmanager
def forked(world_size: int) -> Iterator[list[Rank]]:
    """Ranks as torchrun's, forked from the server."""
    with _started(world_size, fork_server()) as ranks:
        yield ranks


@contextlib.contextmanager
def spawned(world_size: int) -> Iterator[list[Rank]]:
    """Ranks as torchrun's, in processes that import everything themselves: a process that has asked for a GPU's driver
    cannot be forked, and where there is one, importing PyG asks.
    """
    with _started(world_size, multiprocessing.get_context("spawn")) as ranks:
        yield ranks


@contextlib.contextmanager
def _started(
    world_size: int, context: multiprocessing.context.SpawnContext | multiprocessing.context.ForkServerContext
) -> Iterator[list[Rank]]:
    # Held here as torchrun's agent holds it: no port can be lost between choosing and opening it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[Rank] = []
    with tempfile.TemporaryDirectory(prefix="pyg_dist_workers_") as folder, contextlib.ExitStack() as processes:
        for rank in range(world_size):
            here, there = context.Pipe()
            output = new_output(folder, rank)
            environ = _rank_environ(rank, world_size, store.port)
            process = context.Process(target=_serve_in, args=(environ, there, output), daemon=True)
            process.start()
            processes.callback(process.join)
            processes.callback(process.kill)
            processes.callback(here.close)
            there.close()
            ranks.append(Rank(process, here, output))
        yield ranks


def new_output(folder: str, rank: int) -> str:
    """The path of an empty file for what a rank writes."""
    path = os.path.join(folder, f"rank{rank}.txt")
    open(path, "wb").close()
    return path


def fork_server() -> multiprocessing.context.ForkServerContext:
    """The server that ranks are forked from; it has imported what ``preloaded`` and ``preloaded_convs`` list."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bytecode", "preloaded", "preloaded_convs"])
    # Thread pools are sized when their library is loaded, and modules found where the path was at the start.
    environ = {**_ENVIRON, **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")}
    folder = os.path.dirname(os.path.abspath(__file__))
    environ["PYTHONPATH"] = os.pathsep.join([folder, environ.get("PYTHONPATH", "")])
    with _starting, unittest.mock.patch.dict(os.environ, environ, clear=True):
        multiprocessing.forkserver.ensure_running()
    return context


def _rank_environ(rank: int, world_size: int, port: int) -> dict[str, str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
    environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size),
        GROUP_RANK="0", GROUP_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests", TORCHELASTIC_USE_AGENT_STORE="True", OMP_NUM_THREADS="1",
    )  # fmt: skip
    return environ


def _pickle_job(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if "<" in function.__qualname__:
        raise TypeError(f"Expected a module-level function (got {function.__qualname__}), since it is found by name")
    # By name and file, so that it does not matter under which name pytest has imported the test module. The arguments
    # are pickled apart: they may be of classes of that module.
    module = sys.modules[function.__module__]
    where = (function.__module__, inspect.getsourcefile(module), function.__qualname__)
    return pickle.dumps((sys.path, where, pickle.dumps((args, kwargs))))


def _serve_in(environ: dict[str, str], connection: Connection, output: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    serve(connection, output)


def serve(connection: Connection, output: str) -> None:
    """Run jobs until the pool is closed; the main function of a rank's process."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, sys.stderr)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends pytest, which ends the ranks
    torch.set_num_threads(1)
    importlib.import_module("preloaded")  # as it is, unless the server could not
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:  # pytest has ended
            os._exit(0)
        kind, content = _meet() if job == _MEET else _run_job(job)
        connection.send_bytes(pickle.dumps((kind, content, dist.is_available() and dist.is_initialized())))


def _run_job(job: bytes) -> tuple[str, Any]:
    global _left
    try:
        sys.path[:], (module, file, qualname), arguments = pickle.loads(job)
        function: Any = _import(module, file)
        for name in qualname.split("."):
            function = getattr(function, name)
        args, kwargs = pickle.loads(arguments)
        before = _left or leftovers.state()
        leftovers.fresh_generators()
        try:
            outcome = "value", pickle.dumps(function(*args, **kwargs))
        except pytest.skip.Exception as skip:
            outcome = "skip", str(skip)
        del args, kwargs
        left, _left = leftovers.since(before)
        return ("error", f"{qualname} left behind: {'; '.join(left)}") if left else outcome
    except BaseException:  # pytest.fail and SystemExit are no Exception, and a rank must answer
        return "error", traceback.format_exc()


def _meet() -> tuple[str, Any]:
    """One collective, in which every rank must be the same number of meetings along."""
    global _num_meetings
    _num_meetings += 1
    try:
        numbers = torch.tensor([_num_meetings, -_num_meetings])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
        assert numbers.tolist() == [_num_meetings, -_num_meetings], f"expected {_num_meetings}, got {numbers.tolist()}"
        return "value", None
    except BaseException:
        return "error", traceback.format_exc()


def _import(name: str, file: str) -> Any:
    global _left
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
        _left = None
        while gc.collect():  # what hangs on an autograd graph in garbage is found by the next one
            pass
        gc.freeze()  # the collections after each body pass over all that stays
    return sys.modules[name]
