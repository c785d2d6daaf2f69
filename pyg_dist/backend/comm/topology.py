"""How ranks lie: which share a machine, and which hold the same part of the graph, each in a data group of its own."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pyg_dist.backend.comm.group import Group, group_within, world_group
from pyg_dist.backend.comm.wires.shared_memory import SharedMemory
from pyg_dist.backend.comm.wires.wire import Machines, carrier
from pyg_dist.backend.session.settings import MACHINES
from pyg_dist.backend.session.state import current
from pyg_dist.errors import OptionError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machines() -> tuple[int, ...]:
    """The machine of each rank, numbered in the order of their first ranks (collective at the first use).

    From then on gloo's large messages within a machine go through its memory, as MPI's do anyway.

    Raises:
        OptionError: ``PYG_DIST_MACHINES`` has not a number for each rank.
    """
    found = current().of(Machines)
    if not found.of_rank:
        names = _names()
        number = {name: k for k, name in enumerate(dict.fromkeys(names))}
        found.of_rank = tuple(number[name] for name in names)
        if carrier() == "gloo":
            current().of(SharedMemory).open(found.of_rank, world_group().rank, world_group().gather_bytes)
    return found.of_rank


def _names() -> list[object]:
    world, given = world_group(), MACHINES.value()
    if given is None:
        boot_id = _BOOT_ID.read_text() if _BOOT_ID.exists() else ""
        return [*world.gather_bytes(f"{socket.gethostname()} {boot_id}".encode())]
    if len(given) != world.size:
        raise OptionError(
            f"Expected PYG_DIST_MACHINES to have the machine of each of {world.size} ranks (got {len(given)} numbers): "
            f"unset it"
        )
    return [*given]


def ranks_per_machine() -> int | None:
    """Ranks on each machine, or None where they do not lie there one after another, in equal numbers (collective).

    The last machine may have fewer.
    """
    of_rank = machines()
    most = of_rank.count(0)
    return most if of_rank == tuple(rank // most for rank in range(len(of_rank))) else None


_AXES = ("data", "part")


def mesh_sizes(layout: str, axes: Sequence[str], mesh: Mapping[str, int], num_ranks: int) -> list[int]:
    """The sizes of a user's mesh along the axes of a layout; one left out is 1. Not collective.

    Raises:
        OptionError: An unknown axis, a size that is no positive integer, or sizes that do not multiply to the ranks.
    """
    for axis, size in mesh.items():
        if axis not in axes:
            names = ", ".join(map(repr, axes[:-1]))
            raise OptionError(
                f"Expected the axes of a {layout} mesh to be {names} and {axes[-1]!r} (got {axis!r}): rename it"
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise OptionError(f"Expected mesh axis {axis!r} to be a positive integer (got {size!r}): leave it out or 1")
    sizes = [mesh.get(axis, 1) for axis in axes]
    if math.prod(sizes) != num_ranks:
        got = " x ".join(f"{axis}={n}" for axis, n in zip(axes, sizes, strict=True) if n > 1 or axis != "data")
        raise OptionError(
            f"Expected a mesh of {num_ranks} ranks (got {got}, which makes {math.prod(sizes)}): choose sizes whose "
            f"product is {num_ranks}, or mesh=None"
        )
    return sizes


@dataclass(frozen=True)
class DataGroups:
    """The groups of a mesh ``data x part``, whose ranks run part fastest."""

    part: Group  # of this data group
    data: Group | None  # the ranks that hold the same part; None: one data group
    everyone: Group
    index: int = 0  # of this data group
    count: int = 1

    @staticmethod
    def of(mesh: Mapping[str, int] | None) -> DataGroups:
        """The groups of a user's ``mesh`` (collective over all ranks); see :func:`mesh_sizes`."""
        world = world_group()
        num_groups, num_parts = (1, world.size) if mesh is None else mesh_sizes("halo", _AXES, mesh, world.size)
        if num_groups == 1:
            return DataGroups(world, None, world)
        by_group = [[g * num_parts + p for p in range(num_parts)] for g in range(num_groups)]
        by_part = [list(ranks) for ranks in zip(*by_group, strict=True)]
        part = group_within(by_group) if num_parts > 1 else Group()
        return DataGroups(part, group_within(by_part), world, world.rank // num_parts, num_groups)
