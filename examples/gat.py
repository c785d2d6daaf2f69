"""PyG's GAT and any other stock model: the graph is distributed, and ``distribute`` swaps the convs of the model.

    python examples/gat.py
    torchrun --standalone --nproc-per-node 4 examples/gat.py --model GraphSAGE

Three lines differ from a script for stock PyG; they are marked. Dropout falls on attention weights and on features,
with the same masks on any number of processes.
"""

from __future__ import annotations

import argparse

import example_graphs
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import models

from pyg_dist import DistributedData, distribute, is_main  # 1
from pyg_dist.checkpoint import Checkpointer

MODELS = {"GAT": {"heads": 8}, "GATv2": {"heads": 8, "v2": True}, "GCN": {}, "GIN": {}, "GraphSAGE": {}, "EdgeCNN": {}}


def train(model: torch.nn.Module, data: Data, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: torch.nn.Module, data: Data) -> list[float]:
    model.eval()
    right = model(data.x, data.edge_index).argmax(dim=-1) == data.y
    return [right[mask].float().mean().item() for mask in (data.train_mask, data.val_mask, data.test_mask)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="GAT")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    torch.manual_seed(0)
    data = DistributedData(example_graphs.digits())  # 2
    make = getattr(models, args.model.removesuffix("v2"))
    model = make(
        data.num_features, args.hidden, num_layers=2, out_channels=10, dropout=args.dropout, **MODELS[args.model]
    )
    model = distribute(model)  # 3
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, weight_decay=5e-4)
    checkpointer = Checkpointer(args.resume, every=10, model=model, optimizer=optimizer)
    for epoch in checkpointer.epochs(1, args.epochs + 1):
        loss = train(model, data, optimizer)
        if epoch % 10 == 0 or epoch == args.epochs:
            accuracy = test(model, data)  # on every rank: it communicates
            if is_main():
                shown = ", ".join(f"{a:.4f}" for a in accuracy)
                print(f"epoch {epoch}: loss {loss:.6f}, accuracy of train, val, test {shown}", flush=True)


if __name__ == "__main__":
    main()
