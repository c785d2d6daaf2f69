"""Sums and gathers of an axis over several machines: each piece crosses once, and the values are those of one level."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from random_graphs import random_graph
from torch_geometric.nn import SAGEConv
from workers import on_ranks

import pyg_dist
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.backend.session import session
from pyg_dist.grid.collectives import AllGather, Mesh, ReduceScatter, sum_all
from pyg_dist.grid.plan.mesh_shape import MeshShape


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "machines"), [(4, "0,0,1,1"), pytest.param(6, "0,0,1,1,2,2", marks=pytest.mark.slow)]
)
def test_pieces_cross_machines_once(world_size: int, machines: str) -> None:
    session.shutdown()
    os.environ["PYG_DIST_MACHINES"] = machines
    session.init()
    try:
        two = Mesh(MeshShape(world_size, 1, 1)).transport("x")
        one = Transport(two.group)
        assert two.levels is not None
        rank, sizes = two.group.rank, [3, 0, 2, 4, 1, 5][:world_size]
        generator = torch.Generator().manual_seed(rank)
        on_each = two.levels.inner.group.size
        for dim in (0, 1):
            shape = (sizes[rank], 7) if dim == 0 else (7, sizes[rank])
            piece = torch.randn(shape, generator=generator, dtype=torch.float64)
            whole = AllGather(one, sizes, dim).start(piece).wait()
            before = two.traffic.num_bytes_between
            assert torch.equal(AllGather(two, sizes, dim).start(piece).wait(), whole)
            crossed = two.traffic.num_bytes_between - before
            assert crossed == piece.nbytes * (world_size // on_each - 1)
            summand = torch.randn(whole.shape, generator=generator, dtype=torch.float64)
            expected = ReduceScatter(one, sizes, dim).start(summand).wait()
            before = two.traffic.num_bytes_between
            found = ReduceScatter(two, sizes, dim).start(summand).wait()
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
            sent = sum(sizes[rank % on_each :: on_each]) - sizes[rank]
            assert two.traffic.num_bytes_between - before == sent * 7 * 8
        narrow = Mesh(MeshShape(world_size, 1, 1)).transport("x", dtype=torch.bfloat16)
        ones = torch.ones(11)
        assert torch.equal(sum_all(ones, narrow), ones * world_size)

        graph = random_graph(40, 300, num_features=5, seed=3)
        graph.x = graph.x.double()
        stock = SAGEConv(5, 4).double()
        for parameter in stock.parameters():
            with torch.no_grad():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        data = pyg_dist.DistributedData(graph, layout="grid", mesh={"x": world_size})
        results: list[list[Any]] = []
        for conv, given in ((stock, graph), (pyg_dist.distribute(copy.deepcopy(stock)), data)):
            x = given.x.detach().clone().requires_grad_()
            out = conv(x, given.edge_index)
            grads = torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])
            results.append([t.full_tensor() if hasattr(t, "full_tensor") else t for t in (out.detach(), *grads)])
        for theirs, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    finally:
        del os.environ["PYG_DIST_MACHINES"]
        session.shutdown()
        session.init()
