"""Trains a step with the installed package, and prints what was built. Run where no source tree is on the path."""

from __future__ import annotations

import torch
from torch_geometric.data import Data

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.ops import library
from pyg_dist.conv import DistributedGCNConv

data = DistributedData(Data(x=torch.eye(3), edge_index=torch.tensor([[0, 1], [1, 2]])))
conv = DistributedGCNConv(3, 2)
conv(data.x, data.edge_index).sum().backward()
assert conv.lin.weight.grad is not None
assert conv.lin.weight.grad.abs().sum() > 0
print(f"pyg_dist {pyg_dist.__version__} works:", library.isa(), library.build_info())
