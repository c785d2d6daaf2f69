"""Trains by mini-batches with a Checkpointer; rank 1 may get a signal, or be killed, after some step."""

from __future__ import annotations

import argparse
import os
import signal

import torch
import torch.nn.functional as F
from random_graphs import random_graph
from torch import nn

import pyg_dist
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.checkpoint import checkpointer as checkpointer_module
from pyg_dist.conv import DistributedSAGEConv
from pyg_dist.loader import UniformVertexLoader
from pyg_dist.nn import NodeEmbedding

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("signal", nargs="?", default="", help="such as SIGTERM:7, after step 7")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--every", type=int, default=2)
parser.add_argument("--memory", type=int, default=0)
args = parser.parse_args()
name, _, last = args.signal.partition(":")

checkpointer_module._LOOK_SECONDS = 0.0  # after each step
torch.set_default_dtype(torch.float64)
torch.manual_seed(args.seed)
data = pyg_dist.DistributedData(random_graph(40, 250, seed=1), partition="random")
model = nn.ModuleDict({"rows": NodeEmbedding(data, 4), "first": DistributedSAGEConv(4, 8), "last": nn.Linear(8, 4)})
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
loader = UniformVertexLoader(data, 12, num_steps=4, input_nodes=data.train_mask)
checkpointer = Checkpointer(
    args.folder, every=args.every, memory=args.memory, model=model, optimizer=optimizer, loader=loader
)
best = checkpointer.state
for epoch in checkpointer.epochs(1, 6):
    for batch in checkpointer.batches(loader):
        optimizer.zero_grad()
        hidden = model["first"](model["rows"]()[batch.n_id], batch.edge_index)
        out = model["last"](F.dropout(hidden.relu(), 0.2))
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
        loss.backward()
        optimizer.step()
        step = loader.state_dict()["step"]
        if pyg_dist.is_main():
            print(f"epoch {epoch} step {step} loss {loss.item().hex()}", flush=True)
        if (
            name
            and step == int(last)
            and pyg_dist.rank() == 1
            and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        ):
            os.kill(os.getpid(), getattr(signal, name))
    best["least"] = min(loss.item(), best.get("least", 1e9))
if pyg_dist.is_main():
    print(f"least {best['least'].hex()}")
