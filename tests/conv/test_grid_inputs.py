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

    graph = random_graph(23, 90, num_features=6)
    refused = "shapes cannot be multiplied \\(23x6 and {}x{}\\)"
    for mesh in ({"x": 2, "y": 2}, {"x": 4}):
        data = DistributedData(graph.clone(), layout="grid", mesh=mesh)
        for conv in (DistributedGCNConv, DistributedSAGEConv):
            for inputs in (5, 8):  # narrower, and wider than x
                for outputs in (4, 16):  # the map first, and the sums first
                    layer = conv(inputs, outputs).double()
                    with pytest.raises(RuntimeError, match=refused.format(inputs, outputs)):
                        layer(data.x, data.edge_index)
        sage = DistributedSAGEConv((6, 8), 4).double()
        with pytest.raises(RuntimeError, match=refused.format(8, 4)):
            sage((data.x, data.x), data.edge_index)
    torch.distributed.barrier()


def test_features_of_the_wrong_width_are_refused_on_every_rank(workers: Pools) -> None:
    workers(4).run(wrong_widths)
