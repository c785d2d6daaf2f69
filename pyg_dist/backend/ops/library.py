"""Finds and loads the native library, once per process.

Importing this module loads it, so that ``torch.ops.pyg_dist`` is complete afterwards; ``csrc/schema.cpp`` lists what is
in there. ``PYG_DIST_ISA`` forces an instruction set, one of those of :func:`isa`; the machine's best is the default.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from pyg_dist.errors import LibraryNotBuiltError, OptionError

_NAME = "libpyg_dist.dylib" if sys.platform == "darwin" else "libpyg_dist.so"
_REMEDY = "run `make` in the source folder, or `pip install pyg-dist`"


def _find() -> Path:
    """The library in one of the package's folders: in editable mode there are two, the source and the installer's."""
    spec = find_spec("pyg_dist")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()] if spec else []
    for path in (folder / "lib" / _NAME for folder in folders):
        if path.exists():
            return path
    raise LibraryNotBuiltError(
        f"expected the native library lib/{_NAME} in {' or '.join(map(str, folders))}, found none; {_REMEDY}"
    )


def _load() -> None:
    path = _find()
    try:
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise LibraryNotBuiltError(
            f"expected a native library for torch {torch.__version__}, got {str(error).splitlines()[0]}; {_REMEDY}"
        ) from error
    isa()


def isa() -> str:
    """The instruction set in use: ``baseline`` (on Arm: NEON), ``avx2``, ``avx512``, ``sve256`` or ``sve512``.

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


_load()
