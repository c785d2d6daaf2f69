"""Ranks that make different calls: found while they wait, reported in one line that names each rank's line, and ended.

Messages of different calls never meet (:mod:`~pyg_dist.backend.comm.checks.calls`): ranks that diverge wait for each
other. A thread of each rank looks now and then at where its rank stands. While the rank waits, it publishes that in the
rendezvous store, and reads the others'. Three things prove that the wait will never end, and nothing else is an error:

* two ranks have made different calls of the same number in the same group;
* a rank has ended before the call that others wait for;
* ranks wait in a circle: each for a call that another one, which waits as well, has not made.

Where a wire has no tags, as nccl's, two calls of one size would exchange each other's numbers, and others would wait
for ever. So each group keeps a running hash of its calls' tags, and all ranks compare them before an optimizer steps
(:func:`compare_order`), in one sum of eight bytes that waits for no device.

A rank that computes proves nothing, however long it takes. After ten seconds the wait is logged once a line, and again
each minute of it; a rank that is stopped publishes nothing, and is named. ``PYG_DIST_WATCH_SECONDS`` ends the run.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from pyg_dist.backend import host
from pyg_dist.backend.comm.checks.calls import Call, Standing, Wait, line_in_words
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.plain_json import typed
from pyg_dist.backend.session.rendezvous import STORE_ERRORS, own_connection
from pyg_dist.backend.session.settings import WATCH_SECONDS
from pyg_dist.backend.session.state import current
from pyg_dist.errors import DivergenceError, describe_ranks

logger = logging.getLogger("pyg_dist")

LOOK_SECONDS = 1.0  # between two looks at this rank
PATIENCE_SECONDS = 2.0  # a longer wait is published: longer than a step of most trainings
NOTICE_SECONDS = 10.0  # a longer wait is logged, once a line
AGAIN_SECONDS = 60.0  # until the same wait is logged again
BEAT_SECONDS = 3.0  # between two publications of a rank that computes
SILENT_SECONDS = 6.0  # a rank, or the store, that is silent for longer is stopped
_RANKS_PER_LOOK = 32  # so many look at each other every second; more of them, more seldom
_MAX_PLACES = 4  # that an error spells out

_REMEDY = (
    "every rank must make the same calls from the same lines, so make none under is_main() or another condition that "
    "differs between ranks"
)


@dataclass(frozen=True)
class Place:
    """Where a rank stands."""

    numbers: dict[str, int] = field(default_factory=dict)  # of calls made, by sequence
    recent: dict[str, dict[str, str]] = field(default_factory=dict)  # last calls of each, in words, by number
    last: str = "its start"  # call of all, in words
    waits: tuple[str, int] | None = None  # for this call: its sequence and number
    peers: tuple[int, ...] = ()  # for which it waits
    has_ended: bool = False
    beat: int = 0  # counts publications

    @property
    def waits_at(self) -> str:
        """The call that it waits for, in words."""
        if self.waits is None:
            return self.last
        name, number = self.waits
        return self.recent.get(name, {}).get(str(number), self.last)

    @staticmethod
    def of(standing: Standing, beat: int = 0, has_ended: bool = False) -> Place:
        """This rank's."""
        recent = {name: [Call(*call) for call in tuple(s.recent)] for name, s in tuple(standing.sequences.items())}
        wait: Wait | None = standing.wait
        return Place(
            {name: s.number for name, s in tuple(standing.sequences.items())},
            {name: {str(call.number): in_words(call) for call in calls} for name, calls in recent.items()},
            in_words(Call(*standing.last)) if standing.last else "its start",
            None if wait is None else (wait.calls.name, wait.number),
            () if wait is None else wait.calls.ranks if wait.peers is None else wait.peers,
            has_ended,
            beat,
        )

    @staticmethod
    def parse(text: bytes) -> Place:
        """See :meth:`to_json`."""
        return typed(Place, json.loads(text))

    def to_json(self) -> str:
        """For the store; :meth:`parse` is the inverse."""
        return json.dumps(asdict(self))


def in_words(call: Call) -> str:
    """The user's line and what it does."""
    return f"{line_in_words(call.file, call.line)}, {call.what}"


def diagnose(places: Sequence[Place], sure: Sequence[bool] | None = None) -> str | None:
    """The proof, in words, that a wait never ends, or ``None``. A pure function.

    ``sure`` says of each rank whether it is known to have been waiting at one moment, the same for all; by default all
    that wait.
    """
    different = different_calls(places)
    if different is not None:
        return different
    will_go_on = {
        rank
        for rank, place in enumerate(places)
        if not place.has_ended and (place.waits is None or (sure is not None and not sure[rank]))
    }
    waiting = [rank for rank, place in enumerate(places) if place.waits is not None and not place.has_ended]
    blockers = {rank: _blockers(rank, places) for rank in waiting}
    is_new = True
    while is_new:
        freed = {rank for rank in waiting if rank not in will_go_on and blockers[rank] <= will_go_on}
        is_new = bool(freed)
        will_go_on |= freed
    stuck = [rank for rank in waiting if rank not in will_go_on]
    if not stuck:
        return None
    involved = {*stuck, *(b for rank in stuck for b in blockers[rank] if places[b].has_ended)}
    says = {
        rank: f"{'ended after' if places[rank].has_ended else 'waiting at'} {places[rank].waits_at}"
        for rank in sorted(involved)
    }
    return _message(says)


def different_calls(places: Sequence[Place]) -> str | None:
    """The first call of a group in which ranks differ, in the words of an error."""
    for name in sorted({name for place in places for name in place.recent}):
        by_number: dict[int, dict[int, str]] = {}
        for rank, place in enumerate(places):
            for number, words in place.recent.get(name, {}).items():
                by_number.setdefault(int(number), {})[rank] = words
        for _, says in sorted(by_number.items()):
            if len(set(says.values())) > 1:
                return _message({rank: f"at {words}" for rank, words in says.items()})
    return None


def _blockers(rank: int, places: Sequence[Place]) -> set[int]:
    """The ranks that have not made the call that a rank waits for."""
    place = places[rank]
    assert place.waits is not None
    name, number = place.waits
    return {peer for peer in place.peers if peer != rank and places[peer].numbers.get(name, 0) < number}


def _message(says: Mapping[int, str]) -> str:
    return f"Expected the same calls on every rank (got {_listed(says)}): {_REMEDY}"


def _listed(says: Mapping[int, str]) -> str:
    """The words of all ranks; ranks with the same words together."""
    ranks_by_words: dict[str, list[int]] = {}
    for rank, words in says.items():
        ranks_by_words.setdefault(words, []).append(rank)
    shown = [f"{describe_ranks(ranks)} {words}" for words, ranks in ranks_by_words.items()]
    if len(shown) > _MAX_PLACES:
        shown[_MAX_PLACES:] = [f"{len(shown) - _MAX_PLACES} other places elsewhere"]
    return "; ".join(shown)


def compare_order(control: Group) -> None:
    """Check that the ranks of each group have made the same calls on wires without tags (collective, all ranks).

    Nothing is sent while there were none.

    ``control`` is the group of all ranks that carries CPU tensors.

    Raises:
        DivergenceError: On every rank, naming the first call that differs.
    """
    sequences = [calls for calls in current().of(Standing).sequences.values() if calls.order]
    if not sequences:
        return
    # Of each group the first rank adds the others' numbers and these take off their own: zero if all are equal.
    share = sum(c.order * (len(c.ranks) - 1 if control.rank == c.ranks[0] else -1) for c in sequences)
    total = control.all_reduce_(host.tensor([(share + (1 << 63)) % (1 << 64) - (1 << 63)]), kind="step")
    if total.item():
        recent = {c.name: {str(call[0]): in_words(Call(*call)) for call in c.untagged} for c in sequences}
        gathered = control.gather_bytes(Place(recent=recent).to_json().encode())
        raise DivergenceError(
            different_calls([Place.parse(place) for place in gathered])
            or "Expected the same calls on every rank since the last step (got more on some): make none under is_main()"
        )
    for calls in sequences:
        calls.untagged.clear()


class DivergenceWatch:
    """Watches where this rank stands, and ends the run when ranks diverge.

    It uses the store alone below its prefix. ``fail`` ends the run on every rank with a message, or this rank alone
    where the store does not answer (False).
    """

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, standing: Standing, fail: Callable[[str, bool], object]
    ) -> None:
        self._store = own_connection(store)
        self._rank, self._world_size, self._standing, self._fail = rank, world_size, standing, fail
        self._keys = [f"place/{r}" for r in range(world_size)]
        self._beat = 0
        self._places = [Place()] * world_size
        # Two looks back, since two threads that wake every second may miss each other once.
        self._looks: deque[list[Place]] = deque(maxlen=2)
        self._noticed: set[str] = set()
        # The main thread reads the store, too, when it has lost a connection.
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._has_store = True
        self._longest = WATCH_SECONDS.value()
        self._has_waited = 0.0
        self._last_talk = time.monotonic()
        self._last_heard = [self._last_talk] * world_size
        self._publish()
        self._threads = [
            threading.Thread(target=run, name=f"pyg_dist {name}", daemon=True)
            for name, run in (("waits", self._watch), ("divergence", self._talk))
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the watch of a rank that ends well, and say so. Not collective."""
        self._is_closed.set()
        for thread in self._threads:
            thread.join(SILENT_SECONDS)
        if self._threads[1].is_alive():  # the store does not answer
            return
        with contextlib.suppress(*STORE_ERRORS):
            self._publish(has_ended=True)

    def leave_store(self) -> None:
        """Look a last time: the rank that holds the store is about to end. Not collective."""
        self.look()
        with self._lock:
            self._has_store = False
        self._is_closed.set()

    def look(self) -> None:
        """Read where all ranks stand, if all have begun. Not collective."""
        with contextlib.suppress(*STORE_ERRORS), self._lock:
            if self._has_store and self._store.check(self._keys):
                values = self._store.multi_get(self._keys)
                self._places = [Place.parse(value) for value in values]

    def why_lost(self, peer: int | None) -> str | None:
        """Why a connection is gone, if a rank has ended: see :class:`~pyg_dist.backend.comm.connection.LossReason`."""
        mine = Place.of(self._standing)
        self.look()
        ended = {r: place for r, place in enumerate(self._places) if place.has_ended and peer in (None, r)}
        if not ended:
            return None
        says = {self._rank: f"waiting at {mine.waits_at}"}
        return _message(says | {r: f"ended after {place.last}" for r, place in ended.items()})

    def _watch(self) -> None:
        """Tell the script how long this rank waits. It never talks to the store, whose holder may be stopped."""
        wait, has_waited, next_notice, last = None, 0.0, 0.0, time.monotonic()
        while not self._is_closed.wait(LOOK_SECONDS):
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * LOOK_SECONDS), now  # else this process was stopped itself
            if self._standing.wait is not wait:
                wait, has_waited, next_notice = self._standing.wait, 0.0, NOTICE_SECONDS
            has_waited = 0.0 if wait is None else has_waited + elapsed
            self._has_waited = has_waited
            if wait is None or has_waited < min(next_notice, self._longest):
                continue
            mine = Place.of(self._standing).waits_at
            if has_waited >= self._longest:
                line = f"rank {self._rank} has waited {has_waited:.0f} s at {mine}, which is all that"
                self._fail(f"{line} {WATCH_SECONDS.name} allows; {self._others_in_words(now)}", self._answers(now))
            if next_notice > NOTICE_SECONDS or mine not in self._noticed:
                self._noticed.add(mine)
                others = self._others_in_words(now)
                logger.warning("rank %d has waited %.0f s at %s; %s", self._rank, has_waited, mine, others)
            next_notice = has_waited + AGAIN_SECONDS

    def _answers(self, now: float) -> bool:
        return now - self._last_talk < SILENT_SECONDS

    def _others_in_words(self, now: float) -> str:
        def says(rank: int, place: Place) -> str:
            if self._answers(now) and now - self._last_heard[rank] >= SILENT_SECONDS and not place.has_ended:
                why = "stopped, starved or in a native call that keeps Python's lock, as METIS does"
                return f"not answering, so {why}, after {place.waits_at}"
            return f"{'waiting at' if place.waits else 'computing after'} {place.waits_at}"

        others = {r: says(r, place) for r, place in enumerate(self._places) if r != self._rank}
        if self._answers(now):
            return _listed(others)
        return (
            f"the store has not answered, so who holds it, rank 0 or torchrun's agent, is stopped, or rank 0 is in a "
            f"native call that keeps Python's lock, as METIS does; heard last: {_listed(others)}"
        )

    def _talk(self) -> None:
        """Publish where this rank stands, and look for what proves that its wait never ends."""
        next_look, next_beat = 0.0, 0.0
        published: tuple[object, object] = None, None  # the last call and the wait that others know of
        while not self._is_closed.wait(LOOK_SECONDS):
            now = self._last_talk = time.monotonic()
            standing = self._standing.last, self._standing.wait
            try:
                if self._has_waited >= PATIENCE_SECONDS:
                    self._publish()
                    if now >= next_look:
                        next_look = now + LOOK_SECONDS * (self._world_size // _RANKS_PER_LOOK)
                        self._compare()
                elif now >= next_beat or standing[0] is not published[0] or standing[1] is not published[1]:
                    self._publish()
                    if any(calls.order for calls in tuple(self._standing.sequences.values())):
                        self._compare()  # a rank that waits for its GPU does not know for which call
                else:
                    continue
                published, next_beat = standing, now + BEAT_SECONDS
            except STORE_ERRORS:  # the store is gone, which the failure thread reports
                return

    def _publish(self, has_ended: bool = False) -> None:
        self._beat += 1
        place = Place.of(self._standing, self._beat, has_ended)
        self._places[self._rank] = place
        with self._lock:
            if self._has_store:
                self._store.set(self._keys[self._rank], place.to_json())

    def _compare(self) -> None:
        before = self._places
        self.look()
        now = time.monotonic()
        for rank, (earlier, place) in enumerate(zip(before, self._places, strict=True)):
            if place.beat > earlier.beat:
                self._last_heard[rank] = now
        # Who waits for what it waited for at an earlier look, and has published so since, waited in that moment.
        earlier_places = self._looks[0] if self._looks else self._places
        sure = [p.waits == e.waits and p.beat > e.beat for p, e in zip(self._places, earlier_places, strict=True)]
        self._looks.append(self._places)
        found = diagnose(self._places, sure)
        if found is not None:
            self._fail(found, True)
