"""What the convs take on the grid, and what they refuse alike on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from random_graphs import random_graph
from workers import Workers

Pools = Callable[[int], Workers]


def wrong_widths() -> None:
    from pyg_dist import DistributedData
    from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv

    graph = random_graph(23, 90, num_features=6, seed=0)
    for mesh in ({"x": 2, "y": 2}, {"x": 4}):
        data = DistributedData(graph.clone(), layout="grid", mesh=mesh)
        for conv in (DistributedGCNConv, DistributedSAGEConv):
            for inputs in (5, 8):  # narrower, and wider than x
                for outputs in (4, 16):  # the map first, and the sums first
                    with pytest.raises(RuntimeError, match=f"shapes cannot be multiplied .23x6 and {inputs}x{outputs}"):
                        conv(inputs, outputs).double()(data.x.double(), data.edge_index)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied .23x6 and 8x4"):
            sage = DistributedSAGEConv((6, 8), 4).double()
            sage((data.x.double(), data.x.double()), data.edge_index)
    torch.distributed.barrier()


def test_features_of_the_wrong_width_are_refused_on_every_rank(workers: Pools) -> None:
    workers(4).run(wrong_widths)
