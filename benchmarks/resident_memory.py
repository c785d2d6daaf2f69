"""Resident memory of this process, now and at its largest; from ``/proc`` where there is one."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def current_mib() -> float:
    """Return what is resident now (without ``/proc``: the largest so far)."""
    return _field_mib("VmRSS") or _largest_mib()


def mapped_mib() -> float:
    """Return what is resident of files, the code of libraries among them (without ``/proc``: nothing)."""
    return _field_mib("RssFile") or 0.0


def peak_mib() -> float:
    """Return the largest since :func:`forget_peak` (without ``/proc``: since the start)."""
    return _field_mib("VmHWM") or _largest_mib()


def forget_peak() -> None:
    """Begin anew with the peak, where the system can."""
    with contextlib.suppress(OSError):
        _CLEAR.write_text("5")  # proc(5): resets VmHWM to the current value


def _field_mib(name: str) -> float | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((round(int(line.split()[1]) / 1024, 1) for line in lines if line.startswith(f"{name}:")), None)


def _largest_mib() -> float:
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)
