"""What every wire does, whatever carries its messages. A new wire is a line of ``WIRES``.

Bodies take a wire and run on every rank. Guard values around buffers catch what is written beside them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from counting_wire import CountingWire
from torch import Tensor
from workers import Pools

import pyg_dist
from pyg_dist.backend.comm.checks.calls import Standing
from pyg_dist.backend.comm.checks.replicas import noted
from pyg_dist.backend.comm.connection import wait
from pyg_dist.backend.comm.group import Group, from_wire, to_wire, world_group
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.comm.wires.c10d import C10dWire
from pyg_dist.backend.comm.wires.gloo import GlooWire
from pyg_dist.backend.comm.wires.shared_memory import SharedMemory
from pyg_dist.backend.comm.wires.staged import StagedWire
from pyg_dist.backend.comm.wires.wire import Flight, Wire
from pyg_dist.backend.session.agreement import Control
from pyg_dist.backend.session.divergence import compare_order
from pyg_dist.backend.session.state import current
from pyg_dist.errors import AgreementError, DivergenceError

Body = Callable[[Wire], Any]


def by_memory(process_group: Any) -> Wire:
    """Messages of any size go through the machine's memory, while they find room in the little that there is."""
    ranks, memory = world_group(), current().of(SharedMemory)
    memory.close()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYG_DIST_SHARED_MIB", "1")
        memory.open([0] * ranks.size, ranks.rank, ranks.gather_bytes)
    assert len(memory.of_rank) == ranks.size - 1
    memory.least_bytes = 1
    return GlooWire(process_group)


WIRES: dict[str, Callable[[Any], Wire]] = {
    "gloo": GlooWire,
    "c10d": lambda process_group: C10dWire(process_group, "cpu"),  # as nccl, on gloo
    "staged": lambda process_group: StagedWire(GlooWire(process_group), "cpu"),
    "memory": by_memory,
    "counting": lambda process_group: CountingWire(GlooWire(process_group)),
}

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def drawn(dtype: torch.dtype, rank: int, *shape: int) -> Tensor:
    """What a rank has; every rank can make all ranks'."""
    generator = torch.Generator().manual_seed(rank)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 30, shape, generator=generator).to(dtype)


def finish(flight: Flight) -> None:
    for message in (*flight.arriving.values(), *flight.others):
        wait(message)


def digest(x: Tensor) -> str:
    """Of its bits."""
    return hashlib.sha1(x.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()


def reduces(wire: Wire) -> list[str]:
    """In every dtype and op, small and large; returned, since all ranks, and wires with tags, have the same bits."""
    found = []
    for dtype in DTYPES:
        is_usual = dtype == torch.float32
        for shape in ((1,), (5, 3), (300_001 if is_usual else 70_001,)):  # in halves between two ranks, else in pieces
            for op, reduce in (("sum", torch.add), ("max", torch.maximum), ("min", torch.minimum)):
                if op != "sum" and (dtype.is_complex or (shape[0] > 5 and not is_usual)):
                    continue
                mine, *others = (to_wire(drawn(dtype, rank, *shape)) for rank in range(wire.size))
                total, _ = wire.all_reduce(to_wire(drawn(dtype, wire.rank, *shape)), op, 1)
                for other in others:
                    mine = reduce(mine, other)
                assert total.shape == mine.shape
                torch.testing.assert_close(from_wire(total, dtype), from_wire(mine, dtype), rtol=0.05, atol=0.05)
                found.append(f"{op} of {dtype} {shape}: {digest(total)}")
    return found


def compares_numbers(wire: Wire) -> None:
    x = torch.arange(3.0)
    for number in (0, -2, (1 << 63) - 1):
        assert wire.all_reduce(x.clone(), "sum", 1, number)[1]
    total, are_equal = wire.all_reduce(x.clone(), "sum", 2, 7 + (wire.rank == wire.size - 1))
    assert total.tolist() == [0, wire.size, 2 * wire.size]
    assert are_equal is not wire.has_tags


def broadcasts(wire: Wire) -> None:
    for source in range(wire.size):
        for dtype in DTYPES:
            x = to_wire(drawn(dtype, wire.rank, 4, 3))
            wire.broadcast(x, source, 1)
            assert_same_bits(x, to_wire(drawn(dtype, source, 4, 3)), f"{dtype} from {source}")


def gathers(wire: Wire) -> None:
    for dtype in DTYPES:
        for columns in ((), (3,), (0,)):
            for tag, counts in enumerate(counts_by_rank(wire.size)):
                parts = [to_wire(drawn(dtype, rank, count, *columns)) for rank, count in enumerate(counts)]
                whole, out = guarded(sum(counts), parts[0])
                finish(wire.all_gather(out, parts[wire.rank], counts, tag))
                assert_same_bits(out, torch.cat(parts), f"{dtype} {counts}")
                assert (whole[0] == 9).all()
                assert (whole[-1] == 9).all()


def counts_by_rank(size: int) -> list[list[int]]:
    """As many rows on each rank, rows on one alone, nowhere, and numbers that differ."""
    return [[3] * size, [0] * (size - 1) + [2], [0] * size, [(2 * rank + 1) % 4 for rank in range(size)]]


def reduces_to_parts(wire: Wire) -> list[str]:
    """Returned, since wires with tags add in one order."""
    found = []
    for dtype, sum_dtype in ((torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16, torch.float32)):
        for columns in ((), (3,), (0,)):
            for tag, counts in enumerate(counts_by_rank(wire.size)):
                rows = [drawn(dtype, rank, sum(counts), *columns) for rank in range(wire.size)]
                low = sum(counts[: wire.rank])
                whole, out = guarded(counts[wire.rank], rows[0].to(sum_dtype))
                finish(wire.reduce_scatter(out, rows[wire.rank], counts, tag))
                expected = sum(x[low : low + counts[wire.rank]].to(sum_dtype) for x in rows)
                torch.testing.assert_close(out, expected)
                assert (whole[0] == 9).all()
                assert (whole[-1] == 9).all()
                found.append(f"{dtype} {columns} {counts}: {digest(out)}")
    return found


def count(sender: int, receiver: int) -> int:
    return (3 * sender + 5 * receiver + 1) % 4


def piece(dtype: torch.dtype, sender: int, receiver: int, columns: tuple[int, ...], turn: int = 0) -> Tensor:
    return to_wire(drawn(dtype, 100 * turn + 10 * sender + receiver, count(sender, receiver), *columns))


def guarded(rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    whole = torch.full((rows + 2, *like.shape[1:]), 9, dtype=like.dtype)
    return whole, whole[1 : rows + 1]


def all_to_all(wire: Wire, dtype: torch.dtype, columns: tuple[int, ...], turn: int = 0) -> Callable[[], None]:
    ranks = range(wire.size)
    rows = torch.cat([piece(dtype, wire.rank, r, columns, turn) for r in ranks])
    expected = torch.cat([piece(dtype, r, wire.rank, columns, turn) for r in ranks])
    whole, out = guarded(expected.shape[0], rows)
    sent, received = [count(wire.rank, r) for r in ranks], [count(r, wire.rank) for r in ranks]
    flight = wire.all_to_all(out, rows, sent, received, 10 + turn)

    def check() -> None:
        finish(flight)
        assert_same_bits(out, expected, f"{dtype} {columns}")
        assert (whole[0] == 9).all()
        assert (whole[-1] == 9).all()

    return check


def exchange(wire: Wire, dtype: torch.dtype, columns: tuple[int, ...], turn: int = 0) -> Callable[[], None]:
    """Pieces arrive apart, in an order of their own."""
    others = [r for r in range(wire.size) if r != wire.rank]
    rows = torch.cat([piece(dtype, wire.rank, r, columns, turn) for r in others])
    bounds = [0, *accumulate(count(wire.rank, r) for r in others)]
    receivers = [(r, low, high) for r, low, high in zip(others, bounds, bounds[1:], strict=False) if low < high]
    senders = [r for r in reversed(others) if count(r, wire.rank)]
    ends = [*accumulate(count(r, wire.rank) + 1 for r in senders)]
    slots = [(r, end - count(r, wire.rank), end) for r, end in zip(senders, ends, strict=True)]
    out = torch.full(((ends or [0])[-1] + 1, *rows.shape[1:]), 9, dtype=rows.dtype)
    flight = wire.exchange(out, rows, receivers, slots, 10 + turn)

    def check() -> None:
        finish(flight)
        for sender, low, high in slots:
            assert_same_bits(out[low:high], piece(dtype, sender, wire.rank, columns, turn), f"{dtype} of {sender}")
            assert (out[low - 1] == 9).all()
        assert (out[-1] == 9).all()

    return check


def sends_rows(wire: Wire) -> None:
    for dtype in DTYPES:
        for columns in ((), (3,), (0,), (2, 2)):
            all_to_all(wire, dtype, columns)()
            exchange(wire, dtype, columns)()


def has_many_under_way(wire: Wire) -> None:
    """Messages may be waited for in another order than they were sent in."""
    turns = [start(wire, torch.float32, (5,), turn) for turn in range(4) for start in (all_to_all, exchange)]
    for check in reversed(turns):
        check()


def sends_to_itself_alone(wire: Wire) -> None:
    """Some ranks may have nothing to send, all of them as well."""
    nothing, rows = [0] * wire.size, torch.arange(6.0).view(2, 3)
    finish(wire.exchange(torch.empty(0, 3), torch.empty(0, 3), [], [], 1))
    finish(wire.all_to_all(torch.empty(0, 3), torch.empty(0, 3), nothing, nothing, 2))
    own = [2 * (rank == wire.rank) for rank in range(wire.size)]
    out = torch.zeros(2, 3)
    finish(wire.all_to_all(out, rows, own, own, 3))
    assert_same_bits(out, rows)


def keeps_calls_apart(wire: Wire) -> None:
    """Where messages have tags, two of one size find their calls in whatever order they are received."""
    if not wire.has_tags:
        return
    to, sender = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    rows, outs = [torch.full((1, 4), float(tag)) for tag in (1, 2)], [torch.zeros(1, 4) for _ in range(2)]
    order = (0, 1) if wire.rank % 2 else (1, 0)
    flights = [wire.exchange(outs[k], rows[k], [(to, 0, 1)], [(sender, 0, 1)], k + 1) for k in order]
    for flight in flights:
        finish(flight)
    assert [out[0, 0].item() for out in outs] == [1, 2]


@contextmanager
def group_of(wire: Wire) -> Iterator[Group]:
    group = Group([wire], f"of {type(wire).__name__}")
    yield group
    current().of(Standing).sequences.pop(group.calls.name)


def carries_groups(wire: Wire) -> None:
    """All that goes through a group and a transport; what is sent is counted there."""
    with group_of(wire) as group:
        for dtype in DTYPES:
            x = drawn(dtype, group.rank, 4, 3)
            strided = x.t().clone().t()
            assert_same_bits(group.broadcast_(strided), drawn(dtype, 0, 4, 3), str(dtype))
            parts = [drawn(dtype, rank, 4, 3) for rank in range(group.size)]
            assert_same_bits(group.gather_rows(x, [4] * group.size), torch.cat(parts), str(dtype))
        assert group.gather_counts(group.rank) == [*range(group.size)]
        assert group.gather_bytes(b"x" * group.rank) == [b"x" * rank for rank in range(group.size)]
        group.barrier()
        transport, each = Transport(group), [1] * group.size
        arrived = transport.all_to_all(torch.full((group.size, 2), float(group.rank)), each, each).wait()
        assert arrived[:, 1].tolist() == [*range(group.size)]
        assert transport.traffic.num_bytes == 8 * (group.size - 1)


def tells_of_divergence(wire: Wire) -> None:
    """Another call on one rank: where nothing keeps them apart, the step's end says so on every rank."""
    control = current().of(Control).group
    with group_of(wire) as group:
        group.barrier()
        compare_order(control)
        if wire.has_tags:
            return
        if wire.rank == wire.size - 1:
            group.sum(torch.ones(3))  # the odd one
        else:
            group.sum(torch.ones(3))
        with pytest.raises(
            DivergenceError, match=r"rank.* at .*sum of 3 float32; .*rank.* at .*the odd one.*: every rank"
        ):
            compare_order(control)


def compares_replicas(wire: Wire) -> None:
    """What ranks have noted goes with the next small sum, on every wire with tags."""
    if not wire.has_tags:
        return
    with group_of(wire) as group:
        group.barrier()
        noted().tensor(torch.full((2,), float(wire.rank)))
        with pytest.raises(AgreementError, match=r"Expected the same tensor float32 \[2\] on every rank"):
            group.barrier()
        group.barrier()


BODIES: list[Body] = [
    reduces, reduces_to_parts, compares_numbers, broadcasts, gathers, sends_rows, has_many_under_way,
    sends_to_itself_alone, keeps_calls_apart, carries_groups, tells_of_divergence, compares_replicas,
]  # fmt: skip


def run(wire: str, body: Body) -> Any:
    pyg_dist.init()
    try:
        return body(WIRES[wire](dist.group.WORLD))
    finally:
        current().of(SharedMemory).close()


BY_GLOO: dict[tuple[str, int], list[list[str]]] = {}


def by_gloo(workers: Pools, body: Body, world_size: int) -> list[list[str]]:
    """What a body finds, run once for all wires."""
    key = body.__name__, world_size
    if key not in BY_GLOO:
        BY_GLOO[key] = workers(world_size).run(run, "gloo", body)
    return BY_GLOO[key]


def check(workers: Pools, wire: str, body: Body, world_size: int) -> None:
    found = workers(world_size).run(run, wire, body)
    if body is reduces:
        assert found == found[:1] * world_size
    if body in (reduces, reduces_to_parts) and wire not in ("c10d", "gloo"):
        assert found == by_gloo(workers, body, world_size)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("wire", WIRES)
def test_contract(workers: Pools, wire: str, body: Body) -> None:
    check(workers, wire, body, 3)


@pytest.mark.slow
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize(
    ("wire", "world_size"), [("gloo", 2), ("c10d", 2), ("staged", 2), ("memory", 2), ("gloo", 4), ("memory", 4)]
)
def test_contract_on_other_numbers_of_ranks(workers: Pools, wire: str, body: Body, world_size: int) -> None:
    """Of wires around another one some are enough."""
    check(workers, wire, body, world_size)


def num_bytes() -> int:
    pyg_dist.init()
    wire = CountingWire(GlooWire(dist.group.WORLD))
    finish(wire.all_gather(torch.zeros(2 * wire.size, 3), torch.zeros(2, 3), [2] * wire.size, 1))
    return wire.num_bytes


def test_a_wire_that_counts(workers: Pools) -> None:
    assert workers(3).run(num_bytes) == [48] * 3


def of_some_ranks() -> float:
    pyg_dist.init()
    wire = CountingWire(GlooWire(dist.group.WORLD))
    x = torch.tensor([float(wire.rank)])
    if wire.rank != 1:
        wire.among([2, 0]).broadcast(x, 0, 1)
    return x.item()


def test_some_ranks_of_a_wire_reach_one_another(workers: Pools) -> None:
    assert workers(3).run(of_some_ranks) == [2, 1, 2]
