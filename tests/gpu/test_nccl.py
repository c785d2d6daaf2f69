"""Messages of one rank on nccl: all that the package hands over to it, by its own code, which else leaves out one rank.

One GPU has one rank on nccl, and with one rank no code of ``backend/comm`` sends anything. Here a group is taken for
one of several ranks: whoever asks whether it is alone hears no. Without a GPU gloo carries the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import assert_same_bits
from gpu_trial import IS_TRIAL
from torch import Tensor
from workers import Workers, spawned

pytestmark = pytest.mark.gpu

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool,
)  # fmt: skip


class Several(int):
    """A number of ranks that nobody takes for one."""

    def __eq__(self, other: object) -> bool:
        return other != 1 and super().__eq__(other)

    def __gt__(self, other: int) -> bool:
        return other == 1 or super().__gt__(other)

    __hash__ = int.__hash__


@contextmanager
def opened(device: torch.device, folder: Path) -> Iterator[Any]:
    """A group of this process alone, on nccl."""
    from pyg_dist.backend.comm.group import Group
    from pyg_dist.backend.comm.wires.c10d import C10dWire
    from pyg_dist.backend.comm.wires.factory import wires_of
    from pyg_dist.backend.session import devices, session

    session.shutdown()
    backend = devices.NCCL if device.type == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
    try:
        wires = wires_of(dist.group.WORLD) if device.type == "cuda" else [C10dWire(dist.group.WORLD, "cpu")]
        group = Group(wires, "of one")
        group.size = Several(1)
        yield group
        assert group.calls.number > 0, "nothing was sent"
    finally:
        session.shutdown()
        dist.destroy_process_group()


def drawn(dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    numbers = torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(dtype).to(device)


@pytest.fixture(scope="module")
def alone(device: torch.device) -> Iterator[Workers]:
    """A process of its own, which starts the GPU."""
    pool = Workers(1, spawned)
    yield pool
    pool.close()


def reduce_and_broadcast(device: torch.device, folder: Path) -> None:
    with opened(device, folder) as group:
        for dtype in DTYPES:
            x = drawn(dtype, device, 5, 3)
            for op in ("sum",) if dtype.is_complex else ("sum", "max", "min"):
                got = group.all_reduce_(x.clone(), op)
                assert got.device == x.device
                assert_same_bits(got.cpu(), x.cpu(), f"{op} of {dtype}")
            before = x.clone()
            assert_same_bits(group.sum(x).cpu(), before.cpu())
            assert_same_bits(x.cpu(), before.cpu())
            strided = drawn(dtype, device, 3, 5).t()
            assert_same_bits(group.broadcast_(strided.clone(), 0).cpu(), strided.cpu(), f"broadcast of {dtype}")
        large = torch.randn(1 << 16, device=device)
        assert_same_bits(group.all_reduce_(large.clone()).cpu(), large.cpu())
        assert group.all_reduce_(large[:0]).shape == (0,)
        assert group.gather_counts(7) == [7]
        assert group.all_true(True)
        assert not group.all_true(False)
        group.barrier()


def gather(device: torch.device, folder: Path) -> None:
    with opened(device, folder) as group:
        for dtype in DTYPES:
            for shape in ((5, 3), (4,), (2, 3, 2), (0, 3)):
                rows = drawn(dtype, device, *shape)
                got = group.gather_rows(rows, [shape[0]])
                assert got.device == rows.device
                assert_same_bits(got.cpu(), rows.cpu(), f"{dtype} {shape}")
        assert group.gather_bytes(b"some bytes") == [b"some bytes"]


def exchange(device: torch.device, folder: Path) -> None:
    from pyg_dist.backend.comm.group import to_wire
    from pyg_dist.backend.comm.redistribution import Redistribution
    from pyg_dist.backend.comm.transport import Transport

    with opened(device, folder) as group:
        transport = Transport(group)
        for dtype in DTYPES:
            for shape in ((5, 3), (0, 3), (4, 0), (6,)):
                rows = to_wire(drawn(dtype, device, *shape))
                messages = transport.all_to_all(rows, [shape[0]], [shape[0]])
                assert_same_bits(messages.wait().cpu(), rows.cpu(), f"{dtype} {shape}")
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            for shape in ((5, 3), (0, 3), (6,)):
                rows = drawn(dtype, device, *shape)
                assert_same_bits(transport.all_gather(rows, [shape[0]]).wait().cpu(), rows.cpu(), f"{dtype} {shape}")
                for wide in (dtype, torch.promote_types(dtype, torch.float32)):
                    got = transport.reduce_scatter(rows, [shape[0]], wide).wait()
                    assert_same_bits(got.cpu(), rows.to(wide).cpu(), f"sum of {dtype} in {wide}, {shape}")
        room, rows = torch.zeros(9, 3, device=device), torch.randn(5, 3, device=device)
        transport.all_to_all(rows, [5], [5], out=room[2:7]).wait()
        assert_same_bits(room[2:7].cpu(), rows.cpu())
        assert not room[:2].any()
        assert not room[7:].any()
        transport.barrier()

        before, after = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([1, 2, 0, 4, 3])
        moves = Redistribution.by_position(group, [before], [after])
        for dtype in DTYPES:
            x = drawn(dtype, device, 5, 3)
            moved = moves.start(x).wait()
            assert_same_bits(moved.cpu()[after.argsort()], x.cpu()[before.argsort()], f"{dtype} moved")
            assert_same_bits(moves.transposed.start(moved).wait().cpu(), x.cpu(), f"{dtype} moved back")

        asked = torch.tensor([4, 1, 1, 0])
        brings = Redistribution.of_requests(transport, torch.zeros_like(asked), asked, num_rows=5)
        x = torch.randn(5, 3, device=device)
        assert_same_bits(brings.start(x).wait().cpu(), x.cpu()[asked])
        back = torch.zeros(5, 3).index_add_(0, asked, x.cpu()[asked])
        assert torch.allclose(brings.transposed.start(x[asked.to(device)]).wait().cpu(), back)
        key = torch.tensor([7, 3, 9, 1, 5])
        copies = Redistribution.of_copies(transport, torch.zeros_like(asked), asked, key)
        by_key = asked[key[asked].argsort(stable=True)]
        assert_same_bits(copies.start(x).wait().cpu(), x.cpu()[by_key])


def send_to_itself(device: torch.device, folder: Path) -> None:
    """Two ranks, each of which is this one: what goes to the other arrives here."""
    from pyg_dist.backend.comm.transport import Transport

    with opened(device, folder) as group:
        wire = group.wire(torch.empty(0, device=device))
        group.size = wire.size = 2
        group.calls.ranks = wire.ranks = (0, 0)
        for dtype in (torch.float32, torch.uint8, torch.int64):
            rows = drawn(dtype, device, 6, 3)
            out = torch.zeros_like(rows)
            messages = Transport(group).to_neighbours(rows[2:], [(1, 0, 4)], [(1, 1, 5)], out)
            messages.wait_for(1)
            assert_same_bits(messages.wait().cpu()[1:5], rows.cpu()[2:], str(dtype))
            assert not out[:1].any()
            assert not out[5:].any()


class Done:
    """A message that has arrived."""

    def wait(self, timeout: object = None) -> bool:
        return True


def looped(messages: list[dist.P2POp]) -> list[Done]:
    """What gloo has not: messages to oneself."""
    arriving, leaving = ([m for m in messages if m.op is op] for op in (dist.irecv, dist.isend))
    for there, here in zip(arriving, leaving, strict=True):
        assert there.peer == here.peer == 0
        there.tensor.copy_(here.tensor)
    return [Done() for _ in messages]


def send_to_itself_by_a_loop(device: torch.device, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", looped)
        send_to_itself(device, folder)


@pytest.mark.parametrize(
    "body",
    [reduce_and_broadcast, gather, exchange, send_to_itself_by_a_loop if IS_TRIAL else send_to_itself],
    ids=lambda body: body.__name__,
)
def test_one_rank_on_nccl(
    alone: Workers, device: torch.device, tmp_path: Path, body: Callable[[torch.device, Path], None]
) -> None:
    alone.run(body, device, tmp_path)
