"""What messages of a collective are started first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pyg_dist.backend.comm.wires import Message
from pyg_dist.backend.comm.wires.point_to_point import PointToPoint


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
