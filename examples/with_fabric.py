"""Lightning Fabric: one device a process, since pyg_dist and not Fabric joins the processes.

pip install lightning
torchrun --standalone --nproc-per-node 2 examples/with_fabric.py
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.fabric.strategies import SingleDeviceStrategy
from torch_geometric.datasets import KarateClub
from torch_geometric.nn.models import GCN

import pyg_dist
from pyg_dist import DistributedData, distribute, is_main
from pyg_dist.checkpoint import Checkpointer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    pyg_dist.init()
    fabric = Fabric(accelerator="cpu", devices=1, strategy=SingleDeviceStrategy(device=torch.device("cpu")))
    torch.manual_seed(0)
    data = DistributedData(KarateClub()[0])
    model = distribute(GCN(data.num_features, 16, num_layers=2, out_channels=4))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpointer = Checkpointer(args.resume, every=10, model=model, optimizer=optimizer)
    for epoch in checkpointer.epochs(1, args.epochs + 1):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        fabric.backward(loss)
        optimizer.step()
        if is_main():
            print(f"epoch {epoch} loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
