"""The ranks that benchmarks/accuracy.py emulates in one process."""

from __future__ import annotations

import torch
from emulated import EmulatedMean

from pyg_dist.backend.comm.quantized import quantized
from pyg_dist.halo.aggregate import aggregate


def test_means_of_emulated_ranks() -> None:
    torch.manual_seed(0)
    edge_index, parts = torch.randint(0, 60, (2, 400)), torch.randint(0, 5, (60,))
    mean, x = EmulatedMean.of(edge_index, parts, 5), torch.randn(60, 24)
    adjacency = torch.zeros(60, 60).index_put_((edge_index[1], edge_index[0]), torch.ones(400), accumulate=True)
    expected = adjacency @ x / adjacency.sum(1, keepdim=True).clamp(min=1)
    torch.testing.assert_close(aggregate(x, mean.operator), expected)
    coarse = aggregate(x, mean.operator.coded(quantized((2, 2), mean.keys, 1, lambda: "a layer")))
    error = (coarse - expected).abs()
    assert 0.01 < error.max() < (x.max() - x.min()), "two bits leave an error, of at most a row's range"


def test_means_of_some_rows() -> None:
    torch.manual_seed(1)
    edge_index, parts, x = torch.randint(0, 60, (2, 200)), torch.randint(0, 5, (60,)), torch.randn(60, 24)
    mean, rows = EmulatedMean.of(edge_index, parts, 5), torch.tensor([3, 10, 11, 40])
    some, inputs = mean.for_rows(rows)
    assert inputs.numel() < 40
    twice, first_inputs = some.for_rows(torch.tensor([2]))
    for bits in (None, 2):
        outputs = []
        for means, given in ((mean, x), (some, x[inputs]), (twice, x[inputs][first_inputs])):
            operator = means.operator
            if bits is not None:
                operator = operator.coded(quantized((bits, bits), means.keys, 1, lambda: "a layer"))
            given = given.clone().requires_grad_()
            out = aggregate(given, operator)
            chosen = out[rows] if out.shape[0] == 60 else out
            outputs.append(chosen.detach())
            if means is not twice:
                chosen.cos().sum().backward()
                outputs.append(given.grad if means is some else given.grad[inputs])
        torch.testing.assert_close(outputs[2:4], outputs[:2], rtol=0, atol=0)
        torch.testing.assert_close(outputs[4], outputs[0][2:3], rtol=0, atol=0)
