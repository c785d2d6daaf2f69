"""Options of a solver, beside its model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from pyg_dist.errors import OptionError

Solver = Literal["mt-kahypar", "kahypar"]
Preset = Literal["deterministic", "deterministic-quality", "default", "quality", "highest-quality", "large-k"]
SOLVERS: tuple[Solver, ...] = get_args(Solver)
PRESETS: tuple[Preset, ...] = get_args(Preset)


@dataclass(frozen=True)
class SolverOptions:
    """See :func:`pyg_dist.partition.partition`.

    Attributes:
        epsilon: how much heavier than the mean a part may be.
        seed: of the solver.
        solver: of hypergraphs.
        preset: Mt-KaHyPar's; None: the method's own.
        memory: bytes that a solver may take; None: as many as it likes.
    """

    epsilon: float = 0.03
    seed: int = 0
    solver: Solver = "mt-kahypar"
    preset: Preset | None = None
    memory: int | None = None

    def __post_init__(self) -> None:
        """Check each option by itself.

        Raises:
            OptionError: A value out of range.
        """
        if not (math.isfinite(self.epsilon) and self.epsilon > 0):
            raise OptionError(f"Expected 'epsilon' to be a positive number (got {self.epsilon})")
        if self.solver not in SOLVERS:
            raise OptionError(f"Expected 'solver' to be one of {', '.join(SOLVERS)} (got {self.solver!r})")
        if self.preset is not None and self.preset not in PRESETS:
            raise OptionError(f"Expected 'preset' to be one of {', '.join(PRESETS)} (got {self.preset!r})")
        if self.preset is not None and self.solver != "mt-kahypar":
            raise OptionError(f"Expected no preset with solver={self.solver!r}, which has none (got {self.preset!r})")
