"""This process's place among the ranks: the one piece of state that the rest of ``backend`` shares.

:mod:`~pyg_dist.backend.session.session` fills it; :mod:`~pyg_dist.backend.session.agreement` and
:mod:`~pyg_dist.backend.session.failure` read it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.session import launch


@dataclass(frozen=True)
class World:
    """An initialised session.

    ``store`` is None at world size 1. ``control`` is the group of all ranks that carries CPU tensors and small objects.
    """

    rank: int
    world_size: int
    local_rank: int
    launcher: launch.Launcher
    timeout: timedelta
    store: dist.Store | None = None
    control: Group = field(default_factory=Group)


_current: World | None = None


def current() -> World | None:
    """Return the initialised session, or None before ``init``."""
    return _current


def set_current(world: World | None) -> None:
    """Make ``world`` the current session; None ends it."""
    global _current
    _current = world


def is_initialized() -> bool:
    """Return whether ``init`` has run in this process. Not collective."""
    return _current is not None


def is_group_open() -> bool:
    """Return whether torch's default process group is open, by whoever opened it."""
    return dist.is_available() and dist.is_initialized()


def place() -> tuple[int, int, int]:
    """Return (rank, world size, local rank): of the session, else of torch's default group, else of the environment."""
    if _current is not None:
        return _current.rank, _current.world_size, _current.local_rank
    if is_group_open():
        rank = dist.get_rank()
        return rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK") or rank)
    found = launch.detect(os.environ)
    return found.rank, found.world_size, found.local_rank


def rank() -> int:
    """Return this process's rank, 0 when it runs alone; works before ``init``. Not collective.

    Example:
        >>> pyg_dist.rank()
        0
    """
    return place()[0]


def world_size() -> int:
    """Return the number of ranks, 1 when this process runs alone; works before ``init``. Not collective.

    Example:
        >>> pyg_dist.world_size()
        1
    """
    return place()[1]


def local_rank() -> int:
    """Return this process's number among the ranks on its machine; works before ``init``. Not collective."""
    return place()[2]


def is_main() -> bool:
    """Return whether this is rank 0, the rank that writes files; works before ``init``. Not collective.

    Example:
        >>> if pyg_dist.is_main():
        ...     print("written once")
        written once
    """
    return rank() == 0
