"""Trains under torchrun, epoch after epoch, until a file says that it is enough.

agent_script.py FOLDER ENOUGH
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from random_graphs import random_graph

import pyg_dist
from pyg_dist.backend.comm.group import world_group
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.conv import DistributedSAGEConv

sys.stdout.write(f"process {os.getpid()}\n")
sys.stdout.flush()
folder, enough = map(Path, sys.argv[1:])
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
data = pyg_dist.DistributedData(random_graph(40, 250, seed=1), partition="random")
model = DistributedSAGEConv(data.num_features, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
for epoch in Checkpointer(folder, every=10, model=model, optimizer=optimizer).epochs(1, 10**6):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data.x, data.edge_index)[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    if pyg_dist.is_main():
        sys.stdout.write(f"epoch {epoch} on {pyg_dist.world_size()} ranks, loss {loss.item().hex()}\n")
        sys.stdout.flush()
    if any(world_group().gather_counts(int(enough.exists()))):
        break
    time.sleep(0.1)  # most of the time is the launchers'
