"""How much of the processors others have used while something was measured."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

UNKNOWN = -1.0


@dataclass
class Load:
    """What was observed: ``own_seconds`` is for the observer to fill in, the processor time of what it measures."""

    own_seconds: float = 0.0
    busy_seconds: float | None = None
    elapsed_seconds: float = 0.0

    @property
    def foreign_share(self) -> float:
        """Busy processor time that was not our own, over all there was; ``UNKNOWN`` where the system does not tell."""
        if self.busy_seconds is None or not self.elapsed_seconds:
            return UNKNOWN
        foreign = self.busy_seconds - self.own_seconds
        return max(0.0, foreign) / (self.elapsed_seconds * (os.cpu_count() or 1))


@contextmanager
def watched() -> Iterator[Load]:
    """Observe the whole machine for the duration of the block."""
    load, before, start = Load(), _busy_seconds(), time.perf_counter()
    yield load
    after, load.elapsed_seconds = _busy_seconds(), time.perf_counter() - start
    if before is not None and after is not None:
        load.busy_seconds = after - before


def _busy_seconds() -> float | None:
    """Processor time of everything, on all processors, since the start of the machine; time stolen by a host too."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_guest = map(int, first)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
