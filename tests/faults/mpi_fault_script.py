"""A small training under mpirun that goes wrong in one of many ways on one rank.

    mpi_fault_script.py FAULT RANK

Ranks print their process's number first, so that a test sees which are left behind.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import torch
import torch.nn.functional as F
from torch_geometric.data import Data

import pyg_dist
from pyg_dist.backend.session import failure
from pyg_dist.conv import DistributedGCNConv as GCNConv

failure._SAME_SECONDS = 0.1  # rank 0 has no mistake of its own, for which another would wait
FAULT, CONCERNED = sys.argv[1], int(sys.argv[2])
FOREVER = 1e6
is_concerned = pyg_dist.rank() == CONCERNED
sys.stdout.write(f"process {os.getpid()}\n")
sys.stdout.flush()


class Faulty(torch.autograd.Function):
    """Raises in the backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        """The same."""
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        """Never returns."""
        raise ValueError("the fault in backward")


if FAULT == "another library's mpirun":  # the ranks of one, which MPI of another does not see
    place = {"RANK": str(pyg_dist.rank()), "SIZE": str(pyg_dist.world_size())}
    is_open_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    for name in [name for name in os.environ if name.startswith(("PMI", "OMPI", "PRTE"))]:
        del os.environ[name]
    os.environ.update({f"{'PMI' if is_open_mpi else 'OMPI_COMM_WORLD'}_{name}": value for name, value in place.items()})
if FAULT == "raises before init" and is_concerned:
    raise ValueError("the fault before init")
if FAULT == "raises before init with MPI running":
    from mpi4py import MPI

    if is_concerned:
        raise ValueError("the fault before init")
    MPI.COMM_WORLD.Barrier()
pyg_dist.init()
node = torch.arange(40)
edge_index = torch.cat([torch.stack([node, node.roll(shift)]) for shift in (1, -1, 7, -7)], dim=1)
data = pyg_dist.DistributedData(Data(x=torch.eye(40, 6), edge_index=edge_index, y=node % 3), partition="random")
first, second = GCNConv(6, 8), GCNConv(8, 3)
parameters = [*first.parameters(), *second.parameters()]
optimizer = torch.optim.SGD(parameters, lr=0.1)
for step in range(1000):
    hidden = first(data.x, data.edge_index).relu()
    if is_concerned and step == 2:
        if FAULT == "raises in forward":
            raise ValueError("the fault in forward")
        if FAULT == "raises with a thread alive":
            threading.Thread(target=time.sleep, args=(FOREVER,)).start()
            raise ValueError("the fault beside a thread")
        if FAULT == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "calls what others do not":
            data.x.sum().item()
    if FAULT == "waits" and step == 2:
        sys.stdout.write("all wait\n")
        sys.stdout.flush()
        time.sleep(FOREVER if is_concerned else 0)
    loss = F.cross_entropy(second(hidden, data.edge_index), data.y)
    if FAULT == "raises in backward" and is_concerned and step == 2:
        loss = Faulty.apply(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if FAULT == "none" and step == 2:
        break
