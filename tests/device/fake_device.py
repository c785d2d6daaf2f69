"""A device that is none, for tests of what a GPU would refuse or be waited for: see ``fake_device.cpp``.

A process that has loaded it keeps it: torch then has an accelerator. Tests load it in processes of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils import cpp_extension

NAME = "fake"
_SOURCE = Path(__file__).with_name("fake_device.cpp")


def build() -> Path:
    """The library, compiled once for a source and a torch; it waits in the system's folder of temporary files."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode() + sys.platform.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"pyg_dist_fake_device_{os.getuid()}_{key}.so"
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that run tests compiles it, the others wait
        return library if library.exists() else _compile(library)


def _compile(library: Path) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if not compiler or sys.platform != "linux":
        pytest.skip("the fake device needs Linux and a C++ compiler")
    includes = [argument for path in cpp_extension.include_paths() for argument in ("-isystem", path)]
    folder = Path(torch.__file__).parent / "lib"
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    partial = library.with_suffix(f".{os.getpid()}")
    links = ["-L", str(folder), "-ltorch_cpu", "-lc10"]
    command = [compiler, "-std=c++20", "-O0", "-fPIC", "-shared", abi, str(_SOURCE), "-o", str(partial)]
    done = subprocess.run([*command, *includes, *links], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    partial.replace(library)
    return library


def load(library: Path) -> torch.device:
    """Give this process the device."""
    if not hasattr(torch, NAME):
        torch.ops.load_library(library)
        torch.utils.rename_privateuse1_backend(NAME)
        module = types.ModuleType(NAME)
        module.__dict__.update(
            is_available=lambda: True,
            is_initialized=lambda: True,
            current_device=lambda: 0,
            device_count=lambda: 1,
            get_rng_state=lambda device=0: torch.ops.fake_device.rng_state(),
            set_rng_state=lambda state, device=0: torch.ops.fake_device.set_rng_state(state),
            manual_seed_all=_manual_seed,
            get_amp_supported_dtype=list,
            _is_in_bad_fork=lambda: False,
        )
        torch._register_device_module(NAME, module)
    return torch.device(NAME, 0)


def _manual_seed(seed: int) -> None:
    torch.ops.fake_device.set_rng_state(torch.Generator().manual_seed(seed).get_state())


@contextlib.contextmanager
def strict() -> Iterator[None]:
    """Context in which what would wait for a GPU, or copy to it or from it, raises. In backward passes, too."""
    torch.ops.fake_device.set_strict(True)
    try:
        yield
    finally:
        torch.ops.fake_device.set_strict(False)


@contextlib.contextmanager
def exempt() -> Iterator[None]:
    """Context in which this thread may do it all the same."""
    torch.ops.fake_device.set_exempt(True)
    try:
        yield
    finally:
        torch.ops.fake_device.set_exempt(False)


def planted_item(x: Tensor) -> Tensor:
    """A mistake: the same values, by way of a number that is read."""
    return x * (x.sum().item() * 0 + 1)
