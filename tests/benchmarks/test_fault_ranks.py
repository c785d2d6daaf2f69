"""Faults of ``benchmarks/faults.py`` that no other test has: what is said, the status, and that no line is lost."""

from __future__ import annotations

import faults
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["a crash (SIGSEGV)", "SIGTERM, nobody asks", "os._exit(3)"])
def test_a_process_that_is_gone_ends_the_others(fault: str) -> None:
    ended = faults.launch("by hand", faults.RANKS, "--fault", fault)
    assert faults.wrong(fault, "by hand", ended) == "", ended.said
