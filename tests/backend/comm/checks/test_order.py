"""Ranks that diverge on a wire without tags, such as nccl's, are told before an optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from random_graphs import random_graph
from workers import Workers


def trains() -> list[int]:
    """How many sums of a step compare the order: none while no call goes without a tag."""
    import pyg_dist
    from pyg_dist.backend.comm.checks.calls import Standing
    from pyg_dist.backend.comm.group import Group, world_group
    from pyg_dist.backend.comm.wires.c10d import C10dWire
    from pyg_dist.backend.session.state import current
    from pyg_dist.conv import DistributedGCNConv
    from pyg_dist.errors import DivergenceError

    data = pyg_dist.DistributedData(random_graph(20, 60, 5, dtype=torch.float32))
    model = DistributedGCNConv(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> int:
        model(data.x, data.edge_index).sum().backward()
        before = world_group().calls.number
        optimizer.step()
        return world_group().calls.number - before

    counts = [step()]
    untagged = Group([C10dWire(dist.group.WORLD, "cpu")], "untagged")
    try:
        untagged.sum(torch.ones(2))
        counts += [step(), step()]
        if pyg_dist.rank() == 1:
            untagged.sum(torch.ones(2))
        else:
            untagged.sum(2 * torch.ones(2))
        with pytest.raises(
            DivergenceError, match=r"rank 0 at .*`untagged.sum\(2 \* .*; rank 1 at .*`untagged.sum\(torch"
        ):
            step()
    finally:
        current().of(Standing).sequences.pop(untagged.calls.name)
    counts.append(step())
    return counts


def test_divergence_is_told_at_the_step(workers: Callable[[int], Workers]) -> None:
    assert workers(2).run(trains) == [[0, 1, 1, 0]] * 2
