"""Draws of neighbours and of negative ends: their probabilities."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from random_graphs import random_graph
from scipy.special import chdtrc
from torch_geometric.data import Data

from pyg_dist.loader import LinkNeighborLoader, NeighborLoader

LIKELY = 1e-6


def star(degree: int, num_stars: int = 1) -> Data:
    """Stars whose centres, the first nodes, have ``degree`` in-edges each."""
    target = torch.arange(num_stars).repeat_interleave(degree)
    source = torch.arange(degree).repeat(num_stars) + num_stars
    weight = torch.arange(1, degree + 1, dtype=torch.float64).repeat(num_stars)
    return Data(edge_index=torch.stack([source, target]), weight=weight, num_nodes=num_stars + degree)


def drawn_sets(graph: Data, num_epochs: int, **options: Any) -> Counter[tuple[int, ...]]:
    """How often each set of sources was drawn for a centre."""
    centres = graph.num_nodes - int(graph.edge_index[0].max()) + int(graph.edge_index[0].min()) - 1
    found: Counter[tuple[int, ...]] = Counter()
    loader = NeighborLoader(graph, input_nodes=torch.arange(centres), batch_size=centres, prefetch=False, **options)
    for _ in range(num_epochs):
        for batch in loader:
            source, target = batch.n_id[batch.edge_index]
            for centre in range(centres):
                found[tuple(sorted((source[target == centre] - centres).tolist()))] += 1
    return found


def chi_square(found: Counter[Any], expected: dict[Any, float]) -> float:
    """The probability of counts as far from what is expected, or farther."""
    total = sum(found.values())
    assert set(found) <= set(expected)
    assert math.isclose(sum(expected.values()), 1)
    statistic = sum((found[key] - total * p) ** 2 / (total * p) for key, p in expected.items())
    return float(chdtrc(len(expected) - 1, statistic))


@pytest.mark.parametrize(("degree", "count"), [(5, 2), (6, 3), (40, 1)])
def test_all_sets_of_in_edges_are_equally_probable(degree: int, count: int) -> None:
    """Hence each edge, and each pair of them."""
    sets = list(itertools.combinations(range(degree), count))
    found = drawn_sets(star(degree, 50), 60, num_neighbors=[count])
    assert chi_square(found, dict.fromkeys(sets, 1 / len(sets))) > LIKELY


def test_draws_with_replacement_are_independent() -> None:
    pairs = {
        pair: 1 / 9 if pair[0] == pair[1] else 2 / 9 for pair in itertools.combinations_with_replacement(range(3), 2)
    }
    assert chi_square(drawn_sets(star(3, 50), 60, num_neighbors=[2], replace=True), pairs) > LIKELY


def weighted_sets(weight: list[float], count: int) -> dict[tuple[int, ...], float]:
    """The probability of each set: one after another, each in proportion to its weight among those that are left."""
    found: dict[tuple[int, ...], float] = {}
    for order in itertools.permutations(range(len(weight)), count):
        p, left = 1.0, sum(weight)
        for k in order:
            p, left = p * weight[k] / left, left - weight[k]
        if p > 0:
            key = tuple(sorted(order))
            found[key] = found.get(key, 0) + p
    return found


@pytest.mark.parametrize("count", [1, 2, 3])
def test_weighted_sets_have_their_probabilities(count: int) -> None:
    found = drawn_sets(star(4, 50), 60, num_neighbors=[count], weight_attr="weight")
    assert chi_square(found, weighted_sets([1, 2, 3, 4], count)) > LIKELY


def test_weighted_draws_with_replacement() -> None:
    p = [k / 6 for k in (1, 2, 3)]
    pairs = {
        (a, b): p[a] * p[b] * (1 if a == b else 2) for a, b in itertools.combinations_with_replacement(range(3), 2)
    }
    found = drawn_sets(star(3, 50), 60, num_neighbors=[2], weight_attr="weight", replace=True)
    assert chi_square(found, pairs) > LIKELY


def test_edges_of_weight_zero_are_not_drawn() -> None:
    graph = star(4, 3)
    graph.weight[0::2] = 0
    assert set(drawn_sets(graph, 20, num_neighbors=[1], weight_attr="weight")) == {(1,), (3,)}
    assert set(drawn_sets(graph, 5, num_neighbors=[3], weight_attr="weight")) == {(1, 3)}
    assert set(drawn_sets(graph, 5, num_neighbors=[-1], weight_attr="weight")) == {(0, 1, 2, 3)}


@pytest.mark.slow
def test_draws_of_nodes_and_hops_and_steps_are_independent() -> None:
    """Of two centres in one batch, of one centre in two trees, and of two steps."""
    graph = star(4, 2)
    nodes: Counter[Any] = Counter()
    steps: Counter[Any] = Counter()
    before = None
    loader = NeighborLoader(graph, [1], input_nodes=torch.tensor([0, 1]), batch_size=2, prefetch=False)
    for _ in range(4000):
        (batch,) = loader
        source, target = batch.n_id[batch.edge_index]
        pair = tuple((source[target == k].item() - 2) for k in (0, 1))
        nodes[pair] += 1
        if before is not None:
            steps[before, pair[0]] += 1
        before = pair[0]
    sixteen = dict.fromkeys(itertools.product(range(4), repeat=2), 1 / 16)
    assert chi_square(nodes, sixteen) > LIKELY
    assert chi_square(steps, sixteen) > LIKELY


def test_negative_ends_have_their_probabilities() -> None:
    from torch_geometric.sampler import NegativeSampling

    graph = random_graph(5, 20)
    weight = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    for mode in ("binary", "triplet"):
        sampling = NegativeSampling(mode, 2, dst_weight=weight, src_weight=weight.flip(0) if mode == "binary" else None)
        ends: list[Counter[int]] = [Counter(), Counter()]
        loader = LinkNeighborLoader(graph, [1], batch_size=20, neg_sampling=sampling, prefetch=False)
        for _ in range(200):
            for batch in loader:
                if mode == "binary":
                    pairs = batch.n_id[batch.edge_label_index[:, 20:]]
                    ends[0].update(pairs[0].tolist())
                    ends[1].update(pairs[1].tolist())
                else:
                    ends[1].update(batch.n_id[batch.dst_neg_index].view(-1).tolist())
        assert chi_square(ends[1], {k: k / 10 for k in range(1, 5)}) > LIKELY
        if mode == "binary":
            assert chi_square(ends[0], {k: (4 - k) / 10 for k in range(4)}) > LIKELY
