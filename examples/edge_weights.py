"""Edge weights that learn: a GCN finds out which edges of a graph are noise.

    python examples/edge_weights.py
    torchrun --standalone --nproc-per-node 2 examples/edge_weights.py

The graph of handwritten digits gets as many random edges as it has. Each edge has a weight, a parameter that lies on
the one process that executes the edge, and is trained along with the model.
"""

from __future__ import annotations

import argparse

import example_graphs
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data

from pyg_dist import DistributedData, is_main
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.conv import DistributedGCNConv as GCNConv


class WeightedGCN(torch.nn.Module):
    def __init__(self, in_channels: int, hidden: int, out_channels: int, edge_weight: Tensor) -> None:
        super().__init__()
        self.conv1 = GCNConv(in_channels, hidden)
        self.conv2 = GCNConv(hidden, out_channels)
        self.edge_weight = torch.nn.Parameter(edge_weight)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        weight = self.edge_weight.sigmoid()
        x = self.conv1(x, edge_index, weight).relu()
        return self.conv2(x, edge_index, weight)


def with_noise(graph: Data, seed: int = 0) -> Data:
    """The graph with as many random edges as it has; ``edge_is_noise`` tells them apart."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(graph.num_nodes, (2, graph.num_edges), generator=generator)
    graph.edge_is_noise = torch.arange(2 * graph.num_edges) >= graph.num_edges
    graph.edge_index = torch.cat([graph.edge_index, noise], dim=1)
    graph.edge_weight = torch.zeros(graph.num_edges)
    return graph


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    torch.manual_seed(0)
    data = DistributedData(with_noise(example_graphs.digits(train_share=0.3)))
    model = WeightedGCN(data.num_features, 64, 10, data.edge_weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    checkpointer = Checkpointer(args.resume, every=10, model=model, optimizer=optimizer)
    for epoch in checkpointer.epochs(1, args.epochs + 1):
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        if is_main() and epoch % 10 == 0:
            print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)

    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(dim=-1) == data.y
        accuracy = right[data.test_mask].float().mean().item()
        weight = model.edge_weight.sigmoid()
        true_edges, noise = (weight[mask].mean().item() for mask in (~data.edge_is_noise, data.edge_is_noise))
    if is_main():
        print(f"test accuracy {accuracy:.4f}; mean weight of true edges {true_edges:.4f}, of random ones {noise:.4f}")


if __name__ == "__main__":
    main()
