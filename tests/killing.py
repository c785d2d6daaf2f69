"""Functions that are killed somewhere in the middle, in a process of their own."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch


def run_killed(function: Callable[[], Any], after: int) -> bool:
    """Run in a process of its own that is killed at the call number ``after``; whether it came to that."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == after:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.setprofile(count)
        try:
            function()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def calls_of(function: Callable[[], Any]) -> int:
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
