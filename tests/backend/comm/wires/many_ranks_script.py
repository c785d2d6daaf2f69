"""Two epochs of a GCN on cora; each rank prints its loss and the memory that it has taken beside its imports.

many_ranks_script.py cora.npz
"""

from __future__ import annotations

import sys

import numpy as np
import psutil
import torch
import torch.nn.functional as F
from torch_geometric.data import Data

import pyg_dist
from pyg_dist.conv import DistributedGCNConv as GCNConv

before = psutil.Process().memory_full_info().uss
pyg_dist.init()
arrays = np.load(sys.argv[1])
rows, columns = arrays["x_shape"]
x = torch.zeros(rows, columns)
x[np.repeat(np.arange(rows), np.diff(arrays["x_indptr"])), arrays["x_indices"].astype(np.int64)] = 1.0
edges, y = (torch.from_numpy(arrays[name]).long() for name in ("edge_index", "y"))
graph = Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], dim=1), y=y)
data = pyg_dist.DistributedData(graph, partition="random")
torch.manual_seed(0)
first, second = GCNConv(columns, 16), GCNConv(16, int(y.max()) + 1)
optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.01)
for _ in range(2):
    optimizer.zero_grad()
    out = second(first(data.x, data.edge_index).relu(), data.edge_index)
    loss = F.cross_entropy(out, data.y)
    loss.backward()
    optimizer.step()
taken = psutil.Process().memory_full_info().uss - before
sys.stdout.write(f"rank {pyg_dist.rank()}: {loss.item():.5f} {taken >> 20} MiB\n")
