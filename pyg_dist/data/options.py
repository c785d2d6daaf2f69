"""The options of ``DistributedData``, checked in one place, and the machine that plans are priced for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend.comm.topology import ranks_per_machine
from pyg_dist.backend.session.agreement import digest, on_main, require_equal
from pyg_dist.backend.session.settings import SETTINGS, Bits
from pyg_dist.errors import OptionError, UnsupportedError
from pyg_dist.graph.protocol import NO_HYPEREDGES
from pyg_dist.halo.plan.cover import EXCHANGES, ExchangeKind
from pyg_dist.halo.plan.levels import HIERARCHIES, Hierarchy
from pyg_dist.halo.plan.plan import Plan
from pyg_dist.partition.inputs import as_parts
from pyg_dist.plan.parts import METHODS, require_hybrid
from pyg_dist.pricing.machine import Machine
from pyg_dist.pricing.model import Model
from pyg_dist.store.graph_input import GraphInput, HeteroInput

_LAYOUTS = ("halo", "grid", "auto")

WHOLE_GRAPHS = "graphs"
"""The partition of a batch whose graphs are whole on one rank each."""

PARTITIONS = (*METHODS, WHOLE_GRAPHS)


@dataclass(frozen=True)
class Options:
    """The options of :class:`pyg_dist.DistributedData`. Each is checked by itself, then with the layout."""

    layout: str = "halo"
    partition: str | Tensor | np.typing.NDArray[np.generic] | Plan = "metis"
    epsilon: float = 0.03
    exchange: ExchangeKind = "hybrid"
    bits: int | tuple[int, int] = 32
    mesh: dict[str, int] | None = None
    comm_dtype: torch.dtype | None = None
    seed: int = 0
    model: tuple[int, int] | None = None
    hierarchy: Hierarchy = "auto"

    def __post_init__(self) -> None:
        self._check_halo()
        _check("comm_dtype", self.comm_dtype, (None, torch.bfloat16))
        if self.mesh is not None and not isinstance(self.mesh, dict):
            raise OptionError(f"Expected mesh to be a dict such as {{'x': 2, 'z': 2}} or None (got {self.mesh!r})")
        _check("layout", self.layout, _LAYOUTS)
        self._check_with_layout()
        Model.of_layers(1, 0, None, None, self.model)  # raises
        for setting in SETTINGS:
            setting.value()  # raises
        is_integer = isinstance(self.seed, (int, np.integer)) and not isinstance(self.seed, bool)
        if not (is_integer and -(2**63) <= self.seed < 2**63):
            raise OptionError(f"Expected seed to be an integer of 64 bits (got {self.seed!r})")
        object.__setattr__(self, "seed", int(self.seed))  # torch takes no integers of NumPy

    def _check_halo(self) -> None:
        _check("exchange", self.exchange, EXCHANGES)
        _check("hierarchy", self.hierarchy, HIERARCHIES)
        given: tuple[object, ...] = self.bits_by_direction
        if not all(type(b) is int and b in get_args(Bits) for b in given):  # not bool
            allowed = ", ".join(map(str, get_args(Bits)))
            raise OptionError(
                f"Expected bits to be one of {allowed}, or (forward, backward) of them (got {self.bits!r})"
            )
        if isinstance(self.partition, str):
            _check("partition", self.partition, PARTITIONS)
            require_hybrid(self.partition, self.exchange)
        elif not isinstance(self.partition, (Tensor, np.ndarray, list, tuple, Plan)):
            raise OptionError(
                f"Expected partition to be {' or '.join(map(repr, PARTITIONS))}, the owner of each node, or a Plan "
                f"(got {self.partition!r})"
            )
        elif not isinstance(self.partition, Plan):
            object.__setattr__(self, "partition", as_parts(self.partition))
        if not (isinstance(self.epsilon, (int, float, np.floating)) and 0 < self.epsilon < 1):
            raise OptionError(
                f"Expected 0 < epsilon < 1, the share by which a part may be too heavy (got {self.epsilon})"
            )
        object.__setattr__(self, "epsilon", float(self.epsilon))

    def _check_with_layout(self) -> None:
        layout = self.layout
        if layout != "halo" and self.bits_by_direction != (32, 32):
            raise UnsupportedError(
                f"bits={self.bits!r} with layout={layout!r} is not in this version: use layout='halo', or "
                f"comm_dtype=torch.bfloat16"
            )
        if layout != "halo" and self.exchange != "hybrid":
            why = "has none" if layout == "grid" else "chooses it"
            raise OptionError(
                f"Expected no exchange with layout={layout!r}, which {why} (got {self.exchange!r}): leave it out, or "
                f"use layout='halo'"
            )
        if layout != "halo" and isinstance(self.partition, Plan):
            raise OptionError(f"Expected layout='halo' with a plan, which was made for it (got {layout!r})")
        if layout == "grid" and not isinstance(self.partition, str):
            raise OptionError("Expected no partition with layout='grid', which has none (got the owner of each node)")
        if layout == "halo" and self.comm_dtype is not None:
            raise UnsupportedError(
                "comm_dtype with layout='halo' is not in this version: leave it out, or layout='grid'"
            )
        if layout == "auto" and self.mesh is not None and self.mesh.get("data", 1) != 1:
            raise OptionError(
                f"Expected a mesh without data groups with layout='auto', which prices one copy of the graph (got "
                f"{self.mesh}): choose layout='grid'"
            )

    def with_hyperedges(self) -> Options:
        """The same options with the halo layout, the only one for hyperedges."""
        if self.layout == "grid":
            raise UnsupportedError(NO_HYPEREDGES)
        return replace(self, layout="halo")

    @property
    def bits_by_direction(self) -> tuple[Bits, Bits]:
        """Bits of a value in a message, forward and backward."""
        is_pair = isinstance(self.bits, (tuple, list)) and len(self.bits) == 2
        given: Any = self.bits if is_pair else (self.bits, self.bits)
        return tuple(int(bits) if isinstance(bits, np.integer) else bits for bits in given)  # type: ignore[return-value]

    @property
    def partition_name(self) -> str:
        """The name of the partition in a plan."""
        if isinstance(self.partition, Plan):
            return self.partition.partition
        return self.partition if isinstance(self.partition, str) else "given"

    def identity(self) -> dict[str, str]:
        """Name and value of each option, short enough to compare across ranks."""
        names = ("layout", "seed", "model", "exchange", "hierarchy", "epsilon", "mesh", "comm_dtype")
        given = {name: str(getattr(self, name)) for name in names} | {"bits": str(self.bits_by_direction)}
        if isinstance(self.partition, str):
            given["partition"] = self.partition
        else:  # the hash of a plan is of its parts, too
            given["partition"] = self.partition.hash if isinstance(self.partition, Plan) else digest(self.partition)
        named = {f"option {name}": value for name, value in given.items()}
        return named | {f"setting {s.name}": str(s.value()) for s in SETTINGS if s.must_agree}


def _check(name: str, value: object, works: tuple[object, ...]) -> None:
    if any(value is w or (type(value) is type(w) and value == w) for w in works):
        return
    allowed = " or ".join(repr(w) for w in works)
    raise OptionError(f"Expected {name} to be {allowed} (got {value!r})")


def agree(graph_input: GraphInput | HeteroInput, options: Options) -> str:
    """Check that all ranks were given the same graph and options (collective); returns a digest of both."""
    tensors = graph_input.tensors()
    given = {f"data{name}" if name[0] == "[" else f"data.{name}": digest(value) for name, value in tensors}
    given["the number of nodes"] = str(graph_input.num_nodes)
    given.update(options.identity())
    require_equal(given, "give every rank the same graph and options, and seed what is drawn")
    return digest(repr(sorted(given.items())))


def common_machine(device: str = "cpu") -> Machine:
    """Rank 0's constants of a kind of device, with the ranks that really run on each machine (collective)."""
    machine = Machine(**on_main(lambda: asdict(Machine.load(device=device))))
    on_each = ranks_per_machine()
    return machine if on_each is None else machine.with_ranks_per_node(on_each)
