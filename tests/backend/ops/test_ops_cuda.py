"""The kernels for GPUs where there is none: what nvcc makes of them. ``test_ops_isa.py`` runs them."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from limits import COMMAND_SECONDS

pytestmark = pytest.mark.slow  # nvcc takes one and a half minutes

ROOT = Path(__file__).parents[3]
CSRC, TORCH = ROOT / "csrc", ROOT / "third_party/torch/include"
ARCHITECTURE = "90"  # one of those in csrc/cuda/cuda.cmake
FLAGS = ["-std=c++20", "-Xcompiler=-Wall,-Wextra,-fPIC,-fvisibility=hidden", "-Werror=all-warnings", "-I", str(CSRC)]
OF_CUDA = {"aoti_torch_get_current_cuda_stream", "torch_c10_cuda_check_msg", "torch_c10_cuda_free_error_msg"}
"""What libtorch_cpu lacks."""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def nvcc() -> str:
    found = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if found is None:
        pytest.skip("needs nvcc")
    return found


class Compiled(NamedTuple):
    """All kernels."""

    path: Path
    said: str
    """By ptxas, of each one."""
    cubin: Path


@pytest.fixture(scope="module")
def kernels(nvcc: str, pytestconfig: pytest.Config) -> Compiled:
    """Compiled once, in one unit, which takes half the time of a unit a file; again when a source or nvcc changes."""
    unit = "".join(f'#include "cuda/{source.name}"\n' for source in sorted(CSRC.glob("cuda/*.cu")))
    command = [nvcc, *FLAGS, "-O1", f"-arch=sm_{ARCHITECTURE}", "-Xptxas=-v", "-keep"]
    known = hashlib.sha256(f"{run(nvcc, '--version').stdout}{command}{unit}".encode())
    for source in sorted(path for path in CSRC.rglob("*") if path.suffix in (".cu", ".cuh", ".h")):
        known.update(f"{source}\n{source.read_text()}".encode())
    folder = pytestconfig.cache.mkdir("kernels") / known.hexdigest()
    path, said = folder / "kernels.o", folder / "said.txt"
    with (folder.parent / "lock").open("w") as lock:  # another worker may compile them
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not said.exists():
            for old in folder.parent.iterdir():
                shutil.rmtree(old, ignore_errors=True)
            folder.mkdir(exist_ok=True)
            (folder / "kernels.cu").write_text(unit)
            done = run(*command, "--keep-dir", folder, "-c", folder / "kernels.cu", "-o", path)
            for made in folder.iterdir():
                if made != path and made.suffix != ".cubin":
                    made.unlink()
            said.write_text(done.stderr)
    return Compiled(path, said.read_text(), next(folder.glob("*.cubin")))


def test_no_kernel_spills_registers(kernels: Compiled) -> None:
    found = re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores", kernels.said, re.DOTALL)
    found = [(name, spilled) for name, spilled in found if "pyg_dist" in name and "3cub" not in name]  # not CUB's own
    assert len(found) > 200
    assert [name for name, spilled in found if spilled != "0"] == []


class Machine(NamedTuple):
    """What ptxas has made of a kernel."""

    num_instructions: int
    num_registers: int
    num_matches: int
    """MATCH.ANY: lanes find out who takes part in a shuffle, at each one."""
    num_local: int
    """Loads and stores of local memory."""


@pytest.fixture(scope="module")
def machine(kernels: Compiled) -> dict[str, Machine]:
    """By the kernel's name in C++."""
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin/nvdisasm"
    found = shutil.which("nvdisasm") or (wheel if wheel.exists() else None)
    if found is None:
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    text = run(found, "-c", kernels.cubin).stdout
    registers = dict(re.findall(r"Compiling entry function '(\w+)'.*?Used (\d+) registers", kernels.said, re.DOTALL))
    bodies = dict(re.findall(r"^\.text\.(\w+):\n(.*?)(?=^\.text\.|\Z)", text, re.DOTALL | re.MULTILINE))
    names = run("c++filt", *bodies).stdout.splitlines()
    made = {}
    for name, (mangled, body) in zip(names, bodies.items(), strict=True):
        lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", body, re.MULTILINE)
        counts = [sum(bool(re.search(word, line)) for line in lines) for word in (r"\bMATCH\b", r"\b(LDL|STL)\b")]
        short = re.sub(r"pyg_dist::(gpu::)?|\(anonymous namespace\)::", "", name)
        made[short[short.index("<") + 1 :]] = Machine(len(lines), int(registers[mangled]), *counts)
    return made


SHUFFLING = ("ReduceChunks<", "ReduceHeads<", "Dots<", "EdgeGradients<", "SumParameters<")
CEILINGS = {
    # A product of float rows that multiplies: before its own form 2,200 instructions and 72 registers.
    "ReduceChunks<SumEdges<float, float, 4, 1, false>": (1300, 64),
    "ReduceChunks<SumEdges<BFloat16, BFloat16, 8, 1, false>": (1700, 64),
    "Dots<float, 4>": (350, 64),
    # Packing: 6,448 instructions while rows that are summed as they are read were unrolled as others are.
    "PackRows<float, 2, 1>": (2200, 64),
    "PackRows<BFloat16, 8, 1>": (2200, 64),
    # Attention, forward and backward: before warps took every step together 2,264 and 3,104 instructions.
    "ReduceHeads<float, (AttentionForm)0, 4, 2, true>": (1600, 112),
    "ReduceHeads<float, (AttentionForm)0, 4, 2, false>": (2000, 128),
}
"""The most instructions and registers of some kernels, by the begin of the name."""


def test_machine_code(machine: dict[str, Machine]) -> None:
    """What no emulator shows: numbers of a GPU's instructions, as far as they can be known without one."""
    assert sum(name.startswith(SHUFFLING) for name in machine) > 100
    assert [name for name, code in machine.items() if name.startswith(SHUFFLING) and code.num_matches] == []
    assert [name for name, code in machine.items() if name.startswith(SHUFFLING) and code.num_local] == []
    for begin, (num_instructions, num_registers) in CEILINGS.items():
        (code,) = (code for name, code in machine.items() if name.startswith(begin))
        assert code.num_instructions <= num_instructions, (begin, code)
        assert code.num_registers <= num_registers, (begin, code)


def test_the_library_links_and_asks_torch_for_what_is_stable(nvcc: str, kernels: Compiled, tmp_path: Path) -> None:
    """Every symbol of torch's is in the headers of 2.10, and in libtorch_cpu, but for three."""
    names = {"TORCH_TARGET_VERSION": "0x020a000000000000", "PYG_DIST_TABLE_HASH": '"none"', "USE_CUDA": "1"}
    names["PYG_DIST_CUDA_BUILD"] = f'"{ARCHITECTURE} of CUDA 13.0"'
    defined = [f"-D{name}={value}" for name, value in names.items()]
    (tmp_path / "device.o").parent.mkdir(exist_ok=True)
    cuda = Path(shutil.which(nvcc) or nvcc).resolve().parents[1] / "include"
    compiler = os.environ.get("CXX", "c++")
    system = ["-isystem", TORCH, "-isystem", cuda]
    device, library = tmp_path / "device.o", tmp_path / "libpyg_dist_cuda.so"
    flags = ["-std=c++20", "-O0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror", "-I", CSRC]
    run(compiler, *flags, *system, *defined, "-c", CSRC / "ops/cuda/device.cpp", "-o", device)
    run(nvcc, "-shared", "-cudart=static", device, kernels.path, "-o", library)

    undefined = set(re.findall(r" U (\w+)", run("nm", "-D", "--undefined-only", library).stdout))
    assert not {name for name in undefined if re.match(r"_ZNK?(St)?\d*(2at|5torch|3c10)", name)}
    of_torch = {name for name in undefined if re.match(r"aoti_|torch_", name)}
    headers = "".join(path.read_text() for path in TORCH.rglob("shim*.h"))
    assert {name for name in of_torch if not re.search(rf"\b{name}\b", headers)} == set()
    cpu = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
    assert {name for name in of_torch if not hasattr(cpu, name)} | OF_CUDA == OF_CUDA
    assert "aoti_torch_get_current_cuda_stream" in of_torch
    assert not {name for name in undefined if name.startswith("cuda")}  # the runtime is inside
