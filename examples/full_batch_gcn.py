"""Full-batch GCN in the style of OGB's examples: index splits, batch norm, dropout, several layers.

    python examples/full_batch_gcn.py
    torchrun --standalone --nproc-per-node 4 examples/full_batch_gcn.py --data cora.npz

Dropout draws the same masks on any number of processes, so the losses do not depend on their number; they differ from
stock PyG's, whose generator draws other masks.
"""

from __future__ import annotations

import argparse
from itertools import pairwise

import example_graphs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from pyg_dist import DistributedData, is_main
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.conv import DistributedGCNConv as GCNConv


class GCN(torch.nn.Module):
    def __init__(self, in_channels: int, hidden: int, out_channels: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        widths = [in_channels, *[hidden] * (num_layers - 1)]
        # No bias before batch norm, which takes it away again: its gradient would be nothing but rounding.
        self.convs = torch.nn.ModuleList(GCNConv(a, b, cached=True, bias=False) for a, b in pairwise(widths))
        self.convs.append(GCNConv(hidden, out_channels, cached=True))
        self.norms = torch.nn.ModuleList(torch.nn.BatchNorm1d(hidden) for _ in range(num_layers - 1))
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            x = norm(conv(x, edge_index)).relu()
            x = F.dropout(x, p=self.dropout, training=self.training)
        return self.convs[-1](x, edge_index).log_softmax(dim=-1)


def train(model: GCN, data: Data, train_idx: Tensor, optimizer: torch.optim.Optimizer) -> float:
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)[train_idx]
    loss = F.nll_loss(out, data.y[train_idx])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: GCN, data: Data, split_idx: dict[str, Tensor]) -> dict[str, float]:
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    return {name: (pred[index] == data.y[index]).float().mean().item() for name, index in split_idx.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE.npz", help="see example_graphs.read_npz; digits if left out")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=3)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    torch.manual_seed(0)
    graph = example_graphs.read_npz(args.data) if args.data else example_graphs.digits()
    split_idx = {name: graph[f"{name}_mask"].nonzero().view(-1) for name in ("train", "val", "test")}
    num_classes = int(graph.y.max()) + 1
    data = DistributedData(graph)
    del graph  # each process keeps its own part only

    model = GCN(data.num_features, args.hidden, num_classes, args.num_layers, args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    checkpointer = Checkpointer(args.resume, every=10, model=model, optimizer=optimizer)
    for epoch in checkpointer.epochs(1, args.epochs + 1):
        loss = train(model, data, split_idx["train"], optimizer)
        if epoch % 10 == 0 or epoch == args.epochs:
            accuracy = test(model, data, split_idx)  # on every rank: it gathers
            if is_main():
                shown = ", ".join(f"{name} {value:.4f}" for name, value in accuracy.items())
                print(f"epoch {epoch}: loss {loss:.6f}, accuracy {shown}", flush=True)


if __name__ == "__main__":
    main()
