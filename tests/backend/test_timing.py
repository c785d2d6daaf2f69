"""Phases by the marks of a clock that knows their distances only when it has settled, as a GPU's events do."""

from __future__ import annotations

from pyg_dist.backend import timing
from pyg_dist.backend.timing import PHASES, HostClock, Recorder


class QueuedClock(HostClock):
    """One second a mark."""

    def __init__(self) -> None:
        self.count = 0
        self.has_settled = False

    def now(self) -> int:
        self.count += 1
        return self.count

    def settle(self) -> None:
        self.has_settled = True

    def seconds(self, begin: int, end: int) -> float:
        assert self.has_settled
        return float(end - begin)


def test_own_time_leaves_out_what_runs_inside() -> None:
    recorder = Recorder(True, QueuedClock())
    timing.record(recorder)
    try:
        with timing.phase("aggregate"):
            with timing.phase("pack"):
                pass
            with timing.phase("exchange"), timing.phase("quantize"):
                pass
        with timing.phase("dense"):
            pass
    finally:
        timing.record(None)
    seconds, spans = recorder.end()
    assert seconds == 11
    assert [(PHASES[s.phase], s.begin, s.seconds, s.own) for s in spans] == [
        ("pack", 2, 1, 1),
        ("quantize", 5, 1, 1),
        ("exchange", 4, 3, 2),
        ("aggregate", 1, 7, 3),
        ("dense", 9, 1, 1),
    ]
