"""The data is really distributed: no rank sees all rows, what is planned is sent, memory shrinks with ranks."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import load_npz
from random_graphs import random_graph, uneven_parts
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.data import Data
from wire import Wire
from workers import Pools

from pyg_dist import DistributedData
from pyg_dist import conv as ours
from pyg_dist.backend.ops.memory import release_free_memory
from pyg_dist.conv import DistributedSAGEConv


def distribute(graph: Data, world_size: int) -> Any:
    return DistributedData(graph, partition=uneven_parts(graph.num_nodes, world_size))


class Largest(TorchDispatchMode):
    """Keeps the shape of the largest result of all calls that reach the kernels, backward and optimizer included."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = torch.Size([0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.shape.numel():
                self.shape = tensor.shape
        return out


RING = 400  # nodes


def ring() -> Data:
    """Each node and its two neighbours on either side: the halo is small, as it is on large graphs."""
    node = torch.arange(RING)
    edge_index = torch.cat([torch.stack([node, (node + k) % RING]) for k in (-2, -1, 1, 2)], dim=1)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(RING, 6, generator=rng), torch.randint(0, 5, (RING,), generator=rng)
    return Data(x=x, y=y, edge_index=edge_index, edge_weight=torch.rand(4 * RING, generator=rng), train_mask=y > 1)


def epochs(conv_name: str) -> dict[str, Any]:
    data = DistributedData(ring(), exchange="post")
    conv = getattr(ours, conv_name)
    weights = [data.edge_weight.requires_grad_()] if conv_name == "DistributedGCNConv" else []
    first, norm, second = conv(6, 7), torch.nn.BatchNorm1d(7), conv(7, 5)
    model = torch.nn.ModuleList([first, norm, second])
    optimizer = torch.optim.Adam([*model.parameters(), *weights])
    with Largest() as largest:
        for _ in range(2):
            optimizer.zero_grad()
            out = second(F.dropout(norm(first(data.x, data.edge_index)).relu()), data.edge_index, *weights)
            F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
            optimizer.step()
            accuracy = (out.argmax(dim=-1)[data.train_mask] == data.y[data.train_mask]).float().mean()
    assert 0 <= float(accuracy) <= 1
    traffic = data.traffic
    return {
        "largest": largest.shape, "bytes": traffic.num_bytes, "rows": traffic.num_rows,
        "messages": traffic.num_messages, "plan": data.plan.to_dict(),
    }  # fmt: skip


def epoch(world_size: int, conv_name: str, exchange: Any) -> dict[str, int]:
    graph = random_graph(211, 900, num_features=6)
    # Of uneven_parts, the last of three ranks has no node: a third of the pairs exchange. At random, all do.
    partition = uneven_parts(211, world_size) if world_size < 4 else "random"
    data = DistributedData(graph, partition=partition, exchange=exchange)
    conv = getattr(ours, conv_name)
    first, norm, second = conv(6, 8).double(), torch.nn.BatchNorm1d(8).double(), conv(8, 4).double()
    with Wire() as wire:
        out = second(F.dropout(norm(first(data.x, data.edge_index)).relu()), data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        accuracy = (out.argmax(dim=-1)[data.train_mask] == data.y[data.train_mask]).float().mean()
    assert 0 <= float(accuracy) <= 1
    assert wire.num_bytes == data.traffic.num_bytes
    assert (wire.num_collectives > 0) == data.plan.is_dense
    return {"bytes": data.traffic.num_bytes, "planned": data.plan.rows[exchange], "dense": data.plan.is_dense}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("conv_name", ["DistributedSAGEConv", "DistributedGCNConv"])
def test_no_rank_sees_all_rows(workers: Pools, world_size: int, conv_name: str) -> None:
    """All that training makes is smaller than [N, 5], the narrowest features; and what is sent is what was planned."""
    ranks = workers(world_size).run(epochs, conv_name)
    for rank in ranks:
        assert (rank["largest"].numel() >= 5 * RING) == (world_size == 1), rank["largest"]
    plan = ranks[0]["plan"]
    assert (plan["rows"]["post"] > 0) == (world_size > 1)
    assert sum(rank["bytes"] for rank in ranks) > 0 or world_size == 1


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("conv_name", ["DistributedSAGEConv", "DistributedGCNConv"])
@pytest.mark.parametrize("exchange", ["post", "pre", "hybrid"])
def test_bytes_are_as_planned_and_counted(workers: Pools, world_size: int, conv_name: str, exchange: str) -> None:
    ranks = workers(world_size).run(epoch, world_size, conv_name, exchange)
    columns = 6 + 4 + 4  # the input needs no gradient; the second layer projects first, forward and backward
    assert sum(r["bytes"] for r in ranks) == ranks[0]["planned"] * columns * 8
    assert ranks[0]["dense"] == (world_size == 4)
    assert (ranks[0]["planned"] > 0) == (world_size > 1)


def resident_bytes() -> int:
    """What this rank keeps: freed blocks, which allocators hold on to, are given back first."""
    gc.collect()
    release_free_memory()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def memory_of(path: str) -> int:
    """What this rank keeps of the graph, in bytes, when the input is gone and an epoch has run."""
    # Pages of libraries, METIS' too, are mapped when they are first used.
    warm = DistributedData(random_graph(2000, 10_000, 5, dtype=torch.float32))
    conv = DistributedSAGEConv(5, 16)
    conv(warm.x, warm.edge_index).sum().backward()
    del warm, conv
    before = resident_bytes()
    data = DistributedData(load_npz(path))
    conv = DistributedSAGEConv(data.num_features, 16)
    conv(data.x, data.edge_index).sum().backward()
    return resident_bytes() - before


@pytest.mark.slow
def test_memory_shrinks_with_ranks(workers: Pools, shared_data: Any) -> None:
    path = str(shared_data / "amazon_computers.npz")
    (alone,) = workers(1).run(memory_of, path)
    shares = workers(4).run(memory_of, path)
    assert max(shares) <= 0.45 * alone, (alone, shares)
