"""The stochastic model: nets of the batches that were drawn, counted, and as many as the bound asks for."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from random_graphs import random_graph

from pyg_dist.errors import DataError, OptionError
from pyg_dist.partition import Batches, partition
from pyg_dist.partition.hypergraph import build_hypergraph_model, build_stochastic_model, uniform_batch


def nets(model: Any) -> Counter[tuple[int, ...]]:
    return Counter(
        {
            tuple(model.pin[low:high].tolist()): int(count)
            for low, high, count in zip(model.start[:-1], model.start[1:], model.net_weight, strict=True)
        }
    )


def test_nets_are_those_of_the_batches() -> None:
    """Beside a loop over batches and nodes; node 29 is never drawn and keeps its whole net."""
    graph = random_graph(30, 120, seed=3)
    edges = set(map(tuple, graph.edge_index.T.tolist()))
    batches = Batches(draw=lambda seed, step: torch.from_numpy(uniform_batch(seed, step, 29, 9)), theta=2.0)
    model = build_stochastic_model(graph.edge_index, 30, 3, batches, seed=5)
    expected: Counter[tuple[int, ...]] = Counter()
    drawn, seen, step = 0, 0, 0
    degree = np.bincount(graph.edge_index[0].numpy(), minlength=30)
    while drawn < 8 * 30 or (drawn < 250 * 30 and seen < 20 * np.minimum(degree, 30 / 9).sum()):
        batch = sorted(uniform_batch(5, step, 29, 9).tolist())
        for source in batch:
            net = sorted({source} | {target for target in batch if (source, target) in edges})
            if len(net) > 1:
                expected[tuple(net)] += 1
                seen += len(net) - 1
        drawn, step = drawn + len(batch), step + 1
    lonely = sorted({29} | {target for source, target in edges if source == 29})
    if len(lonely) > 1:
        expected[tuple(lonely)] += 1
    assert nets(model) == expected
    assert np.array_equal(model.weight, build_hypergraph_model(graph.edge_index, 30).weight)


def test_as_many_nets_as_hoeffding_asks_for() -> None:
    """Eq. 14: (p - 1)^2 / (2 theta^2) ln(2 / delta)."""
    assert Batches(theta=0.1, delta=0.5).num_nets(8) == math.ceil(49 / 0.02 * math.log(4))
    steps = []
    batches = Batches(draw=lambda seed, step: steps.append(step) or np.arange(10), theta=0.1, delta=0.5)
    build_stochastic_model(random_graph(20, 60, seed=0).edge_index, 20, 8, batches)
    assert len(steps) == math.ceil(batches.num_nets(8) / 10)


def test_whole_batches_are_the_plain_model() -> None:
    graph = random_graph(40, 200, seed=1)
    model = build_stochastic_model(graph.edge_index, 40, 4, Batches(size=40, theta=10.0))
    plain = build_hypergraph_model(graph.edge_index, 40)
    assert nets(model) == Counter({net: 8 * count for net, count in Counter(
        tuple(plain.pin[a:b].tolist()) for a, b in zip(plain.start[:-1], plain.start[1:], strict=True)
    ).items()})  # fmt: skip
    parts = np.arange(40) % 4
    assert model.connectivity(parts) == 8 * plain.connectivity(parts) > 0


@pytest.mark.parametrize(
    ("values", "words"), [({"size": 0}, "one node or more"), ({"theta": 0.0}, "theta"), ({"delta": 1.0}, "delta")]
)
def test_wrong_batches(values: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Batches(**values)


@pytest.mark.parametrize("drawn", [np.array([0.5]), np.array([4]), np.array([[0]]), np.empty(0, dtype=int)])
def test_wrong_draws(drawn: Any) -> None:
    with pytest.raises(DataError, match="nodes"):
        partition(torch.tensor([[0, 1], [1, 2]]), 4, 2, "stochastic", batches=Batches(draw=lambda seed, step: drawn))
