"""How the system schedules gloo's threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from workers import Pools

import pyg_dist


def policies() -> list[int]:
    pyg_dist.init()
    names = Path("/proc/self/task").glob("*/comm")
    return [os.sched_getscheduler(int(n.parent.name)) for n in names if n.read_text() == "gloo_tcp_loop\n"]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux alone has it")
def test_gloo_s_threads_do_not_interrupt_who_sends(workers: Pools) -> None:
    """A thread that wakes would ask for the sender's lock again and again while the sender cannot go on."""
    for found in workers(2).run(policies):
        assert found
        assert set(found) == {os.SCHED_BATCH}
