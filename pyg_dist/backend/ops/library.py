"""Finds and loads the native library, once per process; how wrappers call its ops.

Importing this module loads it, so that ``torch.ops.pyg_dist`` is complete afterwards; ``csrc/schema.cpp`` lists what is
in there. ``PYG_DIST_ISA`` forces an instruction set, one of those of :func:`isa`; the machine's best is the default.
Where torch has CUDA, the kernels for GPUs are loaded, too; :func:`no_cuda` says why they are not.

Rows are two-dimensional there, factors in the sum dtype, and errors are one line.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_dist.backend import out_of_memory
from pyg_dist.errors import DataError, LibraryNotBuiltError, OptionError, UnsupportedError

_REMEDY = "run `make` in the source folder, or `pip install pyg-dist`"
_CUDA_REMEDY = (
    "with nvcc on PATH run `PYG_DIST_CUDA=1 pip install --force-reinstall --no-deps --no-binary pyg-dist pyg-dist`"
)
_REMEDIES = {
    "pyg_dist": _REMEDY,
    "pyg_dist_cuda": _CUDA_REMEDY,
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
        torch.ops.load_library(path)
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
    torch.cuda._lazy_call(_check_gpu)  # once CUDA starts: no import does that
    return None


def _check_gpu() -> None:
    """Find out whether this rank's GPU and the driver can run the kernels."""
    global _why_no_cuda
    _why_no_cuda = unfit(
        devices()["cuda"], torch.cuda.get_device_name(), torch.cuda.get_device_capability(), driver_version()
    )


def driver_version(driver: str = "libcuda.so.1") -> int | None:
    """The newest CUDA that the driver knows, as 13000; None where the driver cannot be asked."""
    version = ctypes.c_int()
    try:
        status = ctypes.CDLL(driver).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if status else version.value


def unfit(built: str, name: str, capability: tuple[int, int], driver: int | None) -> str | None:
    """Why a GPU cannot run kernels, or None: it can.

    Args:
        built: what for, and with which CUDA: ``"80-real,90 of CUDA 13.0.88"``.
        name: the GPU's.
        capability: the GPU's compute capability.
        driver: the newest CUDA that the driver knows, as 13000; None: not known.
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
    if driver is not None and driver // 1000 < needed:
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
    """Bytes of the processor's third-level cache, as Linux or the C library describes it; 0: unknown."""
    return int(torch.ops.pyg_dist.last_cache_bytes(str(caches)))


_load("pyg_dist")
if os.environ.get("PYG_DIST_ISA") == _SIMT:
    _load("pyg_dist_simt")
isa()
_why_no_cuda = _load_cuda()


native = torch.ops.pyg_dist

_meta = torch.library.Library("pyg_dist", "IMPL", "Meta")

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""The dtypes of rows that the kernels know."""

Kernel = TypeVar("Kernel", bound=Callable[..., object])
Out = TypeVar("Out")


def meta_kernel(*names: str) -> Callable[[Kernel], Kernel]:
    """The shapes and dtypes of ops' outputs, for FakeTensor and the device ``meta``.

    ``torch.library.register_fake`` would look through the files of all loaded modules, which takes as long as the
    import.
    """

    def register(kernel: Kernel) -> Kernel:
        for name in names:
            _meta.impl(name, kernel)
        return kernel

    return register


def like_first(x: Tensor, *others: object) -> Tensor:
    """The meta kernel of an op whose output is like its first argument."""
    return torch.empty_like(x)


def nothing(*args: object) -> None:
    """The meta kernel of an op that only writes into an argument."""


def call(op: Any, *args: object) -> Out:  # type: ignore[type-var]  # of what the schema says
    """Call a native op; its errors are one line that starts with the op's name (``csrc/ops/check.h``)."""
    try:
        made: Out = op(*args)
        return made
    except NotImplementedError:  # the dispatcher found no kernel; its own text lists all backends of torch
        for arg in args:
            if isinstance(arg, Tensor) and (arg.device.type != "cpu" or arg.layout is not torch.strided):
                name, is_dense = _name(op), arg.layout is torch.strided
                _require_kernels(name, args)
                why = f"no library for {arg.device.type} is loaded (python -m pyg_dist doctor); " if is_dense else ""
                raise UnsupportedError(
                    f"{name}: expected dense tensors on cpu, got one on {arg.device} ({arg.layout}); {why}"
                    "move it with .cpu() or .to_dense()"
                ) from None
        raise
    except RuntimeError as error:
        _require_kernels(_name(op), args)
        message = str(error)
        if ": expected" not in message:
            out_of_memory.explain(error)
            raise
        kind = UnsupportedError if ": expected tensors on " in message else DataError  # csrc/ops/device.cpp
        raise kind(message.splitlines()[0]) from None


def _name(op: Callable[..., object]) -> str:
    return op.__name__.removesuffix(".default")


def _require_kernels(name: str, args: tuple[object, ...]) -> None:
    """Raise why no kernel can take tensors of GPUs, where that is known: what went wrong else follows from it."""
    why = no_cuda()
    if why is not None and any(isinstance(arg, Tensor) and arg.is_cuda for arg in args):
        raise UnsupportedError(
            f"{name}: expected kernels for tensors on cuda, got none that run: {why}; "
            "or move tensors and data with .cpu()"
        ) from None


def as_rows(x: Tensor) -> Tensor:
    """View x as ``[N, F]`` with contiguous rows, or copy it there."""
    if x.ndim != 2:
        if x.ndim == 0:
            raise DataError("expected a tensor with rows, got one without dimensions")
        x = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return x if x.layout is not torch.strided or x.stride(1) == 1 or x.shape[1] <= 1 else x.contiguous()


def written_rows(out: Tensor) -> Tensor:
    """View ``out`` as ``[N, F]``; never a copy, since the op writes into it."""
    if out.ndim == 2:
        return out
    try:
        return out.view(out.shape[0], math.prod(out.shape[1:]))
    except (IndexError, RuntimeError):
        raise DataError(
            f"expected 'out' to have contiguous rows, got shape {list(out.shape)}, strides {list(out.stride())}"
        ) from None


def like_rows(y: Tensor, x: Tensor) -> Tensor:
    """Rows of an op's output in the shape that the rows of x have."""
    return y if x.ndim == 2 else y.view(y.shape[0], *x.shape[1:])


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype that sums of ``x`` are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def factor_of(factor: Tensor | None, x: Tensor) -> Tensor | None:
    """A weight or scale in the sum dtype: those of 16 bits are widened."""
    if factor is None:
        return None
    return (factor.float() if x.dtype == factor.dtype and x.dtype.itemsize == 2 else factor).contiguous()


def signed(seed: int) -> int:
    """The seed modulo 2^64 as the signed integer that a schema can carry."""
    return (seed + 2**63) % 2**64 - 2**63
