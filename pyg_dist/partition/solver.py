"""Options, memory and failures of all solvers, and the random partition that each must beat."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import mul
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.errors import MissingPackageError, OptionError

Solver = Literal["mt-kahypar", "kahypar"]
Preset = Literal["deterministic", "deterministic-quality", "default", "quality", "highest-quality", "large-k"]
SOLVERS: tuple[Solver, ...] = get_args(Solver)
PRESETS: tuple[Preset, ...] = get_args(Preset)


@dataclass(frozen=True)
class SolverOptions:
    """See :func:`pyg_dist.partition.partition`."""

    epsilon: float = 0.03  # how much heavier than the mean a part may be
    seed: int = 0  # of the solver
    solver: Solver = "mt-kahypar"  # of hypergraphs
    preset: Preset | None = None  # Mt-KaHyPar's; None: the method's own
    memory: int | None = None  # bytes that a solver may take; None: as many as it likes

    def __post_init__(self) -> None:
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise OptionError(f"Expected 'epsilon' to be a positive number (got {self.epsilon})")
        if self.solver not in SOLVERS:
            raise OptionError(f"Expected 'solver' to be one of {', '.join(SOLVERS)} (got {self.solver!r})")
        if self.preset is not None and self.preset not in PRESETS:
            raise OptionError(f"Expected 'preset' to be one of {', '.join(PRESETS)} (got {self.preset!r})")
        if self.preset is not None and self.solver != "mt-kahypar":
            raise OptionError(f"Expected no preset with solver={self.solver!r}, which has none (got {self.preset!r})")


def package(name: str, use: str, remedy: str) -> Any:
    """A package that few scripts need, imported where it is named."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"Expected {name} {use} (got: {error}); pip install {remedy}") from error


@contextmanager
def explained_failure(solver: str, *kinds: type[Exception], also: str = "") -> Iterator[None]:
    """Context in which a solver's error becomes one line with its name; ``also`` is another cause that it may have."""
    caught: tuple[type[Exception], ...] = (RuntimeError, MemoryError, *kinds)
    try:
        yield
    except caught as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = f"{reason}; {also}" if also and not isinstance(error, MemoryError) else reason
        raise OptionError(f"Expected {solver} to find parts (got: {reason}): choose another partition") from error


def random_parts(num_nodes: int, num_parts: int, seed: int) -> Tensor:
    """A random part for every node, int32 ``[N]``; the parts' node counts differ by one at most."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.int32 if num_nodes <= torch.iinfo(torch.int32).max else torch.int64
    order = host.randperm(num_nodes, generator=generator, dtype=dtype)
    return order.remainder_(num_parts).to(torch.int32)


# Bytes above the graph itself, rounded up from the peaks that benchmarks/partition.py records: whatever the graph, by
# node, by edge, by part, and by node and part, of which Mt-KaHyPar keeps tables. It takes its nets as Python lists.
# "metis-cover" took 149 bytes an edge of the hub graph, where METIS took 125.
_BYTES: dict[str, tuple[int, int, int, int, float]] = {
    "random": (4 << 20, 20, 0, 0, 0),
    "stream": (400 << 20, 120, 0, 100, 0),  # most of it a chunk of edges
    "metis": (4 << 20, 400, 180, 0, 0),
    "metis-cut": (4 << 20, 400, 180, 0, 0),
    "metis-cover": (4 << 20, 400, 220, 0, 0),
    "hypergraph": (40 << 20, 1000, 350, 0, 1.5),
    "cover": (60 << 20, 1000, 450, 0, 8),
    "stochastic": (60 << 20, 1000, 1900, 0, 50),
}


def require_memory(method: str, num_nodes: int, num_edges: int, num_parts: int, memory: int | None) -> None:
    """Refuse a method that would take more than ``memory`` bytes; None is no limit. Not collective."""
    if memory is None:
        return
    units = (1, num_nodes, num_edges, num_parts, num_nodes * num_parts)
    needed = {name: int(sum(map(mul, by_unit, units))) for name, by_unit in _BYTES.items()}
    if needed[method] <= memory:
        return
    fitting = [name for name, num_bytes in needed.items() if num_bytes <= memory]
    way = f"choose one that fits ({', '.join(fitting)})" if fitting else "none fits: give it more"
    takes, limit = shortage(needed[method], memory)
    raise OptionError(f"Expected a partition within {limit} (got {method!r}, which takes about {takes}): {way}")


_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def shortage(needed: float, there: float) -> tuple[str, str]:
    """Bytes that are needed and the fewer that there are, in one unit, rounded up and down: never the same text."""
    power = min(int(math.log2(max(needed, 1)) // 10), len(_UNITS) - 1)
    up, down = math.ceil(needed / 1024**power * 100) / 100, math.floor(there / 1024**power * 100) / 100
    return f"{up:,.12g} {_UNITS[power]}", f"{down:,.12g} {_UNITS[power]}"


def parse_bytes(text: str) -> int:
    """A number of bytes such as "4GiB", "500 MB" or "1e9"."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kKMGT]?)(i?)B?\s*", text)
    try:
        number, prefix, binary = match.groups() if match else ("", "", "")
        num_bytes = float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " ")
        if num_bytes >= 1:
            return int(num_bytes)
    except ValueError:
        pass
    raise OptionError(f"Expected memory such as 4GiB or 500MB (got {text!r})")
