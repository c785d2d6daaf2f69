"""Trains for some steps, slowly enough for a test to close the link between the ranks meanwhile."""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F
from random_graphs import random_graph

import pyg_dist
from pyg_dist.conv import DistributedGCNConv

torch.manual_seed(0)
data = pyg_dist.DistributedData(random_graph(40, 250, seed=1, dtype=torch.float32), partition="random")
model = DistributedGCNConv(data.num_features, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for step in range(40):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
    loss.backward()
    optimizer.step()
    if pyg_dist.is_main():
        sys.stdout.write(f"step {step} loss {loss.item().hex()}\n")
        sys.stdout.flush()
    time.sleep(0.02)
