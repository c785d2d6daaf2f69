"""Hugging Face accelerate: its loop and its ``prepare`` stay; the graph and the model are distributed.

    pip install accelerate
    torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py

``prepare(model)`` wraps the model in DDP where there are several processes. That is allowed and not needed: gradients
are those of the whole graph on every rank already, and DDP averages equal ones.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch_geometric.datasets import KarateClub
from torch_geometric.nn.models import GCN

from pyg_dist import DistributedData, distribute
from pyg_dist.checkpoint import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    data = DistributedData(KarateClub()[0])
    model = distribute(GCN(data.num_features, 16, num_layers=2, out_channels=4))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpointer = Checkpointer(args.resume, every=10, model=model, optimizer=optimizer)
    for epoch in checkpointer.epochs(1, args.epochs + 1):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"epoch {epoch} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
