"""A small training that goes wrong in one of many ways on rank 1; what it prints must be true.

    fault_script.py FAULT LAYOUT

It prints, on every rank, sums that it knows: a number that is not its own is a silent error.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch_geometric.data import Data

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.backend.comm.group import world_group
from pyg_dist.backend.session import divergence
from pyg_dist.conv import DistributedGCNConv as GCNConv

FAULT, LAYOUT = sys.argv[1:3]
if "--quick" in sys.argv:  # what is under test is who is told what, not when
    divergence.LOOK_SECONDS, divergence.PATIENCE_SECONDS, divergence.NOTICE_SECONDS = 0.1, 0.3, 0.6
    divergence.BEAT_SECONDS, divergence.SILENT_SECONDS = 0.2, 0.5
    if FAULT.startswith("stopped"):
        divergence.AGAIN_SECONDS = 1.0

torch.manual_seed(0)
NODES = 40
node = torch.arange(NODES)
edge_index = torch.cat([torch.stack([node, node.roll(shift)]) for shift in (1, -1, 7, -7)], dim=1)
pyg_dist.init()
odd = pyg_dist.rank() == 1
graph = Data(x=torch.randn(NODES, 6), edge_index=edge_index, y=node % 3)
graph.train_mask, graph.test_mask = node < 25, node >= 25
graph.node = node.to(torch.float64)
data = DistributedData(graph, layout=LAYOUT, partition="random")


class Net(torch.nn.Module):
    """Two layers, of which one rank may skip one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = GCNConv(6, 8), GCNConv(8, 8), GCNConv(8, 3)

    def forward(self, x: torch.Tensor, edges: object, skips: bool = False) -> torch.Tensor:
        x = self.first(x, edges).relu()
        if not skips:
            x = self.second(x, edges).relu()
        return self.third(x, edges)


model = Net()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def check(name: str, got: float, truth: float) -> None:
    """Print a number and whether it is the one asked for."""
    sys.stdout.write(f"{name} {'right' if got == truth else f'WRONG: {got} for {truth}'}\n")
    sys.stdout.flush()


def step(backwards: int = 1, skips: bool = False) -> torch.Tensor:
    """One step of training."""
    optimizer.zero_grad()
    out = model(data.x, data.edge_index, skips)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    for _ in range(backwards):
        loss.backward(retain_graph=True)
    optimizer.step()
    return loss.detach()


def evaluate() -> float:
    """The accuracy."""
    with torch.no_grad():
        out = model(data.x, data.edge_index)
        return float((out.argmax(dim=-1) == data.y)[data.test_mask].float().mean())


def sums() -> None:
    """Two sums whose values are known."""
    check("train", data.node[data.train_mask].sum().item(), 300.0)
    check("test", data.node[data.test_mask].sum().item(), 480.0)


if FAULT == "none":
    pass
elif FAULT == "a slow rank":
    for _ in range(2):
        time.sleep(1.5 if odd else 0.0)
        step()
elif FAULT.startswith("stopped "):  # as by Ctrl-Z; another process ends it when the others have ended
    processes = world_group().gather_counts(os.getpid())
    if f"stopped {pyg_dist.rank()}" == FAULT:
        processes.remove(os.getpid())
        end = f"""
import os, time
while any(map(os.path.exists, {[f"/proc/{process}" for process in processes]})):
    time.sleep(0.1)
os.kill({os.getpid()}, 9)"""
        subprocess.Popen([sys.executable, "-c", end], start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
elif FAULT == "an extra collective":
    if odd:
        check("train", data.node[data.train_mask].sum().item(), 300.0)
elif FAULT == "a skipped epoch":
    if not odd:
        step()
elif FAULT == "a skipped conv":
    step(skips=odd)
elif FAULT == "another order":
    if odd:
        check("test", data.node[data.test_mask].sum().item(), 480.0)
        check("train", data.node[data.train_mask].sum().item(), 300.0)
elif FAULT == "another mask":
    if odd:
        check("mask", data.node[data.train_mask].sum().item(), 300.0)
    else:
        check("mask", data.node[data.test_mask].sum().item(), 480.0)
elif FAULT == "an early break":
    for epoch in range(4):
        if odd and epoch == 2:
            break
        step()
elif FAULT == "an early end":
    if odd:
        sys.exit(0)
elif FAULT == "one more backward":
    step(backwards=2 if odd else 1)
elif FAULT == "a metric under is_main()":
    out = model(data.x, data.edge_index)
    if pyg_dist.is_main():
        accuracy = float((out.argmax(dim=-1) == data.y)[data.test_mask].float().mean())
elif FAULT == "a gather on one rank":
    if odd:
        check("gathered", data.node.full_tensor().sum().item(), 780.0)
elif FAULT == "an evaluation on one rank":
    if odd:
        evaluate()
elif FAULT == "other batches":
    for low in range(0, NODES if odd else NODES // 2, 10):
        rows = torch.arange(low, low + 10)
        check("batch", data.node[rows].sum().item(), float(rows.sum()))
else:
    raise AssertionError(FAULT)
sums()
step()
sums()
