"""Where large messages within a machine lie: places, who reads them, and what happens where there is no room."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor
from workers import Pools

import pyg_dist
from pyg_dist.backend.comm.connection import wait
from pyg_dist.backend.comm.group import Group, world_group
from pyg_dist.backend.comm.topology import machines
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.comm.wires.shared_memory import NO_PLACE, OwnMemory, PeerMemory, SharedMemory
from pyg_dist.backend.comm.wires.wire import Machines
from pyg_dist.backend.session.state import current

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="Linux alone has it")

MIB = 1 << 20
PAGE = 1 << 12


@pytest.fixture
def own() -> OwnMemory:
    return OwnMemory(4 * MIB)


def numbers(count: int, start: int = 0) -> Tensor:
    return torch.arange(start, start + count)


def read(by: PeerMemory, place: int, like: Tensor) -> Tensor:
    out = torch.empty_like(like)
    by.read(place, out.data_ptr(), out.nbytes)
    return out


def test_messages_are_copied_or_read_where_they_are(own: OwnMemory) -> None:
    other = PeerMemory(own.address, own)
    x, y = numbers(1000), numbers(1000, 7)
    places = [own.place(t.data_ptr(), t.nbytes) for t in (x, y)]
    shared = own.empty(x.nbytes)
    assert shared is not None
    shared.view(torch.int64).copy_(y)
    in_place = own.place(shared.data_ptr() + 80, 160)
    assert in_place % PAGE == 80
    for place, sent in zip([*places, in_place], (x, y, y[10:30]), strict=True):
        assert torch.equal(read(other, place, sent), sent)


def test_places_are_used_again_when_they_are_read_and_their_tensors_gone(own: OwnMemory) -> None:
    other, whole = PeerMemory(own.address, own), 4 * MIB - PAGE
    for _ in range(3):
        held = [own.empty(MIB) for _ in range(3)]
        assert all(t is not None for t in held)
        assert own.empty(MIB) is None
        starts = [t.data_ptr() for t in held if t is not None]
        sent = [own.place(start, MIB) for start in (*starts, starts[0])]  # the first to two ranks
        held.clear()
        gc.collect()
        assert own.empty(MIB) is None  # nobody has read them
        for place in (sent[1], sent[0], sent[2]):
            read(other, place, torch.empty(MIB, dtype=torch.uint8))
        assert own.empty(3 * MIB) is None  # one of two has read the first
        read(other, sent[3], torch.empty(MIB, dtype=torch.uint8))
        gc.collect()
        assert own.empty(whole) is not None
        gc.collect()


def test_memory_that_is_not_used_any_more_is_given_back(own: OwnMemory) -> None:
    def blocks() -> int:
        return os.stat(f"/proc/self/fd/{own._file}").st_blocks

    held, large = own.empty(1000), own.empty(3 * MIB)
    assert held is not None
    assert large is not None
    held.fill_(2)
    large.fill_(1)
    del large
    gc.collect()
    before = blocks()
    for _ in range(600):
        small = own.empty(10 * PAGE)
        assert small is not None
        small.fill_(3)
        del small
    assert blocks() < before // 4
    assert (held == 2).all()


def test_a_message_without_room_has_no_place(own: OwnMemory) -> None:
    x = torch.zeros(5 * MIB, dtype=torch.uint8)
    assert own.place(x.data_ptr(), x.nbytes) == NO_PLACE
    assert own.empty(4 * MIB) is None
    assert own.place(x.data_ptr(), 1) != NO_PLACE


def test_another_process_of_that_number_is_not_taken_for_the_rank(own: OwnMemory) -> None:
    with pytest.raises(ValueError, match="another process"):
        PeerMemory(own.address[:-1] + bytes([own.address[-1] ^ 1]), own)


@contextmanager
def memory_of(limit: str, machine_of: str = "0,0,0") -> Iterator[Group]:
    """All ranks, on some machines, with so many MiB of memory for messages."""
    pyg_dist.init()
    memory, known = current().of(SharedMemory), current().of(Machines)

    def forget() -> None:
        memory.close()
        known.of_rank = ()

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYG_DIST_SHARED_MIB", limit)
        patch.setenv("PYG_DIST_MACHINES", machine_of)
        machines()
    try:
        yield world_group()
    finally:
        forget()


def exchanged(limit: str, machine_of: str, num_rows: int) -> tuple[int, bool]:
    """How many ranks this one shares memory with, and whether rows to send lie there; checks what arrives."""
    with memory_of(limit, machine_of) as group:
        is_shared = exchange(group, num_rows)
        return len(current().of(SharedMemory).of_rank), is_shared


def exchange(group: Group, num_rows: int) -> bool:
    transport, row_bytes = Transport(group), 4096
    others = [rank for rank in range(group.size) if rank != group.rank]
    pieces = [(rank, k * num_rows, (k + 1) * num_rows) for k, rank in enumerate(others)]
    shared = transport.shared(len(others) * num_rows * row_bytes)
    for turn in range(3):
        sent = torch.empty(len(others) * num_rows, row_bytes, dtype=torch.uint8)
        rows = sent if shared is None or turn == 1 else shared.view_as(sent)
        for rank, low, high in pieces:
            rows[low:high] = 10 * turn + 3 * group.rank + rank
        received = transport.to_neighbours(rows, pieces, pieces, torch.empty_like(sent)).wait()
        for rank, low, high in pieces:
            assert (received[low:high] == 10 * turn + 3 * rank + group.rank).all()
        group.barrier()  # before it is written to again
    return shared is not None


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("limit", "machine_of", "num_rows", "found"),
    [
        ("64", "0,0,0", 150, [(2, True)] * 3),
        ("64", "0,0,0", 30, [(2, False)] * 3),  # small ones
        ("1", "0,0,0", 300, [(2, False)] * 3),  # no room
        ("0", "0,0,0", 150, [(0, False)] * 3),  # switched off
        ("64", "0,0,1", 150, [(1, True), (1, True), (0, False)]),
        ("64", "0,1,2", 150, [(0, False)] * 3),
    ],
)
def test_ranks_of_a_machine_share_it(
    workers: Pools, limit: str, machine_of: str, num_rows: int, found: list[tuple[int, bool]]
) -> None:
    assert workers(3).run(exchanged, limit, machine_of, num_rows) == found


@pytest.mark.torchrun
def test_one_rank_without_the_memory(workers: Pools) -> None:
    """All messages go by the wire then, to and from that rank."""
    assert workers(3).run(switched_off_on_one) == [1, 0, 1]


def switched_off_on_one() -> int:
    with memory_of("0" if pyg_dist.rank() == 1 else "64") as group:
        gathered = group.gather_rows(torch.full((1, 200_000), float(group.rank)), [1] * group.size)
        assert gathered[:, -1].tolist() == [0, 1, 2]
        return len(current().of(SharedMemory).of_rank)


@pytest.mark.torchrun
def test_what_all_ranks_get_is_copied_once(workers: Pools) -> None:
    assert workers(3).run(bytes_of_a_gather) == [2 * MIB] * 3


def bytes_of_a_gather() -> int:
    with memory_of("64") as group:
        for _ in range(20):
            gathered = group.gather_rows(torch.full((1, 2 * MIB), group.rank, dtype=torch.uint8), [1] * group.size)
            assert gathered[:, -1].tolist() == [0, 1, 2]
            group.barrier()  # all have read theirs
        own = current().of(SharedMemory)._own
        assert own is not None
        return own._end - PAGE


@pytest.mark.torchrun
def test_a_message_is_read_once_however_often_it_is_waited_for(workers: Pools) -> None:
    assert workers(2).run(waited_for_twice) == [1, 1]


def waited_for_twice() -> int:
    with memory_of("64", "0,0") as group:
        peer, rows = 1 - group.rank, torch.full((1, MIB), group.rank, dtype=torch.uint8)
        wire = group.wire(rows)
        flight = wire.exchange(torch.empty_like(rows), rows, [(peer, 0, 1)], [(peer, 0, 1)], 1)
        for message in (*[*flight.arriving.values()] * 3, *flight.others):
            wait(message)
        group.barrier()
        own = current().of(SharedMemory)._own
        assert own is not None
        return len(os.read(own._read, PAGE)) // 8


@pytest.mark.torchrun
def test_wires_of_other_threads_keep_the_way_they_began_with(workers: Pools) -> None:
    """Their messages may be under way while the main thread opens the memory."""
    assert workers(3).run(sent_early_and_late) == [(0, 2)] * 3


def sent_early_and_late() -> tuple[int, int]:
    """How many messages that two wires send with everyone there go by the memory: made before it is open, and after."""
    with memory_of("0") as group:
        rows = torch.full((1, 2 * MIB), group.rank, dtype=torch.uint8)
        ranks = group.calls.ranks
        early = group.wire(rows).among(ranks)
        memory = current().of(SharedMemory)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYG_DIST_SHARED_MIB", "64")
            memory.open([0] * group.size, group.rank, group.gather_bytes)
        own = memory._own
        assert own is not None
        read = []
        for tag, wire in enumerate((early, group.wire(rows).among(ranks))):
            gathered = torch.empty(group.size, 2 * MIB, dtype=torch.uint8)
            for message in wire.all_gather(gathered, rows, [1] * group.size, tag).others:
                wait(message)
            assert gathered[:, -1].tolist() == [0, 1, 2]
            group.barrier()
            with suppress(BlockingIOError):
                read.append(0)
                read[-1] = len(os.read(own._read, PAGE)) // 8
        return read[0], read[1]
