"""Fair timing on a machine that is never quite idle: variants take turns, disturbed turns are repeated.

Each variant lives in processes of its own, since memory is measured per process and threads are set per process. All of
them are alive at once and asleep but for the one whose turn it is. A turn is disturbed if processors were busy with
anything else meanwhile (:mod:`foreign_load`).
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

import foreign_load
import resident_memory

Epoch = Callable[[], object]


@dataclass(frozen=True)
class Variant:
    """One way to run the same work.

    Attributes:
        name: for the table.
        make: a module-level function that is called as ``make(*arguments)`` in each process, and returns the work.
        arguments: of ``make``.
        num_ranks: processes that run it together.
        num_threads: threads of each.
    """

    name: str
    make: Callable[..., Epoch]
    arguments: tuple[Any, ...] = ()
    num_ranks: int = 1
    num_threads: int = 1


@dataclass(frozen=True)
class Schedule:
    """How long to measure.

    Attributes:
        num_rounds: turns of each variant that count.
        epochs_per_turn: epochs in a turn; a turn's time is their median.
        num_warmup: turns of each variant before, which do not count.
        max_foreign: the share of the processors that others may have used in a turn that counts.
        num_retakes: how often a disturbed turn is repeated; after that the least disturbed one counts.
        pause_seconds: before each repetition, since most disturbances pass soon.
    """

    num_rounds: int = 7
    epochs_per_turn: int = 3
    num_warmup: int = 1
    max_foreign: float = 0.05
    num_retakes: int = 10
    pause_seconds: float = 1.0


@dataclass(frozen=True)
class Measurement:
    """What was measured of one variant. Memory is resident memory, by rank.

    Attributes:
        seconds: one entry a turn: the median of the turn's epochs, of the slowest rank.
        cpu_seconds: processor time of an epoch, one entry a turn: the median of the turn's epochs, of the busiest rank.
        foreign: the share of the processors that others used, one entry a turn; -1 where the system does not tell.
        num_retaken: turns that were disturbed and repeated.
        setup_seconds: what ``make`` took (reading the graph, partitioning).
        imports_mib: held before ``make``.
        setup_peak_mib: the largest during ``make``.
        peak_mib: the largest during the epochs, those of the warm-up included.
    """

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    foreign: tuple[float, ...]
    num_retaken: int
    setup_seconds: float
    imports_mib: tuple[float, ...]
    setup_peak_mib: tuple[float, ...]
    peak_mib: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the turns."""
        return statistics.median(self.seconds)

    @property
    def used_mib(self) -> tuple[float, ...]:
        """What graph, model and epochs take: the peak of the epochs above the imports, by rank."""
        return tuple(round(peak - base, 1) for peak, base in zip(self.peak_mib, self.imports_mib, strict=True))


class Turn(NamedTuple):
    """The share of the processors that others used in a turn, its time, and the processor time of its busiest rank."""

    foreign: float
    seconds: float
    cpu_seconds: float = 0.0


class _Answer(NamedTuple):
    """What a process says after each request."""

    seconds: float
    epoch_cpu_seconds: float  # the median
    cpu_seconds: float
    resident_mib: float  # before the request
    peak_mib: float  # since the set-up; the answer to the set-up has the peak up to then


class _Rank(NamedTuple):
    process: SpawnProcess
    connection: Connection


def interleaved(
    variants: Sequence[Variant], schedule: Schedule, progress: Callable[[Iterable[int]], Iterable[int]] = iter
) -> dict[str, Measurement]:
    """Run every variant once a round, each round beginning with the next variant; ``progress`` wraps the turns."""
    num_rounds = schedule.num_warmup + schedule.num_rounds
    order = [variants[(r + k) % len(variants)] for r in range(num_rounds) for k in range(len(variants))]
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    cpu_seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    foreign: dict[str, list[float]] = {variant.name: [] for variant in variants}
    num_retaken = dict.fromkeys(seconds, 0)
    with _started(variants) as ranks_of:
        # One after another: they would disturb each other's partitioning time, and add up their peaks.
        setup = {variant.name: _ask(ranks_of[variant.name], 0) for variant in variants}
        last: dict[str, list[_Answer]] = {}
        for turn in progress(range(len(order))):
            name = order[turn].name
            if turn < schedule.num_warmup * len(variants):
                last[name] = _ask(ranks_of[name], schedule.epochs_per_turn)
                continue

            def take(name: str = name) -> Turn:
                with foreign_load.watched() as load:
                    last[name] = _ask(ranks_of[name], schedule.epochs_per_turn)
                    load.own_seconds = sum(answer.cpu_seconds for answer in last[name])
                slowest = max(answer.seconds for answer in last[name])
                return Turn(load.foreign_share, slowest, max(answer.epoch_cpu_seconds for answer in last[name]))

            counted, retakes = least_disturbed(take, schedule)
            foreign[name].append(round(counted.foreign, 3))
            seconds[name].append(counted.seconds)
            cpu_seconds[name].append(counted.cpu_seconds)
            num_retaken[name] += retakes
    return {
        name: Measurement(
            seconds=tuple(seconds[name]),
            cpu_seconds=tuple(cpu_seconds[name]),
            foreign=tuple(foreign[name]),
            num_retaken=num_retaken[name],
            setup_seconds=max(answer.seconds for answer in setup[name]),
            imports_mib=tuple(answer.resident_mib for answer in setup[name]),
            setup_peak_mib=tuple(answer.peak_mib for answer in setup[name]),
            peak_mib=tuple(answer.peak_mib for answer in last[name]),
        )
        for name in seconds
    }


def least_disturbed(take: Callable[[], Turn], schedule: Schedule) -> tuple[Turn, int]:
    """Call ``take`` until a turn is undisturbed, at most as the schedule allows; return the best, and the repeats."""
    turns = [take()]
    while turns[-1].foreign > schedule.max_foreign and len(turns) <= schedule.num_retakes:
        time.sleep(schedule.pause_seconds)
        turns.append(take())
    return min(turns), len(turns) - 1


@contextmanager
def _started(variants: Sequence[Variant]) -> Iterator[dict[str, list[_Rank]]]:
    ranks_of = {variant.name: _start(variant) for variant in variants}
    try:
        yield ranks_of
    finally:
        for ranks in ranks_of.values():
            for rank in ranks:
                rank.connection.close()  # which ends an idle process
        for ranks in ranks_of.values():
            for rank in ranks:
                rank.process.join(10)
                rank.process.kill()


def _start(variant: Variant) -> list[_Rank]:
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    ranks = []
    for number in range(variant.num_ranks):
        here, there = context.Pipe()
        environ = {"OMP_NUM_THREADS": str(variant.num_threads)}
        if variant.num_ranks > 1:
            environ |= {"RANK": str(number), "WORLD_SIZE": str(variant.num_ranks)}
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        process = context.Process(target=_serve, args=(there, variant), daemon=True)
        with _environment(environ):  # before the start: thread pools are sized when their library is loaded
            process.start()
        there.close()
        ranks.append(_Rank(process, here))
    return ranks


def _ask(ranks: list[_Rank], num_epochs: int) -> list[_Answer]:
    """Let all ranks of a variant run epochs, or set up (0)."""
    for rank in ranks:
        rank.connection.send(num_epochs)
    try:
        return [rank.connection.recv() for rank in ranks]
    except EOFError:
        raise RuntimeError("Expected an answer of every process (one has ended); its error stands above") from None


def _bind(variant: Variant) -> None:
    """Take as many cores as the process has threads, others than the variant's other ranks, as mpirun does."""
    if hasattr(os, "sched_setaffinity"):
        cores, first = sorted(os.sched_getaffinity(0)), int(os.environ.get("RANK", "0")) * variant.num_threads
        own = cores[first : first + variant.num_threads]
        if len(own) == variant.num_threads:
            os.sched_setaffinity(0, own)


def _serve(connection: Connection, variant: Variant) -> None:
    """The main function of a variant's process: 0 sets up, n runs n epochs."""
    import torch

    from pyg_dist.backend.ops.memory import release_free_memory

    torch.set_num_threads(variant.num_threads)
    _bind(variant)
    epoch: Epoch | None = None
    while True:
        try:
            num_epochs = connection.recv()
        except EOFError:
            return
        resident, begin = resident_memory.current_mib(), _now()
        if num_epochs:
            assert epoch is not None
            seconds, cpu_seconds = map(statistics.median, zip(*(_time(epoch) for _ in range(num_epochs)), strict=True))
        else:
            epoch = variant.make(*variant.arguments)
            seconds, cpu_seconds = (now - then for now, then in zip(_now(), begin, strict=True))
        peak = resident_memory.peak_mib()
        connection.send(_Answer(seconds, cpu_seconds, time.process_time() - begin[1], resident, peak))
        if not num_epochs:
            gc.collect()
            release_free_memory()  # what the set-up has left is nothing of the epochs'
            resident_memory.forget_peak()


def _time(epoch: Epoch) -> tuple[float, float]:
    """Seconds, and processor seconds."""
    begin = _now()
    epoch()
    return time.perf_counter() - begin[0], time.process_time() - begin[1]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    kept = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)
