"""Lightning's Trainer: a step is an epoch, the graph is the module's, and files are written on rank 0 alone.

    pip install lightning
    torchrun --standalone --nproc-per-node 2 examples/with_lightning.py

The Trainer sees one device a process, since pyg_dist and not Lightning joins the processes. Early stopping runs on
every rank and decides alike, because losses are equal everywhere. Loggers and checkpoints are given to rank 0.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader
from torch_geometric.datasets import KarateClub
from torch_geometric.nn.models import GCN

import pyg_dist
from pyg_dist import DistributedData, distribute, is_main


class Training(lightning.LightningModule):
    def __init__(self, data: DistributedData) -> None:
        super().__init__()
        self.data = data
        self.model = distribute(GCN(data.num_features, 16, num_layers=2, out_channels=4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        data = self.data
        out = self.model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        self.log("loss", loss)
        if is_main():
            print(f"epoch {self.current_epoch + 1} loss {loss.item():.6f}")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--resume", metavar="FOLDER", type=Path, help="save there, and go on from what is there")
    args = parser.parse_args()
    folder = args.resume or Path("lightning")
    last = folder / "last.ckpt"

    pyg_dist.init()
    torch.manual_seed(0)
    training = Training(DistributedData(KarateClub()[0]))
    callbacks: list[Any] = [EarlyStopping("loss", min_delta=1e-3, patience=5)]
    if is_main():
        callbacks.append(ModelCheckpoint(folder, monitor="loss", filename="best", save_last=args.resume is not None))
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        accelerator="cpu",
        devices=1,
        strategy=SingleDeviceStrategy(device=torch.device("cpu")),
        callbacks=callbacks,
        logger=CSVLogger(folder) if is_main() else False,
        enable_checkpointing=is_main(),
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    is_there = args.resume is not None and last.exists()
    trainer.fit(training, DataLoader([0]), ckpt_path=last if is_there else None)  # one batch: the whole graph


if __name__ == "__main__":
    main()
