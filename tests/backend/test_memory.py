"""Freed blocks are kept: measured by page faults, in processes of their own since the setting is the process's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from pyg_dist.backend import memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

print(int(memory.keep_freed_memory()))
taken = []
for turn in range(8):
    before = faults()
    block = torch.ones(25_000_000)
    taken.append(faults() - before)
    del block
print(min(taken))  # a kept block is not always taken for the next one, but it is for most
held = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096
before = held()
memory.release_free_memory()
print(before - held())
"""
BLOCK = 100_000_000


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
@pytest.mark.parametrize("setting", ["1", ""])
def test_freed_blocks_are_kept_until_they_are_released(setting: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYG_DIST_KEEP_MEMORY": setting},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    kept, faults, released = (int(line) for line in result.stdout.split())
    if setting != "1":
        assert not kept
        assert faults > 40  # of huge pages at least
        return
    if not kept:
        pytest.skip("the C library is not glibc")
    assert faults < 40
    assert released > BLOCK / 2
