"""Attention on a graph opened from a store equals that on the whole graph in memory, to the bit; and stock PyG's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_graphs import same, skewed_graph, write
from test_grid_store import write as write_grid
from test_halo_store import uneven
from torch import Tensor, nn
from torch_geometric import nn as gnn
from workers import Pools

from pyg_dist import DistributedData
from pyg_dist.conv import DistributedConv


def convs() -> dict[str, Any]:
    torch.manual_seed(0)
    return {
        "GAT": gnn.GATConv(7, 4, heads=2, edge_dim=2, dropout=0.3),
        "GATv2": gnn.GATv2Conv(7, 4, heads=2, edge_dim=2, residual=True),
        "Transformer": gnn.TransformerConv(7, 4, heads=2, edge_dim=2, beta=True),
        "AGNN": gnn.AGNNConv(),
    }


def step(data: Any, name: str, conv: nn.Module) -> dict[str, Tensor | None]:
    """Output, weights of edges and every gradient, with dropout where ours and ours are compared."""
    torch.manual_seed(1)
    x = data.x.detach().clone().requires_grad_()
    given = [x, data.edge_index]
    if name == "AGNN":
        found = {"out": conv(*given)}
    else:
        out, (_, alpha) = conv(*given, data.edge_attr.float(), return_attention_weights=True)
        found = {"out": out, "weights": alpha}
    sum(value.square().sum() for value in found.values()).backward()  # type: ignore[union-attr]
    found |= {"x.grad": x.grad} | {f"{key}.grad": p.grad for key, p in conv.named_parameters()}
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in found.items()}


def opened_as_made(path: str, layout: dict[str, Any]) -> None:
    plain = skewed_graph()
    made: Any = DistributedData(skewed_graph(), **layout)
    opened: Any = DistributedData.open(path, **{key: layout[key] for key in ("mesh",) if key in layout})
    for name, conv in convs().items():
        one, other = (step(data, name, DistributedConv(copy.deepcopy(conv))) for data in (made, opened))
        for key, value in one.items():
            assert same(value, other[key]), f"{name} {key}"
        stock, ours = step(plain, name, conv.eval()), step(opened, name, DistributedConv(copy.deepcopy(conv)).eval())
        for key, value in stock.items():
            torch.testing.assert_close(ours[key], value, rtol=1e-4, atol=1e-4, msg=lambda m, w=f"{name} {key}: ": w + m)


@pytest.mark.parametrize("world_size", [1, 3])
def test_attention_on_a_halo_store(workers: Pools, tmp_path: Path, world_size: int) -> None:
    parts = uneven(200, world_size)
    path = write(skewed_graph(), tmp_path, parts, world_size)
    workers(world_size).run(opened_as_made, str(path), {"partition": parts})


@pytest.mark.parametrize(("num_ranks", "mesh"), [(1, None), (4, {"x": 2, "y": 2})], ids=str)
def test_attention_on_a_grid_store(workers: Pools, tmp_path: Path, num_ranks: int, mesh: dict[str, int] | None) -> None:
    path = write_grid(tmp_path, num_ranks, mesh, (3, 5))
    workers(num_ranks).run(opened_as_made, str(path), {"layout": "grid", "mesh": mesh})
