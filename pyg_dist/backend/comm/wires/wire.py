"""The protocol of a wire: how tensors move among the ranks of a group.

A wire only moves tensors. Calls are numbered, counted, timed and compared above it, so these checks hold on every wire.
Nothing here knows of autograd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

from torch import Tensor

from pyg_dist.backend.session.state import current


class Work(Protocol):
    """A handle of work under way."""

    def wait(self) -> object:
        """Wait until it is done."""


Piece = tuple[int, int, int]
"""Rows of a tensor that go to a rank, or come from it: the rank, the first row and the last, exclusive."""


class Message(NamedTuple):
    """A message under way, and the global number of the rank at its other end (``None``: several ranks)."""

    work: Work
    peer: int | None


class Flight(NamedTuple):
    """Messages under way: those that can be waited for one by one, by sender, and all others."""

    arriving: Mapping[int, Message] = {}
    others: Sequence[Message] = ()


class Wire(Protocol):
    """The messages among the ranks of a group, for tensors of some devices.

    All ranks make the same calls in one order. Tensors are contiguous, of the dtypes that
    :func:`~pyg_dist.backend.comm.group.to_wire` makes. Ranks are numbered within the group.

    Attributes:
        rank: this rank.
        size: number of ranks.
        ranks: their global numbers.
        devices: the types of devices whose tensors it carries.
        has_tags: whether messages of calls with different tags never meet. Else calls match by their order.
    """

    rank: int
    size: int
    ranks: tuple[int, ...]
    devices: frozenset[str]
    has_tags: bool

    def among(self, ranks: Sequence[int]) -> Wire:
        """A wire for some of the ranks, by their global numbers, which another thread may use (not collective).

        Raises:
            UnsupportedError: Its messages have no tags.
        """

    def all_reduce(self, x: Tensor, op: str, tag: int, number: int | None = None) -> tuple[Tensor, bool]:
        """The "sum", "max" or "min" of every rank's tensor, with the same bits on each; ``x`` may be overwritten.

        Also whether every rank gave the same number, of 64 bits and not -1 (True where a wire without tags is asked).
        """

    def broadcast(self, x: Tensor, source: int, tag: int) -> None:
        """Overwrite ``x`` with the one of rank ``source``."""

    def all_gather(self, out: Tensor, rows: Tensor, counts: Sequence[int], tag: int) -> Flight:
        """Start to send every rank these rows, ``[counts[rank], ...]``; into all ranks', ``[sum(counts), ...]``."""

    def reduce_scatter(self, out: Tensor, rows: Tensor, counts: Sequence[int], tag: int) -> Flight:
        """Start the sum of every rank's rows, ``[sum(counts), ...]``, of which a rank gets ``[counts[rank], ...]``.

        Sums are made in the dtype of ``out``, which may be wider than that of the rows.
        """

    def all_to_all(self, out: Tensor, rows: Tensor, sent: Sequence[int], received: Sequence[int], tag: int) -> Flight:
        """Start to send each rank its rows, ``[sum(sent), ...]`` by receiver, into ``[sum(received), ...]``."""

    def exchange(
        self, out: Tensor, rows: Tensor, receivers: Sequence[Piece], senders: Sequence[Piece], tag: int
    ) -> Flight:
        """Start one message to each other rank that gets rows.

        ``receivers``: who gets which of ``rows``; ``senders``: whose arrive where in ``out``. No piece is empty.
        """


class Carriers:
    """The carriers of a session's messages; set before its first group is made.

    Attributes:
        refused: types of devices whose tensors no wire carries, whatever torch's backends say.
        mpi: the timeout of waits, where CPU tensors go by MPI.
    """

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.mpi: timedelta | None = None


class Machines:
    """The ranks' machines.

    Attributes:
        of_rank: the machine of each rank; empty before :func:`~pyg_dist.backend.comm.topology.machines` was called.
    """

    def __init__(self) -> None:
        self.of_rank: tuple[int, ...] = ()


def by_machine(ranks: Sequence[int], of_rank: Sequence[int]) -> list[list[int]]:
    """The ranks of each machine, where as many, and several, lie on each of several; else none. Not collective."""
    found: dict[int, list[int]] = {}
    for rank in ranks:
        found.setdefault(of_rank[rank], []).append(rank)
    sizes = {len(own) for own in found.values()}
    return [*found.values()] if len(found) > 1 and len(sizes) == 1 and sizes != {1} else []


def carrier() -> str:
    """The carrier of CPU tensors' messages in this session, "gloo" or "mpi"; not collective."""
    return "gloo" if current().of(Carriers).mpi is None else "mpi"
