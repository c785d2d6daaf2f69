"""Axes of a mesh: their process groups are opened once for all graphs of a session."""

from __future__ import annotations

import os

import torch
from random_graphs import random_graph
from workers import on_ranks

from pyg_dist import DistributedData
from pyg_dist.conv import DistributedGCNConv
from pyg_dist.grid.collectives import Mesh
from pyg_dist.grid.plan.mesh_shape import MeshShape


@on_ranks(4)
def test_graphs_share_process_groups() -> None:
    def one() -> tuple[int, int]:
        graph = DistributedData(random_graph(23, 90), layout="grid", mesh={"x": 2, "y": 2})
        DistributedGCNConv(5, 3).double()(graph.x, graph.edge_index).sum().backward()
        torch.distributed.barrier()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    first = one()
    assert [one() for _ in range(2)] == [first, first]
    flat, tall = Mesh(MeshShape(x=2, y=2)), Mesh(MeshShape(z=2, x=2))
    assert flat.group("y") is Mesh(MeshShape(x=2, y=2)).group("y")
    assert flat.group("y") is tall.group("x")  # the same ranks
    assert flat.group("y") is not flat.group("x")
    assert flat.group("x", "y") is tall.group("x", "z")
