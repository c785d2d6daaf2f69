"""What a measurement was taken on: recorded beside every figure."""

from __future__ import annotations

import gzip
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from pyg_dist.backend.ops import library

REPOSITORY = Path(__file__).resolve().parent.parent


def describe() -> dict[str, Any]:
    """Return CPU, memory, versions, instruction set, load, date and commit, ready for JSON."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "cpu": _cpu_model(),
        "last_cache_mib": library.last_cache_bytes() >> 20,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "load_average": round(os.getloadavg()[0], 2),  # before the start: well above 0, others were at work too
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_geometric": importlib.metadata.version("torch_geometric"),
        "pyg_dist": library.build_info() | {"isa": library.isa()},
    }


def earlier_results(path: Path) -> Any:
    """Return what the JSON file has, or the compressed one beside it that git keeps; None if there is neither."""
    if path.exists():
        return json.loads(path.read_text())
    kept = path.with_name(f"{path.name}.gz")
    return json.loads(gzip.decompress(kept.read_bytes())) if kept.exists() else None


def processor() -> str:
    """Return a name of the processor for file names, its last cache included: ``amd-epyc-32m``."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\([^)]*\)|@.*", "", _cpu_model().lower()))
    return "-".join([*words, f"{library.last_cache_bytes() >> 20}m"])


def commit() -> str:
    """Return the commit of the source tree, with "+" where the tree differs from it; "unknown" outside a repository."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
