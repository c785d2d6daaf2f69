"""The session: all state of a run in one object. When the run ends, it is dropped whole, and a new one takes its place.

All else that lives as long as a run is a *part*: an object of another module's class, which the session makes at its
first use (:meth:`Session.of`). No module's variable holds state of a run. Before ``init`` there is a session, too: of a
process that has not joined other ranks.
"""

from __future__ import annotations

import itertools
import os
from datetime import timedelta
from typing import Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

import torch.distributed as dist

from pyg_dist import errors
from pyg_dist.backend.session import launch
from pyg_dist.backend.session.settings import Wire

T = TypeVar("T")


@runtime_checkable
class Closable(Protocol):
    """A thing that ends with the session."""

    def close(self) -> None:
        """End it; more than once does no harm."""


class Meeting:
    """Where ranks meet. It outlives sessions, since other ranks may still read from a store that this process hosts.

    Attributes:
        store: opened by the first session that needs it.
        numbers: of the sessions that have used it.
    """

    def __init__(self) -> None:
        self.store: dist.Store | None = None
        self.numbers = itertools.count()


class Session:
    """A run, as this rank sees it."""

    def __init__(self, meeting: Meeting | None = None) -> None:
        self.is_joined = False  # whether `init` has run
        self.rank, self.world_size, self.local_rank = 0, 1, 0
        self.launcher: launch.Launcher = "alone"
        self.backend, self.timeout = "", timedelta(0)  # as `init` was given
        self.wire: Wire = "auto"  # likewise
        self.store: dist.Store | None = None  # shared by all ranks; none at world size 1
        self.meeting = meeting or Meeting()
        self.num_results = itertools.count()  # of rank 0
        self.steps: list[str] = []  # of a set-up, which run
        self._parts: dict[type, Any] = {}
        self._closing: WeakSet[Closable] = WeakSet()

    def of(self, kind: type[T]) -> T:
        """The part of a kind, made at its first use."""
        try:
            part: T = self._parts[kind]  # each function of rows asks
        except KeyError:
            part = self._parts.setdefault(kind, kind())  # another thread may ask, too
        return part

    def find(self, kind: type[T]) -> T | None:
        """The part of a kind, if there is one."""
        part = self._parts.get(kind)
        return part if isinstance(part, kind) else None

    def add(self, part: T, closes_last: bool = False) -> T:
        """Make it the part of its kind."""
        self._parts = {type(part): part, **self._parts} if closes_last else {**self._parts, type(part): part}
        return part

    def close_at_end(self, thing: Closable) -> None:
        """Close it when the session ends. It is not kept alive for that."""
        self._closing.add(thing)

    def close(self) -> None:
        """End everything that it has begun, the latest part first."""
        for thing in list(self._closing):
            thing.close()
        while self._parts:
            _, part = self._parts.popitem()
            if isinstance(part, Closable):
                try:
                    part.close()
                except Exception:
                    self.close()  # the others all the same
                    raise


_current = Session()


def current() -> Session:
    """This process's session; there is always one. Not collective."""
    return _current


def end() -> None:
    """Close the session and drop it. Not collective."""
    global _current
    try:
        _current.close()
    finally:
        _current = Session(_current.meeting)


def is_initialized() -> bool:
    """Return whether ``init`` has run in this process. Not collective."""
    return _current.is_joined


def is_group_open() -> bool:
    """Return whether torch's default process group is open, by whoever opened it."""
    return dist.is_available() and dist.is_initialized()


def place() -> tuple[int, int, int]:
    """Return (rank, world size, local rank): of the session, else of torch's default group, else of the environment."""
    if _current.is_joined:
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


def _rank_of_errors() -> str:
    session = _current
    return f" [rank {session.rank} of {session.world_size}]" if session.is_joined and session.world_size > 1 else ""


errors.set_rank(_rank_of_errors)
