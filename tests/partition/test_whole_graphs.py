"""Whole graphs by part: balance, and what is no batch."""

from __future__ import annotations

import torch

from pyg_dist.partition.whole_graphs import whole_graphs


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
