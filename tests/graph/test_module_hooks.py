"""The hook on all modules is there while distributed rows are, and no longer."""

from __future__ import annotations

import gc

import pytest
import torch
from random_graphs import random_graph
from torch.nn.modules import module as torch_module
from workers import Workers

from pyg_dist import DistributedData
from pyg_dist.conv import DistributedSAGEConv


def body(layout: str) -> list[int]:
    def hooks() -> int:
        return len(torch_module._global_forward_pre_hooks)

    found = [hooks()]
    with pytest.raises(ValueError, match="Expected"):
        DistributedData(None)
    found.append(hooks())
    data = DistributedData(random_graph(20, 60), layout=layout)
    found.append(hooks())
    conv = DistributedSAGEConv(data.x.shape[1], 3).double()
    conv(data.x, data.edge_index).sum().backward()
    picked = conv(data.x, data.edge_index)[torch.arange(20) % 3 == 0].detach()
    edges = data.edge_index
    del data
    gc.collect()
    found.append(hooks())
    del edges, conv
    gc.collect()
    found.append(hooks())  # the rows that were selected are alive
    del picked
    gc.collect()
    return [*found, hooks()]


@pytest.mark.parametrize("layout", ["halo", "grid"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_hook_lives_as_long_as_distributed_rows(world_size: int, layout: str) -> None:
    pool = Workers(world_size)  # processes of its own, in which no other test has left rows
    try:
        assert pool.run(body, layout) == [[0, 0, 1, 1, 1, 0]] * world_size
    finally:
        pool.close()
