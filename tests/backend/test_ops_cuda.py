"""The kernels for GPUs where there is none: what nvcc makes of them. ``test_ops_isa.py`` runs them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from limits import COMMAND_SECONDS

CSRC = Path(__file__).parents[2] / "csrc"
ARCHITECTURE = "sm_90"


def nvcc() -> str:
    found = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if found is None:
        pytest.skip("needs nvcc")
    return found


@pytest.mark.parametrize("source", sorted(CSRC.glob("cuda/*.cu")), ids=lambda path: path.name)
def test_kernels_compile_without_spills(source: Path, tmp_path: Path) -> None:
    """One architecture of those in ``csrc/cuda/cuda.cmake``."""
    flags = ["-std=c++20", "-O3", f"-arch={ARCHITECTURE}", "-Xptxas=-v", "-Xcompiler=-Wall,-Wextra", "-I", str(CSRC)]
    result = subprocess.run(
        [nvcc(), *flags, "-Werror=all-warnings", "-c", str(source), "-o", str(tmp_path / "kernels.o")],
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    kernels = re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores", result.stderr, re.DOTALL)
    assert kernels or "__global__" not in source.read_text()
    assert [name for name, spilled in kernels if spilled != "0"] == []
