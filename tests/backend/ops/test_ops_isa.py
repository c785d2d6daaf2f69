"""Every instruction set of this machine passes the tests of the kernels, and so do GPUs' kernels in an emulator."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from limits import COMMAND_SECONDS

from pyg_dist.backend.ops import library
from pyg_dist.errors import LibraryNotBuiltError

LEVEL = os.environ.get("PYG_DIST_ISA")
KERNELS = {
    "test_ops.py": "(spmm or sddmm or rows or relu) and not blocks",  # these are cut above the kernels
    "test_ops_keyed.py": "keyed",
    "test_ops_attention.py": "kernels",
    "test_ops_extremes.py": "kernels or torch",
    "test_quantize.py": "not unbiased and not opcheck",
}
SIMT = {
    **KERNELS,
    "test_ops.py": "spmm or sddmm or rows",
    "test_ops_permutation.py": "reference or threads or fixed",
    "test_ops_patterns.py": "transposes or places or restrict",
    "../../nn/test_norms.py": "gradcheck or output or reference or columns",
}
"""What has kernels for GPUs."""


def run_with_isa(isa: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Threads sleep while they wait: tests may share the machine with others."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYG_DIST_ISA": isa, "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )


def test_isa_and_build_info() -> None:
    info = library.build_info()
    assert set(info) == {"version", "torch", "compiler", "levels"}
    assert library.isa() in [*info["levels"].split(","), "simt"]
    assert library.devices()["cpu"] == library.isa()
    assert LEVEL is None or library.isa() == LEVEL


@pytest.fixture(scope="module")
def refusal() -> str:
    """What an unknown instruction set is told."""
    result = run_with_isa("avx1024", "-c", "from pyg_dist.backend import ops")
    assert result.returncode != 0
    return result.stderr.strip().splitlines()[-1]


def test_every_flag_is_asked_for_before_a_level_is_chosen() -> None:
    """A level whose kernels use what the machine lacks would end in an illegal instruction."""
    root = Path(__file__).parents[3]
    table = (root / "csrc/cpu/table.cpp").read_text()
    flags = re.search(r"set\(FLAGS_avx2 (.*)\)", (root / "CMakeLists.txt").read_text())
    assert flags is not None
    asked = re.search(r"\{avx2::kTable,(.*?)\},", table, re.DOTALL)
    assert asked is not None
    for flag in flags[1].split():
        assert f'__builtin_cpu_supports("{flag.removeprefix("-m")}")' in asked[1], flag


def test_unknown_isa_is_refused(refusal: str) -> None:
    assert "OptionError: PYG_DIST_ISA: expected an instruction set of this machine" in refusal
    assert "got 'avx1024'" in refusal


@pytest.mark.skipif(LEVEL is not None, reason="one is forced")
@pytest.mark.slow
@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "sve256", "sve512"])
def test_every_instruction_set(isa: str, refusal: str) -> None:
    if isa == library.isa():
        return  # this very run
    if not re.search(rf"\b{isa}\b", refusal):
        pytest.skip(f"this build or machine has no {isa}")
    run_kernels(isa, KERNELS)


@pytest.fixture(scope="module")
def simt() -> None:
    """Skips where the emulator was not built."""
    try:
        library._find("pyg_dist_simt")
    except LibraryNotBuiltError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.skipif(LEVEL is not None, reason="one is forced")
def test_kernels_for_gpus(simt: None) -> None:
    run_kernels("simt", SIMT)


def run_kernels(isa: str, tests_of: dict[str, str]) -> None:
    files = [str(Path(__file__).parent / file) for file in tests_of]
    chosen = " or ".join(f"{Path(file).name} and ({tests})" for file, tests in tests_of.items())
    result = run_with_isa(isa, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, *files)
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout


TRAINING = (
    "conv/test_equality.py::test_every_option_in_float64[2-hybrid]",
    "conv/test_grid_equality.py::test_meshes_in_float64[2]",
    "conv/test_quantized.py::test_training_repeats_and_stays_near_full_precision[hybrid]",
)
"""Against stock PyG: the halo and the grid layout on two ranks, and quantized messages on three."""


@pytest.mark.slow
@pytest.mark.skipif(LEVEL is not None, reason="one is forced")
def test_training_by_kernels_for_gpus(simt: None) -> None:
    tests = Path(__file__).parents[2]
    result = run_with_isa(
        "simt", "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(tests / test) for test in TRAINING)
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert f"{len(TRAINING)} passed" in result.stdout
