"""The ranks that benchmarks/accuracy.py emulates in one process."""

from __future__ import annotations

import torch
from emulated import EmulatedMean

from pyg_dist.backend.aggregate import aggregate
from pyg_dist.backend.quantized import quantized


def test_means_of_emulated_ranks() -> None:
    torch.manual_seed(0)
    edge_index, parts = torch.randint(0, 60, (2, 400)), torch.randint(0, 5, (60,))
    mean, x = EmulatedMean(edge_index, parts, 5), torch.randn(60, 24)
    adjacency = torch.zeros(60, 60).index_put_((edge_index[1], edge_index[0]), torch.ones(400), accumulate=True)
    expected = adjacency @ x / adjacency.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(aggregate(x, mean.operator), expected)
    coarse = aggregate(x, mean.operator.coded(quantized((2, 2), mean.keys, 1, lambda: "a layer")))
    error = (coarse - expected).abs()
    assert 0.01 < error.max() < (x.max() - x.min()), "two bits leave an error, of at most a row's range"
