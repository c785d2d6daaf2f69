"""Mini-batches of uniformly drawn nodes, on both layouts: ScaleGNN's model (III-A), with early stopping.

    python examples/minibatch_4d.py
    torchrun --standalone --nproc-per-node 2 examples/minibatch_4d.py
    torchrun --standalone --nproc-per-node 4 examples/minibatch_4d.py --mesh data=2,x=2

Samples and dropout are functions of the seed: losses of the halo layout do not depend on the number of processes.
With several data groups each draws a sample of its own, and a step is on the union of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import example_graphs
import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist import DistributedData, is_main
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.conv import DistributedGCNConv as GCNConv
from pyg_dist.loader import UniformVertexLoader
from pyg_dist.nn import NormReLUDropout


class GCN(torch.nn.Module):
    """A projection, layers of GCN with a residual, a head."""

    def __init__(self, in_channels: int, hidden: int, out_channels: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.projection = torch.nn.Linear(in_channels, hidden)
        self.convs = torch.nn.ModuleList(GCNConv(hidden, hidden, bias=False) for _ in range(num_layers))
        self.norms = torch.nn.ModuleList(NormReLUDropout(hidden, norm="rms", p=dropout) for _ in range(num_layers))
        self.head = torch.nn.Linear(hidden, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.projection(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, edge_index), x)
        return self.head(x)


def train(model: GCN, batches: Iterator[DistributedData], optimizer: torch.optim.Optimizer) -> float:
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model: GCN, data: DistributedData) -> tuple[float, float]:
    """The accuracies on the whole graph of the nodes that validate and of those that test."""
    model.eval()
    hits = model(data.x, data.edge_index).argmax(dim=-1) == data.y
    return hits[data.val_mask].float().mean().item(), hits[data.test_mask].float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE.npz", help="see example_graphs.read_npz; digits if left out")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--mesh", help="axes of the grid layout, as data=2,x=2; the halo layout if left out")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--patience", type=int, default=15, help="epochs without a better validation")
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    torch.manual_seed(0)
    graph = example_graphs.read_npz(args.data) if args.data else example_graphs.digits()
    num_classes = int(graph.y.max()) + 1
    mesh = {axis: int(size) for axis, size in (item.split("=") for item in args.mesh.split(","))} if args.mesh else None
    data = DistributedData(graph) if mesh is None else DistributedData(graph, layout="grid", mesh=mesh)
    del graph  # each process keeps its own part only

    loader = UniformVertexLoader(data, args.batch_size, input_nodes=data.train_mask)
    model = GCN(data.num_features, args.hidden, num_classes, args.num_layers, args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    checkpointer = Checkpointer(args.resume, every=5, model=model, optimizer=optimizer, loader=loader)
    best = checkpointer.state  # saved with the rest
    best.update({"validation": 0.0, "test": 0.0, "epoch": 0} | best)
    for epoch in checkpointer.epochs(1, args.epochs + 1):
        loss = train(model, checkpointer.batches(loader), optimizer)
        validation, tested = test(model, data)  # on every rank: it gathers
        if validation > best["validation"]:
            best.update(validation=validation, test=tested, epoch=epoch)
        if is_main() and epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss:.6f}, validation {validation:.4f}", flush=True)
        if epoch - best["epoch"] >= args.patience:
            break
    if is_main():
        print(f"best validation {best['validation']:.4f} in epoch {best['epoch']}, test {best['test']:.4f}")


if __name__ == "__main__":
    main()
