"""Attention with logits of minus infinity: weight zero, as in stock PyG; NaN where a target has no others."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from against_stock import Results, gradients, meshes, of_first_rank, whole
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.conv import DistributedConv

F, C, HEADS = 3, 4, 2
NUM_NODES = 12
MASKED = range(6, 9)  # sources whose logits are minus infinity
LARGE = 1e160  # its square is infinite


def graph(with_hopeless: bool) -> Data:
    """Targets 0 to 4 with masked sources first, last, among others, in great number, and alone; node 11 has no edges.

    Of two parts, by halves of the nodes, targets 0 to 2 have one whose sources are all masked.
    """
    edges = [*((j, 0) for j in (6, 7, 8, 1, 2)), *((j, 1) for j in (1, 2, 6, 7)), *((j, 2) for j in (7, 0))]
    edges += [(6 + k % 3, 3) for k in range(70)] + [(k % 6, 3) for k in range(5)]
    edges += [(6 + k % 3, 4) for k in range(4)] if with_hopeless else []
    edges += [(k, 5) for k in range(6)] + [(5, 9), (9, 6), (10, 7)]
    x = torch.randn(NUM_NODES, F, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[:, 0] = 0
    x[list(MASKED), 0] = -LARGE
    return Data(x=x, edge_index=torch.tensor(edges).t().contiguous(), num_nodes=NUM_NODES)


def convs() -> dict[str, Any]:
    """Stock convs with large numbers in one place: only products of theirs are infinite, and no gradient is."""
    torch.manual_seed(0)
    gat = gnn.GATConv(F, C, HEADS, add_self_loops=False).double()
    gat_v2 = gnn.GATv2Conv(F, C, HEADS, add_self_loops=False).double()
    transformer = gnn.TransformerConv(F, C, HEADS).double()
    with torch.no_grad():
        for linear in (gat.lin, gat_v2.lin_l, transformer.lin_key):
            _take_first_column(linear)
        for linear in (gat_v2.lin_r, transformer.lin_value, transformer.lin_query, transformer.lin_skip):
            linear.weight[:, 0] = 0
        gat.att_dst[..., 0] = 0
        for large in (gat.att_src, gat_v2.att):
            large[..., 0] = LARGE
        for linear, bias in ((gat_v2.lin_r, 0), (transformer.lin_query, LARGE)):
            linear.weight.view(HEADS, C, F)[:, 0] = 0
            linear.bias.view(HEADS, C)[:, 0] = bias
    return {"GATConv": gat, "GATv2Conv": gat_v2, "TransformerConv": transformer}


def _take_first_column(linear: nn.Module) -> None:
    """The first output of each head is the first input, and no other output is of it."""
    weight: Tensor = linear.weight.view(HEADS, C, F)  # type: ignore[operator, assignment]
    weight[..., 0] = 0
    weight[:, 0] = torch.eye(F, dtype=torch.float64)[0]
    if getattr(linear, "bias", None) is not None:
        linear.bias.view(HEADS, C)[:, 0] = 0  # type: ignore[operator, union-attr]


def results(conv: Any, data: Any, twice: bool) -> Results:
    x = data.x.detach().clone().requires_grad_()
    out, (_, alpha) = conv(x, data.edge_index, return_attention_weights=True)
    loss = out.sin().sum() + alpha.square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=twice, retain_graph=True)
    (slope.square().sum() if twice else loss).backward()
    return whole({"out": out, "weights": alpha, "slope": slope[:, 1:], **gradients(conv)})


def compare(layouts: list[dict[str, Any]]) -> None:
    for with_hopeless in (False, True):
        data, of_stock = graph(with_hopeless), dict[tuple[str, bool], Results]()
        for place, layout in enumerate(layouts):
            ours = pyg_dist.DistributedData(copy.copy(data), **layout)
            for number, (name, conv) in enumerate(convs().items()):
                for twice in (False, True):
                    if place and (place + number + twice + with_hopeless) % 3:  # of the meshes, every third case
                        continue
                    if (name, twice) not in of_stock:
                        of_stock[name, twice] = of_first_rank(partial(results, copy.deepcopy(conv), data, twice))
                    expected = of_stock[name, twice]
                    got = results(DistributedConv(copy.deepcopy(conv)), ours, twice)
                    is_target = torch.arange(NUM_NODES) == 4
                    assert torch.equal(expected["out"].isnan().any(1), is_target & with_hopeless)
                    assert twice or with_hopeless or all(v is None or v.isfinite().all() for v in expected.values())
                    for key, want in expected.items():
                        assert is_same(got[key], want), f"{name} {layout} {key} {with_hopeless} {twice}"


def is_same(got: Tensor | None, want: Tensor | None) -> bool:
    """But for gradients that are the large numbers times rounding, on either side."""
    if got is None or want is None:
        return got is want
    matters = ~((got.abs() > 1e100) | (want.abs() > 1e100))
    return torch.allclose(got[matters], want[matters], rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("world_size", [1, 3])
def test_masked_edges_weigh_nothing(workers: Pools, world_size: int) -> None:
    halves = torch.arange(NUM_NODES) // 6 % world_size
    layouts = [{"partition": halves}, *({"layout": "grid", "mesh": mesh} for mesh in meshes(world_size))]
    workers(world_size).run(compare, layouts)


@on_ranks(1, 2)
def test_other_infinite_logits_give_nan(world_size: int) -> None:
    """Logits of NaN and plus infinity give NaN, to their targets alone."""
    data = graph(with_hopeless=False)
    data.x[6, 0], data.x[7, 0] = LARGE, torch.nan
    halves = {"partition": torch.arange(NUM_NODES) // 6 % world_size}
    for layout in (halves, {"layout": "grid", "mesh": meshes(world_size)[-1]}):
        ours = pyg_dist.DistributedData(copy.copy(data), **layout)
        for name, conv in convs().items():
            expected = results(copy.deepcopy(conv), data, twice=False)
            got = results(DistributedConv(copy.deepcopy(conv)), ours, twice=False)
            assert 0 < int(expected["out"].isnan().any(1).sum()) < NUM_NODES
            for key in ("out", "weights", "slope"):
                assert torch.equal(got[key].isnan(), expected[key].isnan()), f"{name} {layout} {key}"
