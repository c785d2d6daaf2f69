"""Full-batch GraphSAGE on handwritten digits, on any number of processes, compared with single-process PyG.

    python examples/digits.py
    torchrun --standalone --nproc-per-node 2 examples/digits.py
    mpirun -n 2 python examples/digits.py

This is an ordinary PyG script but for three lines, which are marked, for ``--resume``, and for the comparison that it
ends with: ``main`` trains once more with stock PyG and prints how far the two are apart; the exit status says whether
that is rounding.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import example_graphs
import torch
import torch.nn.functional as F
from compare import History, compare, draw
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv as StockSAGEConv  # only for the comparison in main
from tqdm import tqdm

from pyg_dist import DistributedData, is_main  # changed line 1 of 3: new
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.conv import DistributedSAGEConv as SAGEConv  # changed line 2 of 3: was torch_geometric.nn's SAGEConv

HIDDEN = 128


class SAGE(torch.nn.Module):
    def __init__(self, in_channels: int, hidden: int, out_channels: int, conv: type = SAGEConv) -> None:
        super().__init__()
        self.conv1 = conv(in_channels, hidden)
        self.conv2 = conv(hidden, hidden)
        self.conv3 = conv(hidden, out_channels)
        self.norm1 = torch.nn.LayerNorm(hidden)
        self.norm2 = torch.nn.LayerNorm(hidden)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        # ELU, since two trainings are compared: rounding must not decide on which side of ReLU's kink a value falls.
        x = F.elu(self.norm1(self.conv1(x, edge_index)))
        x = F.elu(self.norm2(self.conv2(x, edge_index)))
        return self.conv3(x, edge_index)


def train(model: SAGE, data: Data, num_epochs: int, folder: str | None = None) -> History:
    """Train, and take down what the comparison needs."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003, weight_decay=5e-4)
    history = History()
    checkpointer = Checkpointer(folder, every=10, model=model, optimizer=optimizer, history=history)
    remaining = checkpointer.epochs(num_epochs)
    epochs = tqdm(remaining, desc="training", disable=None if is_main() else True)  # None: terminals only
    for epoch in epochs:
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        history.record(loss, model)
        optimizer.step()
        epochs.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if is_main() and epochs.disable and (epoch + 1) % 10 == 0:
            print(f"epoch {epoch + 1}: loss {loss.item():.4f}", flush=True)
    return history


@torch.no_grad()
def accuracies(model: SAGE, data: Data) -> str:
    """The share of right predictions on each split."""
    right = (model(data.x, data.edge_index).argmax(dim=-1) == data.y).float()
    return ", ".join(f"{name} {right[data[f'{name}_mask']].mean().item():.4f}" for name in ("train", "val", "test"))


def main() -> int:
    """Train, compare, report; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--picture", type=Path, default=Path("digits.png"), help="where the loss curves go")
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    torch.manual_seed(0)
    graph = example_graphs.digits()
    num_classes = int(graph.y.max()) + 1
    data = DistributedData(graph)  # changed line 3 of 3: was `data = graph`

    model = SAGE(data.num_features, HIDDEN, num_classes)
    first_values = {name: value.clone() for name, value in model.state_dict().items()}
    ours = train(model, data, args.epochs, args.resume)
    accuracy = accuracies(model, data)  # every rank takes part; only rank 0 prints
    if not is_main():
        return 0

    print("the same training with single-process PyG", flush=True)
    stock_model = SAGE(graph.num_features, HIDDEN, num_classes, conv=StockSAGEConv)
    stock_model.load_state_dict(first_values)
    stock = train(stock_model, graph, args.epochs)

    print(f"\naccuracy  {accuracy}\nwith PyG  {accuracies(stock_model, graph)}\n")
    print(data.plan.describe(widths=(data.num_features, HIDDEN, num_classes)))  # what the three layers send
    print(f"rank 0 sent {data.traffic.num_bytes:,} bytes of halo rows in {data.traffic.num_messages:,} messages\n")
    difference = compare(ours, stock)
    print(difference)
    draw(args.picture, ours, stock, f"pyg_dist, world size {data.plan.ranks}")
    return 0 if difference.is_rounding else 1


if __name__ == "__main__":
    sys.exit(main())
