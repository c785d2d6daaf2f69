"""Full-batch GraphSAGE whose halos travel in two bits a value, with masked label propagation (SuperGCN, 6).

    python examples/full_batch_int2.py
    torchrun --standalone --nproc-per-node 4 examples/full_batch_int2.py --data cora.npz

Trains three times, in full precision, in two bits, and in two bits with label propagation, and draws the accuracies by
epoch. A layer's input is normalised right before it is sent: outliers would stretch the steps of their row. (A layer
that projects first, because its output is narrower, sends lin(norm(x)).) Features alone are constant: their sums are
sent once, as they are, and remembered; with labels they change every step, and are normalised, too. Gradients go in two
bits, and evaluation as it is. With one process nothing is sent, and the first two trainings are the same but for what
dropout draws.
"""

from __future__ import annotations

import argparse
from itertools import pairwise
from pathlib import Path

import example_graphs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from pyg_dist import DistributedData, is_main
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.conv import DistributedSAGEConv as SAGEConv
from pyg_dist.nn import MaskedLabelPropagation


class SAGE(torch.nn.Module):
    def __init__(self, in_channels: int, hidden: int, out_channels: int, dropout: float, is_sent: bool) -> None:
        """``is_sent``: whether the input changes, and so is sent in every step."""
        super().__init__()
        widths = [in_channels, hidden, hidden, out_channels]
        self.enter = torch.nn.LayerNorm(in_channels) if is_sent else torch.nn.Identity()
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for width in widths[1:-1])
        self.convs = torch.nn.ModuleList(SAGEConv(a, b) for a, b in pairwise(widths))
        self.dropout = dropout

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.convs[0](self.enter(x), edge_index)
        for norm, conv in zip(self.norms, self.convs[1:], strict=True):
            x = F.dropout(x.relu(), self.dropout, self.training)
            x = conv(norm(x), edge_index)
        return x


def train(
    data: Data, num_classes: int, has_labels: bool, args: argparse.Namespace, folder: str | None = None
) -> list[float]:
    """The test accuracy by epoch; saved in a folder, if there is one."""
    torch.manual_seed(0)
    model = SAGE(data.num_features, args.hidden, num_classes, args.dropout, is_sent=has_labels)
    propagation = MaskedLabelPropagation(num_classes, data.num_features, args.rate)
    parameters = [*model.parameters(), *(propagation.parameters() if has_labels else ())]
    optimizer = torch.optim.Adam(parameters, lr=args.lr)
    checkpointer = Checkpointer(folder, every=10, model=model, optimizer=optimizer, propagation=propagation)
    accuracies: list[float] = checkpointer.state.setdefault("accuracies", [])
    for _ in checkpointer.epochs(args.epochs):
        for part in (model, propagation):
            part.train()
        optimizer.zero_grad()
        x, loss_mask = data.x, data.train_mask
        if has_labels:
            x, loss_mask = propagation(data.x, data.y, data.train_mask)
        F.cross_entropy(model(x, data.edge_index)[loss_mask], data.y[loss_mask]).backward()
        optimizer.step()

        for part in (model, propagation):
            part.eval()
        with torch.no_grad():
            x = propagation(data.x, data.y, data.train_mask)[0] if has_labels else data.x
            out = model(x, data.edge_index)[data.test_mask]
            accuracies.append((out.argmax(-1) == data.y[data.test_mask]).float().mean().item())
    return accuracies


def draw(path: Path, curves: dict[str, list[float]]) -> None:
    """The accuracies by epoch, if matplotlib is installed."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture of the accuracies: it takes matplotlib, pip install matplotlib")
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    for name, accuracies in curves.items():
        axis.plot(range(1, len(accuracies) + 1), accuracies, label=name)
    axis.set(xlabel="epoch", ylabel="test accuracy")
    axis.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE.npz", help="see example_graphs.read_npz; digits if left out")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--rate", type=float, default=0.5, help="share of the training labels that are embedded")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--picture", type=Path, default=Path("full_batch_int2.png"), help="where the curves go")
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    curves = {}
    for name, bits, has_labels in (("fp32", 32, False), ("int2", 2, False), ("int2 + labels", 2, True)):
        graph = example_graphs.read_npz(args.data) if args.data else example_graphs.digits()
        num_classes = int(graph.y.max()) + 1
        data = DistributedData(graph, bits=bits)
        curves[name] = train(data, num_classes, has_labels, args, args.resume and f"{args.resume}/{name}")
        sent = data.traffic.num_bytes
        if is_main() and curves[name]:  # none: asked to stop before the first epoch
            print(f"{name}: accuracy {curves[name][-1]:.4f}, rank 0 sent {sent:,} bytes", flush=True)
    if is_main():
        draw(args.picture, curves)


if __name__ == "__main__":
    main()
