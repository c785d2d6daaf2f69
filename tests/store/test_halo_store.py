"""A halo store opened by ranks equals ``DistributedData`` of the whole graph with the same parts, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_all_same_bits
from stored_graphs import differences, planned_together, same, skewed_graph, write
from torch import Tensor, nn
from torch_geometric.data import Data
from workers import Pools

import pyg_dist
from pyg_dist import DistributedData, EdgeTensor, NodeTensor, world_size
from pyg_dist.cli.stored_plan import plan_of_store
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
from pyg_dist.data.stored_graph import StoreOnRanks, rank_of_part
from pyg_dist.errors import AgreementError, StoreError
from pyg_dist.halo.plan.share import halo_share
from pyg_dist.halo.plan.two_level import Task, exchanged
from pyg_dist.loader import UniformVertexLoader
from pyg_dist.store.halo_reader import HaloStore
from pyg_dist.store.manifest import Manifest

NUM_STEPS = 5


def uneven(num_nodes: int, num_parts: int, seed: int = 1) -> Tensor:
    """Random parts of different sizes, every one with a node."""
    weight = torch.arange(1, num_parts + 1).float()
    parts = torch.multinomial(weight, num_nodes, replacement=True, generator=torch.Generator().manual_seed(seed))
    parts[:num_parts] = torch.arange(num_parts)
    return parts


def opened_as_made(path: str, parts: Tensor, exchange: str) -> None:
    made = DistributedData(skewed_graph(), partition=parts, exchange=exchange)
    opened = DistributedData.open(path, exchange=exchange)
    assert differences(made.graph.share, opened.graph.share) == []
    assert made.plan == opened.plan
    assert made.plan.to_dict() == opened.plan.to_dict()
    assert set(made.keys()) == set(opened.keys())
    for key in made.keys():  # noqa: SIM118
        if key == "edge_index":
            continue
        assert type(made[key]) is type(opened[key]), key
        if isinstance(made[key], (NodeTensor, EdgeTensor)):
            assert same(made[key].to_local(), opened[key].to_local()), key
        else:
            assert same(made[key], opened[key]), key
    assert torch.equal(made.edge_index.full_tensor(), opened.edge_index.full_tensor())


@pytest.mark.parametrize("exchange", ["hybrid", "post", "pre"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_equal_to_the_whole_graph(workers: Pools, tmp_path: Path, world_size: int, exchange: str) -> None:
    parts = uneven(200, world_size)
    path = write(skewed_graph(), tmp_path, parts, world_size)
    workers(world_size).run(opened_as_made, str(path), parts, exchange)


def merged_share(path: str) -> None:
    opened = DistributedData.open(path)
    store = HaloStore(Path(path), Manifest.load(Path(path)))
    ranks = rank_of_part(store.path, [store], world_size())
    assert torch.bincount(ranks).max() - torch.bincount(ranks).min() <= 1
    made = DistributedData(skewed_graph(), partition=ranks[uneven(200, 16)])
    assert differences(made.graph.share, opened.graph.share) == []
    assert made.plan.sizes == opened.plan.sizes
    assert opened.plan == plan_of_store(Path(path), world_size(), "hybrid")
    assert same(made.x.to_local(), opened.x.to_local()), pyg_dist.rank()
    assert same(made.edge_attr.to_local(), opened.edge_attr.to_local()), pyg_dist.rank()
    for conv in ("gcn", "sage"):
        one, other = training(made, conv), training(opened, conv)
        assert_all_same_bits(one, other)


@pytest.mark.parametrize("world_size", [1, 3])
def test_merged_parts(workers: Pools, tmp_path: Path, world_size: int) -> None:
    path = write(skewed_graph(), tmp_path, uneven(200, 16), 16)
    workers(world_size).run(merged_share, str(path))


def test_merged_parts_have_another_cover(tmp_path: Path) -> None:
    """Of two minimum covers, that of the rank with fewer in-edges: a part that brings edges turns the choice."""
    link = torch.tensor([[0, 0, 1, 1], [2, 3, 2, 3]])
    edge_index = torch.cat([link, torch.tensor([[4], [5]]).expand(2, 9)], dim=1)
    parts, ranks = torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([0, 1, 0])
    path = write(Data(x=torch.ones(6, 1), edge_index=edge_index, num_nodes=6), tmp_path, parts, 3)
    store = HaloStore(path, Manifest.load(path))
    for rank, num_lent in enumerate((0, 4)):
        assert (
            StoreOnRanks(store, torch.arange(3), "hybrid").share(rank).sum_transfer.weights_to_send.numel() == num_lent
        )
        opened = StoreOnRanks(store, ranks, "hybrid").share(rank)
        assert opened.sum_transfer.weights_to_send.numel() == 0
        assert differences(halo_share(edge_index, ranks[parts], rank, 2), opened) == []


@pytest.mark.parametrize("exchange", ["hybrid", *(pytest.param(e, marks=pytest.mark.slow) for e in ("post", "pre"))])
@pytest.mark.parametrize(("merged", "on_each"), [(1, 4), (2, 2), (3, 2)])
def test_two_levels(tmp_path: Path, merged: int, on_each: int, exchange: Any) -> None:
    """The lists of each rank, also of merged parts, are those of the whole graph, planned alone and together."""
    graph, parts = skewed_graph(), uneven(200, 8)
    path = write(graph, tmp_path, parts, 8)
    store, ranks = HaloStore(path, Manifest.load(path)), torch.arange(8) // merged
    num_ranks = int(ranks.max()) + 1
    shared = planned_together(
        num_ranks,
        lambda rank, send: exchanged(
            StoreOnRanks(store, ranks, exchange).ways(Task.shared(rank, num_ranks, on_each)), num_ranks, on_each, send
        ),
    )
    for rank in range(num_ranks):
        made = halo_share(graph.edge_index, ranks[parts], rank, num_ranks, exchange, ranks_per_machine=on_each)
        assert made.row_transfer.relay is not None
        for ways in (StoreOnRanks(store, ranks, exchange).ways(Task.alone(rank, num_ranks, on_each)), shared[rank]):
            assert differences(made, StoreOnRanks(store, ranks, exchange).share(rank, ways)) == []


def training(data: Any, conv: str) -> list[Tensor]:
    """Losses of some steps and what they end with."""
    torch.manual_seed(0)
    kind = {"gcn": DistributedGCNConv, "sage": DistributedSAGEConv}[conv]
    model = nn.ModuleList([kind(7, 8), kind(8, 4)])
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        hidden = F.dropout(model[0](data.x, data.edge_index).relu(), 0.5)
        out = model[1](hidden, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [torch.stack(losses), *(p.detach() for p in model.parameters())]


def trained_alike(path: str, parts: Tensor, conv: str) -> list[Tensor]:
    made = training(DistributedData(skewed_graph(), partition=parts), conv)
    opened = training(DistributedData.open(path), conv)
    assert_all_same_bits(made, opened)
    assert len(set(made[0].tolist())) == NUM_STEPS
    return opened


@pytest.mark.parametrize("conv", ["gcn", "sage"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_training_to_the_bit(workers: Pools, tmp_path: Path, world_size: int, conv: str) -> None:
    parts = uneven(200, world_size)
    path = write(skewed_graph(), tmp_path, parts, world_size)
    workers(world_size).run(trained_alike, str(path), parts, conv)


def in_data_groups(path: str, parts: Tensor) -> None:
    """Each group has a part on each of its ranks, and a batch is the union of the groups' samples."""
    mesh = {"data": 2, "part": 2}
    made = DistributedData(skewed_graph(), partition=parts, mesh=mesh)
    opened = DistributedData.open(path, mesh=mesh)
    assert differences(made.graph.share, opened.graph.share) == []
    assert opened.graph.data_group == made.graph.data_group
    for one, other in zip(UniformVertexLoader(made, 40), UniformVertexLoader(opened, 40), strict=True):
        assert one.num_nodes == other.num_nodes == 80
        assert same(one.x.to_local(), other.x.to_local())
        assert torch.equal(one.edge_index.full_tensor(), other.edge_index.full_tensor())


def test_data_groups(workers: Pools, tmp_path: Path) -> None:
    parts = uneven(200, 2)
    workers(4).run(in_data_groups, str(write(skewed_graph(), tmp_path, parts, 2)), parts)


def too_many_ranks(path: str) -> str:
    with pytest.raises(StoreError) as caught:
        DistributedData.open(path)
    return str(caught.value)


def test_more_ranks_than_parts(workers: Pools, tmp_path: Path) -> None:
    path = write(skewed_graph(), tmp_path, uneven(200, 2), 2)
    for message in workers(3).run(too_many_ranks, str(path)):
        assert "--parts 3 --force" in message
        assert "\n" not in message


def different_stores(first: str, second: str) -> str:
    with pytest.raises(AgreementError) as caught:
        DistributedData.open(first if pyg_dist.rank() == 0 else second)
    return str(caught.value)


def test_ranks_that_see_different_stores(workers: Pools, tmp_path: Path) -> None:
    paths = [str(write(skewed_graph(seed=seed), tmp_path / str(seed), uneven(200, 2), 2)) for seed in (0, 1)]
    (tmp_path / "typed").mkdir()
    (tmp_path / "typed" / "types.json").write_text("{}")
    for other, words in ((paths[1], "the store's manifest"), (str(tmp_path / "typed"), "several types in the store")):
        for message in workers(2).run(different_stores, paths[0], other):
            assert words in message


def test_memory_is_what_splits_the_work_not_what_comes_out(tmp_path: Path) -> None:
    data, parts = skewed_graph(3000, 60_000), uneven(3000, 3)
    large = Manifest.load(write(data, tmp_path / "large", parts, 3))
    small = Manifest.load(write(data, tmp_path / "small", parts, 3, memory=9 << 20))
    assert large.shards == small.shards
