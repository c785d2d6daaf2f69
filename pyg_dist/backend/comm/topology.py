"""Which ranks share a machine: those with one host name and boot id, or as ``PYG_DIST_MACHINES`` says."""

from __future__ import annotations

import socket
from pathlib import Path

from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session.settings import MACHINES
from pyg_dist.backend.session.state import current
from pyg_dist.errors import OptionError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Machines:
    """What is known of the ranks' machines.

    Attributes:
        of_rank: the machine of each rank; empty before :func:`machines` was called.
    """

    def __init__(self) -> None:
        self.of_rank: tuple[int, ...] = ()


def machines() -> tuple[int, ...]:
    """The machine of each rank, numbered in the order of their first ranks (collective at the first use).

    Raises:
        OptionError: ``PYG_DIST_MACHINES`` has not a number for each rank.
    """
    found = current().of(Machines)
    if not found.of_rank:
        names = _names()
        number = {name: k for k, name in enumerate(dict.fromkeys(names))}
        found.of_rank = tuple(number[name] for name in names)
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
