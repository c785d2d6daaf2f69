"""What the global view cannot give is refused on every rank, also on ranks that hold no rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from random_graphs import random_graph, uneven_parts
from torch import Tensor
from torch_geometric import nn as gnn
from torch_geometric.utils import scatter
from workers import on_ranks

import pyg_dist
from pyg_dist.errors import DataError, MixedRowsError, OptionError
from pyg_dist.loader import UniformVertexLoader


@on_ranks(1, 2)
def test_refusals() -> None:
    plain = random_graph(24, 90, 2, seed=1)
    ours = (
        pyg_dist.DistributedData(plain, partition=torch.zeros(24, dtype=torch.int64)),
        pyg_dist.DistributedData(plain, layout="grid"),
    )
    for data in ours:
        x = data.x
        for flag in (True, False, torch.tensor(True)):
            with pytest.raises(MixedRowsError, match="with one bool would add a dimension"):
                x[flag]
        for columns in ([0, 2], [-3], torch.tensor([5])):
            with pytest.raises(IndexError, match="is out of bounds for dimension 1 with size 2"):
                x[:, columns]
        assert x[:, [-2, 1]].full_tensor().equal(plain.x)
        with pytest.raises(MixedRowsError, match="set_ has no distributed form"):
            x.set_(torch.ones(3))
        for ids in (torch.tensor([2.9]), "train_mask", None):
            with pytest.raises(DataError, match="Expected 'subset' to be a mask of 24 nodes, or a list of ids"):
                data.subgraph(ids)
        assert data.subgraph([]).num_nodes == 0
        with pytest.raises(DataError, match=r"columns.*in_channels=2"):
            pyg_dist.distribute(gnn.GCNConv(4, 3).double())(x, data.edge_index)


@on_ranks(2)
def test_loops_over_one_loader() -> None:
    data = pyg_dist.DistributedData(random_graph(24, 90, 2, seed=1), partition=uneven_parts(24, pyg_dist.world_size()))
    loader = UniformVertexLoader(data, batch_size=10, num_steps=4)
    outer = iter(loader)
    next(outer)
    for _ in loader:
        break
    with pytest.raises(OptionError, match="Expected one loop over a UniformVertexLoader at a time"):
        next(outer)
    assert len(list(loader)) == 2, "the rest of its epoch"
    with pytest.raises(OptionError, match=r"Expected the dict of state_dict\(\) \(got NoneType\)"):
        loader.load_state_dict(None)  # type: ignore[arg-type]


class Mean(gnn.MessagePassing):
    """With an ``aggregate`` of its own, and no other."""

    def __init__(self) -> None:
        super().__init__(aggr=None)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        return self.propagate(edge_index, x=x)  # type: ignore[no-any-return]

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> Tensor:
        return scatter(inputs, index, 0, dim_size, reduce="mean")


@on_ranks(2)
def test_a_conv_without_an_aggregation() -> None:
    plain = random_graph(24, 90, 2, seed=1)
    expected = Mean()(plain.x, plain.edge_index)
    for layout in ("halo", "grid"):
        data = pyg_dist.DistributedData(plain, layout=layout)
        out = pyg_dist.distribute(Mean())(data.x, data.edge_index)
        torch.testing.assert_close(out.full_tensor(), expected)
