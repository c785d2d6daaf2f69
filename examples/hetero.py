"""Several types of nodes: a stock script for ``HeteroData``, with three lines changed.

    python examples/hetero.py
    torchrun --standalone --nproc-per-node 4 examples/hetero.py --model HGT

Handwritten digits and their pixels: an image is linked to the pixels that are dark in it, and to its nearest images;
pixels have no features but a learned row each. Lines that differ from stock PyG are marked, but for ``--resume``.
"""

from __future__ import annotations

import argparse

import example_graphs
import torch
import torch.nn.functional as F
from torch_geometric.data import HeteroData
from torch_geometric.nn import GATConv, HeteroConv, HGTConv, SAGEConv

from pyg_dist import DistributedData, distribute, is_main  # 1
from pyg_dist.checkpoint import Checkpointer
from pyg_dist.nn import NodeEmbedding

CONVS = {
    "SAGE": lambda hidden: SAGEConv((hidden, hidden), hidden),
    "GAT": lambda hidden: GATConv((hidden, hidden), hidden, add_self_loops=False),
}


def images_and_pixels() -> HeteroData:
    plain, graph = example_graphs.digits(), HeteroData()
    for name in ("x", "y", "train_mask", "val_mask", "test_mask"):
        graph["image"][name] = plain[name]
    graph["pixel"].num_nodes = 64
    image, pixel = (plain.x > 0.7).nonzero().T
    graph["image", "near", "image"].edge_index = plain.edge_index
    graph["image", "has", "pixel"].edge_index = torch.stack([image, pixel])
    graph["pixel", "of", "image"].edge_index = torch.stack([pixel, image])
    return graph


class Net(torch.nn.Module):
    def __init__(self, metadata: tuple, kind: str, hidden: int) -> None:
        super().__init__()
        self.image = torch.nn.Linear(64, hidden)
        if kind == "HGT":
            self.convs = torch.nn.ModuleList(HGTConv(hidden, hidden, metadata, heads=4) for _ in range(2))
        else:
            self.convs = torch.nn.ModuleList(
                HeteroConv({relation: CONVS[kind](hidden) for relation in metadata[1]}, aggr="mean") for _ in range(2)
            )
        self.out = torch.nn.Linear(hidden, 10)

    def forward(self, images: torch.Tensor, pixels: torch.Tensor, edges: dict) -> torch.Tensor:
        x = {"image": self.image(images).relu(), "pixel": pixels}
        for conv in self.convs:
            x = {kind: rows.relu() for kind, rows in conv(x, edges).items()}
        return self.out(x["image"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=(*CONVS, "HGT"), default="SAGE")
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--resume", metavar="FOLDER", help="save there, and go on from what is there")
    args = parser.parse_args()

    torch.manual_seed(0)
    data = DistributedData(images_and_pixels())  # 2
    model = distribute(Net(data.metadata(), args.model, args.hidden))  # 3
    pixels, images = NodeEmbedding(data["pixel"], args.hidden), data["image"]
    optimizer = torch.optim.Adam([*model.parameters(), *pixels.parameters()], lr=args.lr)
    checkpointer = Checkpointer(args.resume, every=10, model=model, optimizer=optimizer, pixels=pixels)
    for epoch in checkpointer.epochs(1, args.epochs + 1):
        optimizer.zero_grad()
        out = model(images.x, pixels(), data.edge_index_dict)
        loss = F.cross_entropy(out[images.train_mask], images.y[images.train_mask])
        loss.backward()
        optimizer.step()
        if epoch % 10 == 0 or epoch == args.epochs:
            right = out.detach().argmax(dim=-1) == images.y
            masks = (images.train_mask, images.val_mask, images.test_mask)
            shown = ", ".join(f"{right[mask].float().mean().item():.4f}" for mask in masks)  # on every rank
            if is_main():
                print(f"epoch {epoch}: loss {loss.item():.6f}, accuracy of train, val, test {shown}", flush=True)


if __name__ == "__main__":
    main()
