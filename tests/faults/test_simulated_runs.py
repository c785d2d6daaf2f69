"""The protocol of a run in simulation: numbered calls, sums that carry digests, states in memory, failure, agreement.

Each schedule is a loop of two or three steps on simulated ranks (``simulated_ranks.py``) with a fault or none. It ends
in a result that all ranks share, or each rank that is left names another one; and then the machines' memory has a whole
state, at most one step before the last that any rank has ended. ``python tests/faults/test_simulated_runs.py 100000``
runs so many, and ``... 5 7`` the seeds 5 to 7.
"""

from __future__ import annotations

import gc
import multiprocessing
import random
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import simulated_ranks
import torch
from simulated_ranks import Outcome, Rank, Simulation
from torch import Tensor

from pyg_dist.backend.comm import connection
from pyg_dist.backend.comm.checks import replicas
from pyg_dist.backend.comm.checks.noted import Numbers
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session.state import current
from pyg_dist.checkpoint import memory, record
from pyg_dist.checkpoint.memory import MachineMemory, Part, newest_complete
from pyg_dist.checkpoint.record import parsed
from pyg_dist.checkpoint.snapshot import Snapshot
from pyg_dist.checkpoint.writer import Writer
from pyg_dist.errors import AgreementError, ConnectionLostError
from pyg_dist.partition.inputs import Array
from pyg_dist.store.manifest import Shard

MACHINES = (0,), *[(0, 0), (0, 1)] * 3, (0, 0, 1), (0, 1, 2), (0, 0, 1, 1)
FAULTS = "none", "a kill", "a lost machine", "an extra call", "another value"


class Schedule(NamedTuple):
    """What a seed stands for."""

    machine_of: tuple[int, ...]
    fault: str
    odd: int  # the rank at fault, or a rank of the machine
    time: int  # when it is killed
    num_steps: int
    step: int  # when it differs

    @staticmethod
    def of(seed: int) -> Schedule:
        rng = random.Random(f"schedule {seed}")
        machine_of, fault = rng.choice(MACHINES), rng.choice(FAULTS)
        if len(machine_of) == 1 or (fault == "a lost machine" and len(set(machine_of)) == 1):
            fault = "none" if fault != "a kill" else fault
        odd, time, num_steps = rng.randrange(len(machine_of)), rng.randrange(130), rng.randint(2, 3)
        return Schedule(machine_of, fault, odd, time, num_steps, rng.randint(1, num_steps))


class Run:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.schedule = Schedule.of(seed)
        self.simulation = Simulation(seed, self.schedule.machine_of)
        self.files: dict[Path, Array] = {}
        self.done = [0] * len(self.schedule.machine_of)

    def body(self, rank: Rank) -> int:
        group, schedule, kept = world_group(), self.schedule, MachineMemory(Path())
        is_odd = rank.number == schedule.odd
        for step in range(1, schedule.num_steps + 1):
            differs = is_odd and step == schedule.step
            value = step + (differs and schedule.fault == "another value")
            replicas.noted().add(Numbers("number", (value,)), "script.py", step)
            if differs and schedule.fault == "an extra call":
                assert world_group().sum(torch.ones(2)).tolist() == [rank.size] * 2
            total = self.sum(group, torch.full((2,), float(step + rank.number)))
            assert total is None or total.tolist() == [float(sum(step + r for r in range(rank.size)))] * 2
            kept.keep(step, {})
            self.done[rank.number] = step
        return schedule.num_steps

    def sum(self, group: Any, mine: torch.Tensor) -> torch.Tensor | None:
        total: torch.Tensor = group.sum(mine)
        return total

    def mapped(self, path: Path, size: int) -> Array:
        """A file, of which the beginning stays."""
        content = np.zeros(size, np.uint8)
        if (before := self.files.get(path)) is not None:
            content[: len(before)] = before[:size]
        self.files[path] = content
        return content

    def fill(self, places: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """Before each piece is written another rank may go on, or this one is killed; a copy of a record has two."""
        rank = self.simulation.ranks[current().rank]
        if len(places) == 1:
            places, tensors = places[0].tensor_split(2), tensors[0].tensor_split(2)
        for place, tensor in zip(places, tensors, strict=True):
            rank.pause()
            place.copy_(tensor)

    def run(self) -> None:
        schedule = self.schedule
        lost = {schedule.odd: schedule.time} if schedule.fault == "a kill" else {}
        if schedule.fault == "a lost machine":
            machine = schedule.machine_of[schedule.odd]
            lost = {rank: schedule.time for rank, m in enumerate(schedule.machine_of) if m == machine}
        self.check(self.simulation.run(self.body, lost), lost)
        self.check_memory(f"-{schedule.machine_of[schedule.odd]}" if schedule.fault == "a lost machine" else None)

    def check(self, outcomes: Sequence[Outcome], lost: Mapping[int, int]) -> None:
        """All have the same result, or each one that is left names another."""
        fault, odd, last = self.schedule.fault, self.schedule.odd, self.schedule.num_steps
        if all(outcome.result == last for outcome in outcomes):
            assert fault in ("none", "a kill", "a lost machine"), f"{fault} of rank {odd} was not noticed"
            return
        for rank, outcome in enumerate(outcomes):
            error, told = outcome.error, str(outcome.error or outcome.waits)
            if outcome.is_killed or outcome.result == last:
                assert rank in lost or outcome.result == last
                continue
            named = {int(number) for number in re.findall(r"ranks? (\d+)", told)}
            assert named - {rank}, f"rank {rank} names nobody: {error!r} {told}"
            if isinstance(error, AgreementError):
                assert fault == "another value", told
            elif error is None:
                assert fault == "an extra call", told
            else:
                assert isinstance(error, ConnectionLostError), repr(error)
                assert fault != "none", told

    def check_memory(self, lost: str | None) -> None:
        """At most one step that a rank has ended is lost, and all parts are of one step."""
        found: dict[str, list[Part]] = {}
        content: dict[tuple[int, str, str], dict[str, Any]] = {}
        for path, file in self.files.items():
            machine = path.parent.name
            if lost is not None and machine.endswith(lost):
                continue
            if (told := parsed(file)) is not None:
                head, tensors = told
                part = Part(head["number"], head["attempt"], path.stem, head["holders"], int(path.suffix[1:]))
                found.setdefault(machine, []).append(part)
                content[part[:3]] = {name: tensor.tolist() for name, tensor in tensors.items()}
        chosen = newest_complete([*found.values()])
        number = chosen[memory.STATE].number if chosen else 0
        assert max(self.done) - 1 <= number <= max(self.done) + 1, f"step {number} is left of {self.done}"
        holders = chosen[memory.STATE].holders if chosen else []
        assert chosen.keys() >= {*map(memory.rows_of, holders)}, f"not all rows of {holders} are there"
        for kind, part in chosen.items():
            assert part.number == number
            expected = snapshot_of(number, 0 if kind == memory.STATE else int(kind[5:]), 0, True)
            wanted = expected.tensors if kind == memory.STATE else expected.pieces
            assert content[part[:3]] == {name: tensor.tolist() for name, tensor in wanted.items()}, kind


def snapshot_of(number: int, rank: int, size: int, is_writer: bool) -> Snapshot:
    """What a rank has at a step; rank 0 has no rows, if there are several."""
    tensors = {"a": torch.full((5,), number), "b": torch.full((3,), -number)} if is_writer else {}
    pieces = {"first": torch.full((2,), 10 * number + rank), "second": torch.full((4,), rank - number)}
    return Snapshot(tensors=tensors, pieces=pieces if rank or size == 1 else {}, holders=set(range(size)) - {0})


def taken(things: Any, is_writer: bool, known: Any) -> Snapshot:
    """In the place of :func:`~pyg_dist.checkpoint.snapshot.take`."""
    session, step = current(), sys._getframe(1).f_locals["number"]
    return snapshot_of(step, session.rank, session.world_size, is_writer)


RUN: list[Run] = []
"""The one that goes on."""


@contextmanager
def simulated() -> Iterator[None]:
    """Patches that hold for all schedules."""
    with ExitStack() as stack:
        for owner, name, value in (
            (memory, "_base", Path),
            (memory, "_remove_leftovers", nothing),
            (memory, "_make_private", nothing),
            (memory, "run_of", lambda path: "run"),
            (memory, "take", taken),
            (memory, "mapped", lambda path, size: RUN[-1].mapped(path, size)),
            (record, "fill", lambda places, tensors: RUN[-1].fill(places, tensors)),
            (memory.MACHINES.__class__, "value", machines),
            (connection.dist, "get_rank", lambda: current().rank),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def machines(setting: Any) -> tuple[int, ...] | None:
    """What settings say."""
    return RUN[-1].schedule.machine_of if setting is memory.MACHINES else None


def run_one(seed: int, kind: type[Run] = Run) -> None:
    """Run a schedule; the error of one that fails begins with its seed."""
    RUN[:] = [kind(seed)]
    try:
        RUN[0].run()
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {Schedule.of(seed)}: {error}") from error


def run_all(seeds: Iterable[int], kind: type[Run] = Run) -> None:
    """Run schedules."""
    with simulated():
        for seed in seeds:
            run_one(seed, kind)


def test_schedules() -> None:
    run_all(range(200))


def test_a_seed_replays() -> None:
    class Noted(Run):
        def check(self, outcomes: Sequence[Outcome], lost: Mapping[int, int]) -> None:
            said.extend(map(repr, outcomes))

    def outcomes(seed: int) -> list[str]:
        said.clear()
        run_one(seed, Noted)
        return [*said]

    said: list[str] = []
    with simulated():
        for seed in range(20):
            assert outcomes(seed) == outcomes(seed)


class Keys:
    """A store that all ranks share, as a writer's thread uses it."""

    def __init__(self, rank: Rank, content: dict[str, bytes]) -> None:
        self.rank, self.content = rank, content

    def set(self, key: str, value: str) -> None:
        self.rank.pause()
        self.content[key] = value.encode()

    def wait(self, keys: list[str], timeout: Any) -> None:
        self.rank.pause(lambda: all(key in self.content for key in keys))

    def get(self, key: str) -> bytes:
        return self.content[key]

    def delete_key(self, key: str) -> None:
        del self.content[key]


def commits(seed: int, asked: int | None = None) -> None:
    """Two checkpoints: rank 0 hears of all shards, or that a rank has failed, or it waits for one that was killed."""
    rng = random.Random(f"commit {seed}")
    size = rng.randint(1, 4)
    fails = [{rank for rank in range(size) if rng.random() < 0.2} for _ in range(2)]
    killed = {rng.randrange(1, size): rng.randrange(20)} if size > 1 and rng.random() < 0.3 else {}
    content: dict[str, bytes] = {}

    def body(rank: Rank) -> list[Any]:
        writer: Any = Writer.__new__(Writer)
        writer._store, writer._rank, writer._world_size = Keys(rank, content), rank.number, asked or size
        heard = []
        for serial in range(2):
            shard = Shard(f"rows-{rank.number}-{serial}", 0, {}, {})
            heard.append(writer._gather(serial, None if rank.number in fails[serial] else {f"{rank.number}": shard}))
        return heard

    outcomes = Simulation(seed, (0,) * size).run(body, killed)
    if outcomes[0].result is None:
        assert killed, "rank 0 waits"
        return
    for serial, heard in enumerate(outcomes[0].result):
        whole = None if fails[serial] else {f"{r}": f"rows-{r}-{serial}" for r in range(size)}
        assert (heard and {key: shard.file for key, shard in heard.items()}) == whole


def test_rank_0_hears_of_all_shards_or_of_a_failure() -> None:
    for seed in range(300):
        commits(seed)
    with pytest.raises(AssertionError):
        any(map(partial(commits, asked=1), range(300)))


class NoSums(Run):
    """A rank may be two steps ahead of another."""

    def sum(self, group: Any, mine: torch.Tensor) -> None: ...


class SameDigest:
    """Hashes by which all is alike."""

    xxh3_128_digest = mock.Mock(return_value=b"1" * 16)


def newest_state(found: Sequence[Sequence[Part]]) -> dict[str, Part]:
    """Of which not all is there."""
    states = [part for parts in found for part in parts if part.kind == memory.STATE]
    return {memory.STATE: max(states)} if states else {}


def write_over(kept: MachineMemory, kind: str, *args: Any, write: Any = MachineMemory._write, **kwargs: Any) -> Any:
    """The newest record, and not the one before it."""
    kept._slots[kind] = 0
    return write(kept, kind, *args, **kwargs)


def nothing(*_: Any) -> None: ...


MUTANTS: dict[str, Callable[[], tuple[Any, str, Any]]] = {
    "one tag for all messages": lambda: (simulated_ranks, "message_tag", lambda tag, num_bytes: 1),
    "values are not compared": lambda: (replicas, "compare", nothing),
    "torn records are taken": lambda: (record, "xxhash", SameDigest),
    "rows that are not there": lambda: (sys.modules[__name__], "newest_complete", newest_state),
    "one file, not two in turn": lambda: (MachineMemory, "_write", write_over),
    "no copies on other machines": lambda: (MachineMemory, "_copy_to_next", nothing),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str) -> None:
    with mock.patch.object(*MUTANTS[name]()), pytest.raises(AssertionError, match=r"^seed \d+, Schedule"):
        run_all(range(400))


def test_steps_without_a_sum_of_all_are_found() -> None:
    with pytest.raises(AssertionError, match=r"^seed \d+, Schedule"):
        run_all(range(400), NoSums)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    chosen = range(numbers[0]) if len(numbers) == 1 else range(numbers[0], numbers[1] + 1)
    pieces = [chosen[low : low + 500] for low in range(0, len(chosen), 500)]
    start = time.perf_counter()
    gc.freeze()  # what is imported stays: no collection in a process walks through it
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("fork")) as pool:
        for _ in pool.map(run_all, pieces):  # raises what the first piece that fails has raised
            pass
    sys.stdout.write(f"{len(chosen)} schedules in {time.perf_counter() - start:.1f} s\n")
