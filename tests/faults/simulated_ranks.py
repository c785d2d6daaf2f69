"""Ranks in one process, stepped one at a time: a seed decides who goes on, when a message arrives, and who is killed.

A rank is a coroutine with a session of its own, a greenlet, which pauses within calls of the package. Its wire is the
package's :class:`~pyg_dist.backend.comm.wires.point_to_point.PointToPoint`, over a network in memory; all above it is
what a run has. A schedule is a function of its seed: the seed of one that fails replays it.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from greenlet import getcurrent, greenlet
from torch import Tensor

from pyg_dist.backend.comm.checks.calls import Standing, message_tag
from pyg_dist.backend.comm.connection import raise_with_peer
from pyg_dist.backend.comm.group import Group, Groups
from pyg_dist.backend.comm.wires.point_to_point import PointToPoint
from pyg_dist.backend.comm.wires.wire import Machines, Message
from pyg_dist.backend.session import state
from pyg_dist.backend.session.agreement import Control
from pyg_dist.backend.session.divergence import Place, diagnose
from pyg_dist.backend.session.state import Session

Body = Callable[["Rank"], Any]


class Outcome(NamedTuple):
    """How a rank has ended: with a result, with an error, killed, or waiting for ever for what ``waits`` says."""

    result: Any = None
    error: Exception | None = None
    is_killed: bool = False
    waits: str = ""


class Sent:
    """A message that has left, or that its sender will find lost."""

    def __init__(self, is_lost: bool) -> None:
        self.is_lost = is_lost

    def wait(self) -> None:
        if self.is_lost:
            raise RuntimeError("Connection reset by peer")


class Arriving:
    """A message that is waited for."""

    def __init__(self, rank: Rank, x: Tensor, source: int, tag: int) -> None:
        self.rank, self.x, self.key = rank, x, (source, rank.number, tag)

    def wait(self) -> None:
        simulation, (source, _, _) = self.rank.simulation, self.key
        arrived = simulation.arrived[self.key]
        if not arrived:
            self.rank.pause(lambda: bool(arrived) or simulation.is_silent(source))
        if not arrived:
            raise RuntimeError("Connection closed by peer")
        self.x.copy_(arrived.popleft())


class SimulatedWire(PointToPoint):
    """Messages over the simulation's network."""

    def __init__(self, rank: Rank, ranks: Sequence[int]) -> None:
        super().__init__(rank.number, ranks)
        self.of = rank

    def send(self, x: Tensor, peer: int, tag: int) -> Message:
        """See :class:`PointToPoint`."""
        to = self.ranks[peer]
        is_lost = to in self.of.simulation.gone
        if is_lost and self.of.simulation.rng.random() < 0.5:  # it is known already
            raise_with_peer(RuntimeError("Broken pipe"), to)
        if not is_lost:
            self.of.simulation.flying.append(((self.of.number, to, message_tag(tag, x.nbytes)), x.clone()))
        return Message(Sent(is_lost), to)

    def receive(self, x: Tensor, peer: int, tag: int) -> Message:
        """See :class:`PointToPoint`."""
        source = self.ranks[peer]
        return Message(Arriving(self.of, x, source, message_tag(tag, x.nbytes)), source)


class Rank:
    """One of them, and its coroutine."""

    def __init__(self, simulation: Simulation, number: int, size: int) -> None:
        self.simulation, self.number, self.size = simulation, number, size
        self.session, self.outcome = Session(), Outcome()
        self.is_ready: Callable[[], bool] = lambda: True

    def start(self, body: Body, machine_of: Sequence[int]) -> None:
        state._current = self.session
        self.session.rank, self.session.world_size, self.session.is_joined = self.number, self.size, True
        group = Group([SimulatedWire(self, range(self.size))])
        self.session.of(Groups).world[None] = self.session.of(Control).group = group
        self.session.store = self.simulation  # type: ignore[assignment]  # there is one: only whether is asked
        self.session.of(Machines).of_rank = tuple(machine_of)

        def run() -> None:
            try:
                self.outcome = Outcome(result=body(self))
            except Exception as error:
                self.outcome = Outcome(error=error)
            self.simulation.gone.add(self.number)

        self._coroutine = greenlet(run, getcurrent())

    def pause(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Let others go on, at least until ``is_ready``."""
        self.is_ready = is_ready
        self._coroutine.parent.switch()

    def step(self) -> None:
        """Go on to the next pause."""
        state._current = self.session
        self._coroutine.switch()

    def kill(self) -> None:
        """End it where it has paused."""
        state._current = self.session
        self._coroutine.throw()
        self.outcome = Outcome(is_killed=True)
        self.simulation.gone.add(self.number)


class Simulation:
    """Runs of a body on simulated ranks.

    Attributes:
        flying: messages that have left, in no order but among those of two ranks with one tag.
        arrived: by sender, receiver and tag.
        gone: ranks that have ended, in whatever way.
    """

    def __init__(self, seed: int, machine_of: Sequence[int]) -> None:
        self.rng = random.Random(seed)
        self.flying: list[tuple[tuple[int, int, int], Tensor]] = []
        self.arrived: dict[tuple[int, int, int], deque[Tensor]] = defaultdict(deque)
        self.gone = set[int]()
        self.ranks = [Rank(self, number, len(machine_of)) for number in range(len(machine_of))]
        self._machine_of = machine_of

    def is_silent(self, rank: int) -> bool:
        """Whether nothing more comes from a rank."""
        return rank in self.gone and not any(source == rank for (source, _, _), _ in self.flying)

    def run(self, body: Body, killed: dict[int, int]) -> list[Outcome]:
        """Run to the end; each rank of ``killed`` is killed when so many steps of the schedule were made."""
        before = state._current
        try:
            for rank in self.ranks:
                rank.start(body, self._machine_of)
            time = 0
            while True:
                for victim in [number for number, at in killed.items() if at <= time and number not in self.gone]:
                    self.ranks[victim].kill()
                ready = [r for r in self.ranks if r.number not in self.gone and r.is_ready()]
                if not ready and not self.flying:
                    break
                choice = int(self.rng.random() * (len(ready) + len(self.flying)))
                if choice < len(ready):
                    ready[choice].step()
                else:
                    self._deliver(choice - len(ready))
                time += 1
            return self._outcomes()
        finally:
            for rank in self.ranks:
                if rank.number not in self.gone:
                    rank.kill()
            state._current = before

    def _deliver(self, choice: int) -> None:
        key = self.flying[choice][0]  # of two with one key the first comes first
        first = next(k for k, (other, _) in enumerate(self.flying) if other == key)
        self.arrived[key].append(self.flying.pop(first)[1])

    def _outcomes(self) -> list[Outcome]:
        """Where nobody goes on, what the watch over diverging ranks finds is what all are told."""
        if all(rank.number in self.gone for rank in self.ranks):
            return [rank.outcome for rank in self.ranks]
        places = [Place.of(r.session.of(Standing), has_ended=r.number in self.gone) for r in self.ranks]
        told = diagnose(places) or "nothing"
        return [r.outcome if r.number in self.gone else Outcome(waits=told) for r in self.ranks]
