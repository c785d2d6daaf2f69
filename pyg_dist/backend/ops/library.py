"""Finds and loads the native library, once per process.

Importing this module loads it, so that ``torch.ops.pyg_dist`` is complete afterwards; ``csrc/schema.cpp`` lists what is
in there. ``PYG_DIST_ISA`` forces an instruction set, one of those of :func:`isa`; the machine's best is the default.
Where torch has CUDA, the kernels for GPUs are loaded, too; :func:`no_cuda` says why they are not.
"""

from __future__ import annotations

import os
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from pyg_dist.errors import LibraryNotBuiltError, OptionError

_REMEDY = "run `make` in the source folder, or `pip install pyg-dist`"
_REMEDIES = {
    "pyg_dist": _REMEDY,
    "pyg_dist_cuda": "build with nvcc and PYG_DIST_CUDA=1",
    "pyg_dist_simt": "`make` builds it in the source folder, for tests alone",
}
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_SIMT = "simt"
"""The kernels for GPUs, run on the CPU by ``tests/simt``."""


def _find(name: str = "pyg_dist") -> Path:
    """A library in one of the package's folders: in editable mode there are two, the source and the installer's."""
    file = f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"
    spec = find_spec("pyg_dist")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    for path in (folder / "lib" / file for folder in folders):
        if path.exists():
            return path
    raise LibraryNotBuiltError(
        f"expected the native library lib/{file} in {' or '.join(map(str, folders))}, found none; {_REMEDIES[name]}"
    )


def _load(name: str) -> None:
    path = _find(name)
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise LibraryNotBuiltError(
            f"expected a native library for torch {torch.__version__}, got {str(error).splitlines()[0]}; "
            f"{_REMEDIES[name]}"
        ) from error


def _load_cuda() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} has no CUDA"
    try:
        _load("pyg_dist_cuda")
    except LibraryNotBuiltError as error:
        return str(error)
    if "cuda" not in devices():
        return f"it was built from other sources; {_REMEDIES['pyg_dist_cuda']}"
    torch.cuda._lazy_call(_check_gpu)  # type: ignore[no-untyped-call]  # once CUDA starts: no import does that
    return None


def _check_gpu() -> None:
    """Find out whether this rank's GPU and the driver can run the kernels."""
    global _why_no_cuda
    _why_no_cuda = unfit(
        devices()["cuda"],
        torch.cuda.get_device_name(),
        torch.cuda.get_device_capability(),
        torch._C._cuda_getDriverVersion(),  # type: ignore[attr-defined]
    )


def unfit(built: str, name: str, capability: tuple[int, int], driver: int) -> str | None:
    """Why a GPU cannot run kernels, or None: it can.

    Args:
        built: what for, and with which CUDA: ``"80-real,90 of CUDA 13.0.88"``.
        name: the GPU's.
        capability: the GPU's compute capability.
        driver: the newest CUDA that the driver knows, as 13000.
    """
    architectures, _, toolkit = built.partition(" of CUDA ")
    known = [int(number) for number in re.findall(r"(?:^|,)(\d+)", architectures)]
    if known and 10 * capability[0] + capability[1] < min(known):
        low, have = (f"{number // 10}.{number % 10}" for number in (min(known), 10 * capability[0] + capability[1]))
        return (
            f"{name} has compute capability {have}, and they were built for {low} and above; take another GPU, or "
            f"build them with CMAKE_CUDA_ARCHITECTURES"
        )
    needed = int(toolkit.split(".")[0]) if toolkit else 0
    if driver // 1000 < needed:
        return (
            f"the driver knows CUDA {driver // 1000}.{driver % 1000 // 10}, and they were built with CUDA {toolkit}; "
            f"update the driver, or build them with nvcc {driver // 1000}"
        )
    return None


def devices() -> dict[str, str]:
    """The devices that there are kernels for, and the instruction sets of these."""
    return dict(pair.split("=", 1) for pair in str(torch.ops.pyg_dist.devices()).split("; "))


def no_cuda() -> str | None:
    """Why the kernels for GPUs are not loaded, or do not run on this one, and what to do; None: nothing known.

    The GPU is looked at when torch starts CUDA.
    """
    return _why_no_cuda


def isa() -> str:
    """The instruction set in use: ``baseline`` (on Arm: NEON), ``avx2``, ``avx512``, ``sve256``, ``sve512``, ``simt``.

    Raises:
        OptionError: ``PYG_DIST_ISA`` names one that is unknown or that this machine lacks.
    """
    try:
        return str(torch.ops.pyg_dist.isa())
    except RuntimeError as error:
        raise OptionError(str(error).splitlines()[0]) from None


def build_info() -> dict[str, str]:
    """How the library was built: its version, torch's, the compiler, and the instruction sets inside."""
    return dict(pair.split("=", 1) for pair in str(torch.ops.pyg_dist.build_info()).split("; "))


def last_cache_bytes(caches: Path = _CACHES) -> int:
    """Bytes of the processor's third-level cache; 0: the system does not say.

    Args:
        caches: a folder like the one in which Linux describes them. Where it says nothing, the C library does.
    """
    return int(torch.ops.pyg_dist.last_cache_bytes(str(caches)))


_load("pyg_dist")
if os.environ.get("PYG_DIST_ISA") == _SIMT:
    _load("pyg_dist_simt")
isa()
_why_no_cuda = _load_cuda()
