"""Bytes of quantized messages at the process group, as the plan counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from quantized_graph import distributed
from wire import Wire
from workers import Pools

from pyg_dist.conv import DistributedConv, DistributedSAGEConv


def bytes_of_one_layer(bits: Any, attention: bool = False) -> tuple[int, int, int, dict[str, Any]]:
    """What one conv hands to the process group, forward and backward; what ``traffic`` counts; the plan."""
    from torch_geometric.nn import GATConv

    data = distributed(bits)
    conv = DistributedConv(GATConv(256, 256)) if attention else DistributedSAGEConv(256, 256)
    x = torch.cat([data.x.float()] * 37, dim=-1)[:, :256].requires_grad_()
    with Wire() as wire:
        out = conv(x, data.edge_index)
        forward = wire.num_bytes
        out.to_local().sum().backward()
        backward = wire.num_bytes - forward
    return forward, backward, data.traffic.num_bytes, data.plan.to_dict((256,))


@pytest.mark.parametrize("world_size", [3])
def test_bytes_on_the_wire(workers: Pools, world_size: int) -> None:
    """SuperGCN, Table 5: about 15 times fewer, parameters included."""
    totals = {}
    for bits in (32, 16, 8, 4, 2, (2, 8)):
        ranks = workers(world_size).run(bytes_of_one_layer, bits)
        forward, backward, counted = (sum(rank[k] for rank in ranks) for k in range(3))
        plan = ranks[0][3]
        assert forward == plan["bytes"]["256"]
        assert backward == plan["backward_bytes"]["256"]
        assert counted == forward + backward
        totals[bits] = forward, backward
    exact = totals[32][0]
    assert exact > 0
    assert totals[16] == (exact / 2, exact / 2)
    for bits, ratio in ((8, 3.9), (4, 7.5), (2, 15)):
        assert totals[bits][0] == totals[bits][1] <= exact / ratio
    assert totals[2, 8] == (totals[2][0], totals[8][1])


def bytes_of_a_column() -> list[tuple[float, int, int, bool]]:
    """One logit a node: what is sent forward, what the plan says, what a row takes, whether it is exact."""
    found, exact = [], None
    for bits in (32, 16, 8, 2):
        for dtype in (torch.float32, torch.float64):
            data = distributed(bits)
            torch.manual_seed(0)
            conv, before = DistributedSAGEConv(1, 1).to(dtype), data.traffic.num_bytes
            x = (data.x[:, :1] * 0.1).to(dtype).requires_grad_()
            out = conv(x, data.edge_index).detach().to_local()
            exact = {**(exact or {}), dtype: out} if bits == 32 else exact
            planned = data.plan.halo_bytes(1, dtype.itemsize)
            size = planned // data.plan.rows["hybrid"]
            found.append((data.traffic.num_bytes - before, planned, size, torch.equal(out, exact[dtype])))
    return found


def test_rows_that_packing_would_lengthen_go_as_they_are(workers: Pools) -> None:
    ranks = workers(2).run(bytes_of_a_column)
    cases = [(4, True), (8, True), (2, False), (2, False), (4, True), (5, False), (4, True), (5, False)]
    for (size, is_exact), here, there in zip(cases, *ranks, strict=True):
        assert here[0] + there[0] == here[1]
        assert here[2] == size
        assert here[3] == there[3] == is_exact


def test_bytes_of_attention(workers: Pools) -> None:
    """Rows in two bits; one logit a row as it is."""
    totals = {bits: [0, 0] for bits in (32, 2, (8, 32))}
    for bits, total in totals.items():
        for forward, backward, counted, plan in workers(2).run(bytes_of_one_layer, bits, True):
            assert counted == forward + backward
            total[0] += forward
            total[1] += backward
            num_rows = plan["rows"]["post"]
    assert totals == {
        32: [num_rows * (1024 + 4)] * 2,
        2: [num_rows * (68 + 4)] * 2,
        (8, 32): [num_rows * (260 + 4), num_rows * (1024 + 4)],
    }
