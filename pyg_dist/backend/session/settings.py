"""Settings by environment variables, in one table: defaults, allowed values, and errors for all others."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, get_args

from pyg_dist.errors import OptionError

T = TypeVar("T")


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable."""

    name: str
    default: str  # where it is unset or empty
    expected: str  # what it may be, in words
    parse: Callable[[str], T]  # raises ValueError
    must_agree: bool = True  # whether ranks with different values would compute or send different things

    def value(self) -> T:
        """Its value now, on this rank.

        Raises:
            OptionError: It makes no sense.
        """
        given = os.environ.get(self.name) or self.default
        try:
            return self.parse(given)
        except ValueError:
            raise OptionError(f"Expected {self.name} to be {self.expected} (got {given!r}): unset it") from None


Bits = Literal[32, 16, 8, 4, 2]
"""Of a value in a message; 32 stands for values as they are, whatever their dtype."""

Wire = Literal["auto", "gloo", "mpi"]
"""The carrier of CPU tensors' messages; "auto" is MPI under mpirun, if mpi4py sees all its ranks, else gloo."""


def _limit(given: str) -> float:
    limit = float(given)
    if not limit >= 0:
        raise ValueError
    return limit


def _count(given: str) -> int:
    count = int(given)
    if count < 1:
        raise ValueError
    return count


def _switch(given: str) -> bool:
    return bool(("0", "1").index(given))


def _choice(words: tuple[T, ...]) -> Callable[[str], T | None]:
    return lambda given: words[words.index(given.lower())] if given else None


def _wire(given: str) -> Wire:
    wires: tuple[Wire, ...] = get_args(Wire)
    return wires[wires.index(given)]


def _numbers(given: str) -> tuple[int, ...] | None:
    return tuple(map(int, given.split(","))) if given else None


def _bits(given: str) -> tuple[Bits, Bits]:
    bits: tuple[Bits, ...] = get_args(Bits)
    found = bits[[str(b) for b in bits].index(given)]
    return found, found


_SUMS: tuple[Literal["all_reduce", "reduce_scatter"], ...] = ("all_reduce", "reduce_scatter")
_FORMS: tuple[Literal["plain", "blocks"], ...] = ("plain", "blocks")
_PROGRESS: tuple[Literal["auto", "none", "thread", "library"], ...] = ("auto", "none", "thread", "library")
_LEVELS = ("debug", "info", "warning", "error")


ISA = Setting("PYG_DIST_ISA", "", "an instruction set of this machine", str, must_agree=False)
PROJECT_FIRST = Setting("PYG_DIST_PROJECT_FIRST", "0", "0 or 1", _switch)
REMEMBER_MIB = Setting("PYG_DIST_REMEMBER_MIB", "inf", "a number of MiB, 0 or more", _limit)
MESSAGE_MIB = Setting("PYG_DIST_MESSAGE_MIB", "512", "a number of MiB, 0 or more", _limit)
GRID_SUMS = Setting("PYG_DIST_GRID_SUMS", "", "all_reduce or reduce_scatter", _choice(_SUMS))
GRID_BLOCKS = Setting("PYG_DIST_GRID_BLOCKS", "1", "a positive integer", _count)
SPMM_FORM = Setting("PYG_DIST_SPMM_FORM", "", "plain or blocks", _choice(_FORMS), must_agree=False)
MACHINE = Setting(
    "PYG_DIST_MACHINE", "", "a file of constants", lambda given: Path(given) if given else None, must_agree=False
)
WATCH_SECONDS = Setting("PYG_DIST_WATCH_SECONDS", "inf", "a number of seconds, 0 or more", _limit, must_agree=False)
LOG = Setting("PYG_DIST_LOG", "", "debug, info, warning or error", _choice(_LEVELS), must_agree=False)

STOCK_ELEMENTS = Setting("PYG_DIST_STOCK_ELEMENTS", "1048576", "a number of elements, 0 or more", _limit)
WIRE = Setting("PYG_DIST_WIRE", "auto", "auto, gloo or mpi", _wire)
MPI_PROGRESS = Setting(
    "PYG_DIST_MPI_PROGRESS", "auto", "auto, none, thread or library", _choice(_PROGRESS), must_agree=False
)
MACHINES = Setting("PYG_DIST_MACHINES", "", "the number of each rank's machine, such as 0,0,1,1", _numbers)
SHARED_MIB = Setting("PYG_DIST_SHARED_MIB", "4096", "a number of MiB, 0 or more", _limit, must_agree=False)
LOCAL_BITS = Setting("PYG_DIST_LOCAL_BITS", "32", "32, 16, 8, 4 or 2", _bits)
STAGE = Setting("PYG_DIST_STAGE", "0", "0 or 1", _switch)

SETTINGS: tuple[Setting[Any], ...] = (
    ISA, PROJECT_FIRST, REMEMBER_MIB, MESSAGE_MIB, GRID_SUMS, GRID_BLOCKS, SPMM_FORM, STOCK_ELEMENTS, MACHINE,
    LOG, STAGE, WIRE, MPI_PROGRESS, WATCH_SECONDS, MACHINES, SHARED_MIB, LOCAL_BITS,
)  # fmt: skip
