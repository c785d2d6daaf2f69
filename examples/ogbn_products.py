"""Full-batch GraphSAGE on ogbn-products from a store, scored by OGB's own Evaluator.

    python -m pyg_dist partition dataset/ogbn_products products.store --parts 4
    torchrun --standalone --nproc-per-node 4 examples/ogbn_products.py products.store

The first line reads the folder that ``ogb`` has downloaded, once; each process then reads its own part of the store
alone. Any store with classes as ``y`` and the three masks will do.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from ogb.nodeproppred import Evaluator
from torch import Tensor

from pyg_dist import DistributedData, is_main
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.conv import DistributedSAGEConv as SAGEConv


class SAGE(torch.nn.Module):
    def __init__(self, in_channels: int, hidden: int, out_channels: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        widths = [in_channels, *[hidden] * (num_layers - 1), out_channels]
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index).relu(), p=self.dropout, training=self.training)
        return self.convs[-1](x, edge_index)


def train(model: SAGE, data: Any, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask].view(-1))
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracies(model: SAGE, data: Any, evaluator: Evaluator) -> dict[str, float]:
    model.eval()
    predicted = model(data.x, data.edge_index).argmax(dim=-1, keepdim=True)
    found = {}
    for name in ("train", "val", "test"):
        mask = data[f"{name}_mask"]
        truth = data.y[mask].view(-1, 1)
        scores = {"y_true": truth.full_tensor(), "y_pred": predicted[mask].full_tensor()}
        found[name] = evaluator.eval(scores)["acc"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", help="folder written by python -m pyg_dist partition")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=300)
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    data: Any = DistributedData.open(args.store)
    torch.manual_seed(0)
    num_classes = int(data.y.max()) + 1
    model = SAGE(data.num_features, args.hidden, num_classes, args.layers, args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    evaluator = Evaluator("ogbn-products")
    checkpointer = Checkpointer(args.resume, every=25, model=model, optimizer=optimizer)
    for epoch in checkpointer.epochs(1, args.epochs + 1):
        loss = train(model, data, optimizer)
        if epoch % 25 == 0 or epoch == args.epochs:
            found = accuracies(model, data, evaluator)
            if is_main():
                shares = ", ".join(f"{name} {share:.4f}" for name, share in found.items())
                print(f"epoch {epoch}: loss {loss:.4f}, {shares}", flush=True)


if __name__ == "__main__":
    main()
