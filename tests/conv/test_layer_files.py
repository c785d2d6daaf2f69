"""How much of the package a layer passes: files and calls of SAGE's forward and backward on the halo layout."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch_geometric.datasets import KarateClub
from workers import Pools

import pyg_dist
from pyg_dist.conv import DistributedSAGEConv

MOST_FILES = {1: 25, 2: 40}


def files_of_a_layer() -> list[str]:
    """The package's files that run code between a layer's input and the gradients of input and parameters."""
    data = pyg_dist.DistributedData(KarateClub()[0])
    conv, files = DistributedSAGEConv(34, 16), set[str]()
    rows = data.x.clone().requires_grad_()
    package = str(Path(pyg_dist.__file__).parent)

    def note(frame: Any, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            files.add(frame.f_code.co_filename.removeprefix(package))

    for _ in range(3):  # what is made once has been made
        files.clear()
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            out = conv(rows, data.edge_index)
            local = out.to_local()
            torch.autograd.backward([local], [torch.ones_like(local)])
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(files)


def test_files_that_a_sage_layer_passes(workers: Pools) -> None:
    for num_ranks, most in MOST_FILES.items():
        for files in workers(num_ranks).run(files_of_a_layer):
            assert len(files) <= most, "\n".join(files)
