"""Each kind of nodes is spread evenly, and neighbours stay together where they can; graphs stay whole."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pyg_dist.partition.balance import balanced_by_kind, whole_graphs
from pyg_dist.partition.stream import chunks_of


def loads(edge_index: torch.Tensor, parts: torch.Tensor, sizes: list[int], num_parts: int) -> list[np.ndarray]:
    """In-edges by part of each kind, then nodes."""
    in_degree = np.bincount(edge_index[1].numpy(), minlength=sum(sizes))
    return [
        np.bincount(owner.numpy(), piece, minlength=num_parts)
        for weight in (in_degree, np.ones(sum(sizes)))
        for owner, piece in zip(parts.split(sizes), np.split(weight, np.cumsum(sizes)[:-1]), strict=True)
    ]


@example([19], 4, 76)  # 4.75 nodes a part: no part may have as few as 4.99
@settings(deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 99))
def test_each_kind(sizes: list[int], num_parts: int, seed: int) -> None:
    rng, size = torch.Generator().manual_seed(seed), sum(sizes)
    edge_index = torch.randint(0, max(size, 1), (2, 3 * size), generator=rng)
    before = torch.randint(0, num_parts, (size,), generator=rng) ** 2 % num_parts
    after = balanced_by_kind(chunks_of(edge_index, 16), before, sizes, num_parts, 0.05)
    assert after.dtype == torch.int32
    assert after.shape == (size,)
    heaviest = np.bincount(edge_index[1].numpy(), minlength=size).max(initial=1)
    for load in loads(edge_index, after, sizes, num_parts):
        assert load.max() <= 1.05 * load.mean() + heaviest
    assert torch.equal(after, balanced_by_kind(chunks_of(edge_index), before, sizes, num_parts, 0.05))


@pytest.mark.parametrize("num_parts", [2, 4])
def test_balanced_parts_stay(num_parts: int) -> None:
    """Also where the kinds are in other numbers, and a cluster of nodes is on each part."""
    part, few, many = torch.arange(num_parts), 5 * num_parts, 15 * num_parts
    parts = torch.cat([part.repeat_interleave(5), part.repeat_interleave(15)])
    edge_index = torch.stack([torch.arange(few).repeat_interleave(3), few + torch.arange(many)])
    assert torch.equal(balanced_by_kind(chunks_of(edge_index), parts, [few, many], num_parts, 0.03), parts.int())


def test_few_neighbours_are_lost() -> None:
    """All of a kind lies on part 0; those whose neighbours are on part 1 go there."""
    parts = torch.tensor([0, 0, 1, 1, 0, 0, 0, 0])
    edge_index = torch.tensor([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert balanced_by_kind(chunks_of(edge_index), parts, [4, 4], 2, 0.03).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]


def test_graphs_stay_whole_and_parts_are_balanced() -> None:
    generator = torch.Generator().manual_seed(0)
    graph = torch.randint(0, 1000, (20000,), generator=generator).sort().values
    node = torch.randint(0, 20000, (60000,), generator=generator)
    node = node[graph[node] == graph[(node + 1) % 20000]]
    found = whole_graphs(torch.stack([node, node + 1]), graph, 64)
    assert found is not None
    parts, heaviest = found
    assert parts.dtype == torch.int32
    for number in range(0, 1000, 37):
        assert parts[graph == number].unique().numel() <= 1
    weight = torch.bincount(parts, minlength=64) + torch.bincount(parts[node + 1], minlength=64)
    assert weight.max() * 64 == round(heaviest * weight.sum().item())
    assert heaviest < 1.02


def test_what_is_no_batch() -> None:
    edge = torch.tensor([[0, 1], [1, 2]])
    assert whole_graphs(edge, torch.tensor([0, 0, 1]), 2) is None  # an edge between two
    assert whole_graphs(edge[:, :0], torch.tensor([], dtype=torch.int64), 2) is None
    found = whole_graphs(edge[:, :0], torch.tensor([5, 0]), 3)  # fewer graphs than parts
    assert found is not None
    assert sorted(found[0].tolist()) == [0, 1]
