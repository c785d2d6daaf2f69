"""What messages of a collective are started first, and what of a sum crosses machines."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from workers import Pools

import pyg_dist
from pyg_dist.backend.comm.wires.gloo import GlooWire
from pyg_dist.backend.comm.wires.point_to_point import PointToPoint
from pyg_dist.backend.comm.wires.wire import Machines, Message
from pyg_dist.backend.session.state import current


class Done:
    """A message that has arrived."""

    def wait(self) -> None:
        """At once."""


class Noting(PointToPoint):
    """Notes what it is asked for, and moves nothing."""

    def __init__(self) -> None:
        super().__init__(1, range(3))
        self.started: list[tuple[str, int, int]] = []

    def send(self, x: Tensor, peer: int, tag: int) -> Message:
        self.started.append(("send", peer, x.nbytes))
        return Message(Done(), peer)

    def receive(self, x: Tensor, peer: int, tag: int) -> Message:
        self.started.append(("receive", peer, x.nbytes))
        return Message(Done(), peer)


@pytest.mark.parametrize(("num_rows", "first"), [(4, "send"), (1 << 18, "receive")])
def test_large_messages_are_received_first(num_rows: int, first: str) -> None:
    """By gloo the word that a receiver is ready would wait behind what it sends."""
    wire = Noting()
    rows, out = torch.zeros(3 * num_rows, 2), torch.full((3 * num_rows, 2), 7.0)
    wire.all_to_all(out, rows, [num_rows] * 3, [num_rows] * 3, 0)
    second = "receive" if first == "send" else "send"
    num_bytes = num_rows * 8
    pairs = [(kind, peer, num_bytes) for kind in (first, second) for peer in (2, 0)]
    assert wire.started == pairs
    assert torch.equal(out.view(3, -1)[:, 0], torch.tensor([7.0, 0.0, 7.0])), "a rank's own rows are there at once"
    wire.started.clear()
    wire.all_gather(out, rows[:num_rows], [num_rows] * 3, 0)
    assert wire.started == pairs
    wire.started.clear()
    wire.all_reduce(torch.zeros(3 * num_rows + (1 << 15)), "sum", 0)
    kinds = [kind for kind, *_ in wire.started]
    assert kinds[:4] == [first, first, second, second]


def sums_by_machine(world_size: int, machines: list[int]) -> None:
    """Sums equal those of one level; of a machine whose ranks share the work as much crosses as if it were one rank."""
    import torch.distributed as dist

    pyg_dist.init()

    class Crossing(PointToPoint):
        """Counts what leaves the machine, in a list that wires of some of the ranks share."""

        def __init__(self, wire: GlooWire) -> None:
            super().__init__(wire.rank, wire.ranks)
            self._wire, self.crossed = wire, list[int]()

        def send(self, x: Tensor, peer: int, tag: int) -> Message:
            receiver = self.ranks[peer]
            if machines[receiver] != machines[self.ranks[self.rank]]:
                self.crossed.append(x.nbytes)
            return self._wire.send(x, receiver, tag)

        def receive(self, x: Tensor, peer: int, tag: int) -> Message:
            return self._wire.receive(x, self.ranks[peer], tag)

    assert dist.group.WORLD is not None
    wire, known = Crossing(GlooWire(dist.group.WORLD)), current().of(Machines)
    before, known.of_rank = known.of_rank, tuple(machines)
    try:
        num_elements = 100_003  # pieces of several lengths
        for op, dtype in (("sum", torch.float64), ("max", torch.float32), ("min", torch.int64)):
            wire.crossed.clear()
            every = [torch.randint(-999, 999, (num_elements,), generator=torch.Generator().manual_seed(r)).to(dtype)
                     for r in range(world_size)]  # fmt: skip
            reduced = {"sum": lambda x: x.sum(0), "max": lambda x: x.amax(0), "min": lambda x: x.amin(0)}[op]
            found, _ = wire.all_reduce(every[wire.rank].clone(), op, 7)
            assert torch.equal(found, reduced(torch.stack(every)))
            counts = [machines.count(machine) for machine in set(machines)]
            if len(set(counts)) == 1:
                share = 2 * every[0].nbytes * (len(counts) - 1) / len(counts) / counts[0]
                assert sum(wire.crossed) == pytest.approx(share, rel=1e-3)
    finally:
        known.of_rank = before


@pytest.mark.parametrize(
    "machines",
    [
        [0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1], [0, 1, 2, 3],
        *(pytest.param(six, marks=pytest.mark.slow) for six in ([0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1])),
    ],
)  # fmt: skip
def test_sums_go_within_machines_first(workers: Pools, machines: list[int]) -> None:
    workers(len(machines)).run(sums_by_machine, len(machines), machines)
