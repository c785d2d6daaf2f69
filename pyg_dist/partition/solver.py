"""Options of a solver, its failure in one line, and the random partition that every other one must beat."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

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
        """Check each option by itself."""
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise OptionError(f"Expected 'epsilon' to be a positive number (got {self.epsilon})")
        if self.solver not in SOLVERS:
            raise OptionError(f"Expected 'solver' to be one of {', '.join(SOLVERS)} (got {self.solver!r})")
        if self.preset is not None and self.preset not in PRESETS:
            raise OptionError(f"Expected 'preset' to be one of {', '.join(PRESETS)} (got {self.preset!r})")
        if self.preset is not None and self.solver != "mt-kahypar":
            raise OptionError(f"Expected no preset with solver={self.solver!r}, which has none (got {self.preset!r})")


def package(name: str, use: str, remedy: str) -> Any:
    """The package of a solver, imported where it is named."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingPackageError(f"Expected {name} {use} (got: {error}); pip install {remedy}") from error


@contextmanager
def explained_failure(solver: str, *kinds: type[Exception]) -> Iterator[None]:
    """Raise what a solver raises as one line with its name. Not collective."""
    caught: tuple[type[Exception], ...] = (RuntimeError, MemoryError, *kinds)
    try:
        yield
    except caught as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise OptionError(f"Expected {solver} to find parts (got: {reason}): choose another partition") from error


def random_parts(num_nodes: int, num_parts: int, seed: int) -> Tensor:
    """Return a random part for every node; the parts' node counts differ by one at most. Not collective.

    Shapes:
        - **output:** :math:`(|V|)` int32
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.int32 if num_nodes <= torch.iinfo(torch.int32).max else torch.int64
    order = torch.randperm(num_nodes, generator=generator, dtype=dtype)
    return order.remainder_(num_parts).to(torch.int32)
