"""The options of ``DistributedData``, checked in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend.comm.quantized import Bits
from pyg_dist.backend.session.agreement import digest
from pyg_dist.backend.session.settings import SETTINGS
from pyg_dist.errors import OptionError, UnsupportedError
from pyg_dist.partition.given import as_parts
from pyg_dist.plan import Plan
from pyg_dist.plan.halo.remote_edges import EXCHANGES, Exchange
from pyg_dist.plan.model import Model
from pyg_dist.plan.parts import METHODS, require_hybrid

_VALUES: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {  # name: (works, planned)
    "layout": (("halo", "grid", "auto"), ()),
    "exchange": (EXCHANGES, ()),
    "comm_dtype": ((None, torch.bfloat16), ()),
}


@dataclass(frozen=True)
class Options:
    """See :class:`pyg_dist.DistributedData`."""

    layout: str
    partition: str | Tensor | np.ndarray[Any, Any] | Plan
    epsilon: float
    exchange: Exchange
    bits: int | tuple[int, int]
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
        given: tuple[object, ...] = self.bits_by_direction
        if not all(type(b) is int and b in get_args(Bits) for b in given):  # not bool
            allowed = ", ".join(map(str, get_args(Bits)))
            raise OptionError(
                f"Expected bits to be one of {allowed}, or (forward, backward) of them (got {self.bits!r})"
            )
        if self.layout != "halo" and self.bits_by_direction != (32, 32):
            raise UnsupportedError(
                f"bits={self.bits!r} with layout={self.layout!r} is not in this version: use layout='halo', or "
                f"comm_dtype=torch.bfloat16"
            )
        for name in ("mesh", "comm_dtype"):
            if self.layout == "halo" and getattr(self, name) is not None:
                raise UnsupportedError(
                    f"{name} with layout='halo' is not in this version: leave it out, or layout='grid'"
                )
        Model.of_layers(1, 0, None, None, self.model)  # raises
        for setting in SETTINGS:
            setting.value()  # raises
        if isinstance(self.partition, str):
            _check("partition", self.partition, METHODS, ())
            require_hybrid(self.partition, self.exchange)
        elif not isinstance(self.partition, (Tensor, np.ndarray, list, tuple, Plan)):
            raise OptionError(
                f"Expected partition to be {' or '.join(map(repr, METHODS))}, the owner of each node, or a Plan "
                f"(got {self.partition!r})"
            )
        elif not isinstance(self.partition, Plan):
            object.__setattr__(self, "partition", as_parts(self.partition))
        if self.layout != "halo" and isinstance(self.partition, Plan):
            raise OptionError(f"Expected layout='halo' with a plan, which was made for it (got {self.layout!r})")
        if self.layout == "grid" and not isinstance(self.partition, str):
            raise OptionError("Expected no partition with layout='grid', which has none (got the owner of each node)")
        is_integer = isinstance(self.seed, (int, np.integer)) and not isinstance(self.seed, bool)
        if not (is_integer and -(2**63) <= self.seed < 2**63):
            raise OptionError(f"Expected seed to be an integer of 64 bits (got {self.seed!r})")
        if self.layout == "auto" and self.mesh is not None and self.mesh.get("data", 1) != 1:
            raise OptionError(
                f"Expected a mesh without data groups with layout='auto', which prices one copy of the graph (got "
                f"{self.mesh}): choose layout='grid'"
            )
        if not (isinstance(self.epsilon, (int, float, np.floating)) and 0 < self.epsilon < 1):
            raise OptionError(
                f"Expected 0 < epsilon < 1, the share by which a part may be too heavy (got {self.epsilon})"
            )
        object.__setattr__(self, "seed", int(self.seed))  # numpy's numbers are none of torch's
        object.__setattr__(self, "epsilon", float(self.epsilon))

    @property
    def bits_by_direction(self) -> tuple[Bits, Bits]:
        """Of a value in a message: forward, backward."""
        is_pair = isinstance(self.bits, (tuple, list)) and len(self.bits) == 2
        given: Any = self.bits if is_pair else (self.bits, self.bits)
        return tuple(int(bits) if isinstance(bits, np.integer) else bits for bits in given)  # type: ignore[return-value]

    @property
    def partition_name(self) -> str:
        """What to call the partition in a plan."""
        if isinstance(self.partition, Plan):
            return self.partition.partition
        return self.partition if isinstance(self.partition, str) else "given"

    def identity(self) -> dict[str, str]:
        """Name and value of each option, short enough to compare across ranks."""
        given = {f"option {name}": str(getattr(self, name)) for name in (*_VALUES, "mesh", "epsilon", "seed", "model")}
        given["option bits"] = str(self.bits_by_direction)
        given |= {f"setting {setting.name}": str(setting.value()) for setting in SETTINGS if setting.must_agree}
        return given | {"option partition": self._partition_identity()}

    def _partition_identity(self) -> str:
        if isinstance(self.partition, str):
            return self.partition
        if isinstance(self.partition, Plan):
            return self.partition.hash  # of its parts, too
        return digest(self.partition)


def _check(name: str, value: Any, works: tuple[Any, ...], planned: tuple[Any, ...]) -> None:
    if any(value is w or (type(value) is type(w) and value == w) for w in works):
        return
    allowed = " or ".join(repr(w) for w in works)
    if value in planned:
        raise UnsupportedError(f"{name}={value!r} is planned and not in this version: use {allowed}")
    raise OptionError(f"Expected {name} to be {allowed} (got {value!r})")
