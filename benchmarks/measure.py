"""Fair timing on a machine that is never quite idle: variants take turns, and medians are compared.

Each variant lives in processes of its own, since memory is measured per process and threads are set per process. All of
them are alive at once and asleep but for the one whose turn it is.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

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
class Measurement:
    """What was measured of one variant.

    Attributes:
        seconds: one entry a turn: the median of the turn's epochs, of the slowest rank.
        setup_seconds: what ``make`` took (reading the graph, partitioning).
        setup_mib: the largest resident memory up to the end of ``make``, by rank.
        peak_mib: the largest resident memory of all, by rank.
    """

    seconds: tuple[float, ...]
    setup_seconds: float
    setup_mib: tuple[float, ...]
    peak_mib: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median of the turns."""
        return statistics.median(self.seconds)


class _Rank(NamedTuple):
    process: SpawnProcess
    connection: Connection


def interleaved(
    variants: Sequence[Variant],
    num_rounds: int,
    epochs_per_turn: int,
    num_warmup: int,
    progress: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> dict[str, Measurement]:
    """Run every variant once a round, each round beginning with the next variant.

    Args:
        variants: what to compare.
        num_rounds: turns of each variant that count.
        epochs_per_turn: epochs in a turn; a turn's time is their median.
        num_warmup: turns before, which do not count.
        progress: wraps the turns, for a progress bar.
    """
    order = [variants[(r + k) % len(variants)] for r in range(num_warmup + num_rounds) for k in range(len(variants))]
    seconds: dict[str, list[float]] = {variant.name: [] for variant in variants}
    with _started(variants) as ranks_of:
        # One after another: they would disturb each other's partitioning time, and add up their peaks.
        setup = {variant.name: _ask(ranks_of[variant.name], 0) for variant in variants}
        for turn in progress(range(len(order))):
            name = order[turn].name
            answers = _ask(ranks_of[name], epochs_per_turn)
            if turn >= num_warmup * len(variants):
                seconds[name].append(max(taken for taken, _ in answers))
        peak = {variant.name: _ask(ranks_of[variant.name], None) for variant in variants}
    return {
        name: Measurement(
            seconds=tuple(seconds[name]),
            setup_seconds=max(taken for taken, _ in setup[name]),
            setup_mib=tuple(mib for _, mib in setup[name]),
            peak_mib=tuple(mib for _, mib in peak[name]),
        )
        for name in seconds
    }


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


def _ask(ranks: list[_Rank], request: int | None) -> list[tuple[float, float]]:
    """Let all ranks of a variant do something; each answers (seconds, MiB so far)."""
    for rank in ranks:
        rank.connection.send(request)
    try:
        return [rank.connection.recv() for rank in ranks]
    except EOFError:
        raise RuntimeError("Expected an answer of every process (one has ended); its error stands above") from None


def _serve(connection: Connection, variant: Variant) -> None:
    """The main function of a variant's process: 0 sets up, n runs n epochs, None only answers."""
    import torch

    torch.set_num_threads(variant.num_threads)
    epoch: Epoch | None = None
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        taken = 0.0
        if request == 0:
            start = time.perf_counter()
            epoch = variant.make(*variant.arguments)
            taken = time.perf_counter() - start
        elif request is not None:
            assert epoch is not None
            taken = statistics.median(_time(epoch) for _ in range(request))
        connection.send((taken, _peak_mib()))


def _time(epoch: Epoch) -> float:
    start = time.perf_counter()
    epoch()
    return time.perf_counter() - start


def _peak_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB on Linux
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


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
