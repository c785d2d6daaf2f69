"""Neighbour sampling: GraphSAGE on batches of 64 seeds, evaluated on the whole graph.

    python examples/neighbor_sampling.py
    torchrun --standalone --nproc-per-node 2 examples/neighbor_sampling.py

Batches do not depend on the number of processes, and neither do the losses.
"""

from __future__ import annotations

import argparse

import example_graphs
import torch
import torch.nn.functional as F
from torch_geometric.nn import GraphSAGE

import pyg_dist
from pyg_dist import DistributedData, is_main
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.loader import NeighborLoader


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", metavar="FILE.npz", help="see example_graphs.read_npz; digits if left out")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--num-neighbors", type=int, nargs="+", default=[10, 5])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    torch.manual_seed(0)
    graph = example_graphs.read_npz(args.data) if args.data else example_graphs.digits()
    num_classes = int(graph.y.max()) + 1
    data = DistributedData(graph)
    del graph  # each process keeps its own part only

    loader = NeighborLoader(
        data, args.num_neighbors, input_nodes=data.train_mask, batch_size=args.batch_size, shuffle=True
    )
    num_layers = len(args.num_neighbors)
    model = pyg_dist.distribute(GraphSAGE(data.num_features, args.hidden, num_layers, num_classes, dropout=0.3))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    checkpointer = Checkpointer(args.resume, every=5, model=model, optimizer=optimizer, loader=loader)
    for epoch in checkpointer.epochs(1, args.epochs + 1):
        model.train()
        total, seeds = 0.0, 0
        for batch in checkpointer.batches(loader):
            optimizer.zero_grad()
            out = model(batch.x, batch.edge_index)
            loss = F.cross_entropy(out[: batch.batch_size], batch.y[: batch.batch_size])
            loss.backward()
            optimizer.step()
            total, seeds = total + loss.item() * batch.batch_size, seeds + batch.batch_size
        model.eval()
        with torch.no_grad():
            hits = model(data.x, data.edge_index).argmax(dim=-1) == data.y  # exact, each edge once
            accuracy = hits[data.test_mask].float().mean().item()
        if is_main() and epoch % 10 == 0:
            print(f"epoch {epoch}: loss {total / seeds:.6f}, test {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
