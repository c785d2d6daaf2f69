"""What quantized messages cannot carry, and options that are refused, in one line on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from quantized_graph import distributed
from random_graphs import random_graph
from torch import Tensor, nn
from workers import Pools, on_ranks

from pyg_dist import DistributedData, distribute
from pyg_dist.conv import DistributedSAGEConv
from pyg_dist.errors import DataError, OptionError, UnsupportedError


class Nested(nn.Module):
    def __init__(self) -> None:
        from torch_geometric import nn as gnn

        super().__init__()
        perceptron = nn.Sequential(nn.Linear(9, 9), nn.ReLU())
        self.encoder = nn.ModuleDict({"convs": nn.ModuleList([gnn.SAGEConv(7, 9), gnn.GINConv(perceptron)])})
        distribute(self)

    def forward(self, x: Tensor, edge_index: Any, factors: tuple[float, float, float]) -> Tensor:
        for conv, factor in zip(self.encoder["convs"], factors, strict=False):
            x = conv(x * factor, edge_index)
        return x * factors[-1]


def out_of_range(bits: int) -> list[str]:
    """What each of three ranks cannot send, at its own node."""
    graph, lines = random_graph(61, 400, num_features=7, seed=3), []
    data = DistributedData(graph, partition=torch.arange(61) % 3, bits=bits, exchange="post")
    conv = DistributedSAGEConv(7, 9).double()
    for value in (float("nan"), float("inf"), 1e39):
        x = data.x * 1.0
        is_bad = (data.graph.node_sharding.global_id >= 15) & (data.graph.node_sharding.global_id < 18)
        x.to_local()[is_bad] = torch.tensor([-value, value, 0, 0, 0, 0, value], dtype=torch.float64)
        with pytest.raises(DataError) as caught:
            conv(x, data.edge_index)
        lines.append(str(caught.value))
    return lines


@pytest.mark.parametrize("bits", [2, 16])
def test_what_cannot_be_sent_is_told_with_its_node(workers: Pools, bits: int) -> None:
    held = "bfloat16 holds up to 3.3895e+38" if bits == 16 else "float32 holds a range of 3.4028e+38"
    finite, wide = "finite features", "values from -1e+39 to 1e+39"
    cases = (finite, "NaN"), (finite, "an infinity"), (f"features that {held}", wide)
    for rank, lines in enumerate(workers(3).run(out_of_range, bits)):
        for line, (expected, got) in zip(lines, cases, strict=True):
            layer = f"SAGEConv(7, 9, aggr=mean), which go in {bits} bits"
            assert line.startswith(f"Expected {expected} in the messages of {layer} (got {got} at node {15 + rank}): ")
            assert line.endswith(f"[rank {rank} of 3]")


def not_finite() -> list[str]:
    data, lines = distributed(2), []
    model, alone = Nested().double(), DistributedSAGEConv(7, 9).double()
    nan = float("nan")

    def line_of(run: Callable[[], Any]) -> None:
        with pytest.raises(DataError) as caught:
            run()
        lines.append(str(caught.value))

    x = (data.x * 1.0).requires_grad_()
    line_of(lambda: alone(x * nan, data.edge_index))
    line_of(lambda: (alone(x, data.edge_index) * float("inf")).sum().backward())
    line_of(lambda: model(x, data.edge_index, (nan, 1, 1)))
    line_of(lambda: model(x, data.edge_index, (1, nan, 1)))
    line_of(lambda: model(x, data.edge_index, (1, 1, nan)).sum().backward())
    return lines


def test_what_is_not_finite_names_layer_and_rank(workers: Pools) -> None:
    expected = [
        ("features", "messages of SAGEConv(7, 9, aggr=mean), which go in 2 bits"),
        ("gradients", "messages of SAGEConv(7, 9, aggr=mean), which go in 2 bits"),
        ("features", "messages of 'encoder.convs.0' (SAGEConv(7, 9, aggr=mean)), which"),
        ("features", "messages of 'encoder.convs.1' (GINConv), which"),
        ("gradients", "messages of 'encoder.convs.1' (GINConv), which"),
    ]
    for rank, lines in enumerate(workers(2).run(not_finite)):
        for line, (what, layer) in zip(lines, expected, strict=True):
            assert f"Expected finite {what} in the {layer}" in line
            assert f"[rank {rank} of 2]" in line
            assert "\n" not in line


@on_ranks(1)
def test_options() -> None:
    for bits in (3, 64, "2", (2, 8, 4), (2, 3), True, None):
        with pytest.raises(OptionError, match="Expected bits to be one of 32, 16, 8, 4, 2, or"):
            distributed(bits)
    with pytest.raises(UnsupportedError, match=r"bits=2 with layout='grid'.*use layout='halo'"):
        distributed(2, layout="grid")
    with pytest.raises(UnsupportedError, match=r"bits=\(32, 8\) with layout='auto'"):
        distributed((32, 8), layout="auto")
    import numpy as np

    plan = distributed((np.int64(2), np.int32(8))).plan
    assert plan.bits == (2, 8)
    rows = plan.rows["hybrid"]
    assert plan.to_dict((100,))["bytes"] == {"100": rows * 29}
    assert plan.to_dict((100,))["backward_bytes"] == {"100": rows * 104}
    assert f"{rows * 29:,} bytes per aggregation in 2 bits, {rows * 104:,} backward in 8" in plan.describe((100,))
