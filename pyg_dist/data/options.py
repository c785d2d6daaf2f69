"""The options of ``DistributedData``, checked in one place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend.agreement import digest
from pyg_dist.errors import OptionError, UnsupportedError
from pyg_dist.plan import Plan
from pyg_dist.plan.model import Model
from pyg_dist.plan.remote import EXCHANGES, Exchange
from pyg_dist.tensor import remember

_VALUES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # name: (works, planned)
    "layout": (("halo", "grid", "auto"), ()),
    "exchange": (EXCHANGES, ()),
    "bits": ((32,), (16, 8, 4, 2)),
    "comm_dtype": ((None, torch.bfloat16), ()),
}
_PARTITIONS = (("metis", "random"), ("hypergraph", "stochastic", "cover"))


@dataclass(frozen=True)
class Options:
    """See :class:`pyg_dist.DistributedData`."""

    layout: str
    partition: str | Tensor | np.ndarray[Any, Any] | Plan
    epsilon: float
    exchange: Exchange
    bits: int
    mesh: dict[str, int] | None
    comm_dtype: torch.dtype | None
    seed: int
    model: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Check each option by itself."""
        for name, (works, planned) in _VALUES.items():
            _check(name, getattr(self, name), works, planned)
        if self.mesh is not None and not isinstance(self.mesh, dict):
            raise OptionError(f"Expected mesh to be a dict such as {{'x': 2, 'z': 2}} or None (got {self.mesh!r})")
        for name in ("mesh", "comm_dtype"):
            if self.layout == "halo" and getattr(self, name) is not None:
                raise UnsupportedError(
                    f"{name} with layout='halo' is not in this version: leave it out, or layout='grid'"
                )
        Model.of_layers(1, 0, None, None, self.model)  # raises
        if isinstance(self.partition, str):
            _check("partition", self.partition, *_PARTITIONS)
        if isinstance(self.partition, Plan) and self.layout != self.partition.layout:
            raise OptionError(
                f"Expected a plan of the {self.layout} layout (got one of the {self.partition.layout} layout)"
            )
        if not (isinstance(self.epsilon, (int, float)) and 0 < self.epsilon < 1):
            raise OptionError(
                f"Expected 0 < epsilon < 1, the share by which a part may be too heavy (got {self.epsilon})"
            )

    @property
    def partition_name(self) -> str:
        """What to call the partition in a plan."""
        if isinstance(self.partition, Plan):
            return self.partition.partition
        return self.partition if isinstance(self.partition, str) else "given"

    def identity(self) -> dict[str, str]:
        """Name and value of each option, short enough to compare across ranks."""
        given = {f"option {name}": str(getattr(self, name)) for name in (*_VALUES, "mesh", "epsilon", "seed", "model")}
        given[f"setting {remember.SETTING}"] = str(remember.limit_bytes())
        for name in ("PYG_DIST_GRID_SUMS", "PYG_DIST_GRID_BLOCKS"):
            given[f"setting {name}"] = os.environ.get(name, "")
        return given | {"option partition": self._partition_identity()}

    def _partition_identity(self) -> str:
        if isinstance(self.partition, str):
            return self.partition
        if isinstance(self.partition, Plan):
            return self.partition.hash + ("" if self.partition.parts is None else digest(self.partition.parts))
        return digest(np.asarray(self.partition))


def _check(name: str, value: Any, works: tuple[Any, ...], planned: tuple[Any, ...]) -> None:
    if any(value is w or (type(value) is type(w) and value == w) for w in works):
        return
    allowed = " or ".join(repr(w) for w in works)
    if value in planned:
        raise UnsupportedError(f"{name}={value!r} is planned and not in this version: use {allowed}")
    raise OptionError(f"Expected {name} to be {allowed} (got {value!r})")
