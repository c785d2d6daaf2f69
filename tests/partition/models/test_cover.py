"""The medium-grain model: its connectivity is what an exchange with its choice sends."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph

from pyg_dist.halo.plan.plan import Plan
from pyg_dist.partition.hypergraph import build_cover_model, build_hypergraph_model, choice_by_degree


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 40), st.integers(0, 150), st.integers(2, 6), st.integers(0, 10**6))
def test_connectivity_is_what_the_choice_sends(num_nodes: int, num_edges: int, num_parts: int, seed: int) -> None:
    edge_index = random_graph(num_nodes, num_edges, seed=seed).edge_index
    rng = torch.Generator().manual_seed(seed)
    parts = torch.randint(0, num_parts, (num_nodes,), generator=rng)
    is_post = torch.rand(edge_index.shape[1], generator=rng) < 0.5
    model = build_cover_model(edge_index, num_nodes, is_post.numpy())
    rows, sums = set(), set()
    for (source, target), post in zip(edge_index.T.tolist(), is_post.tolist(), strict=True):
        p, q = int(parts[source]), int(parts[target])
        if p != q and post:
            rows.add((source, q))
        elif p != q:
            sums.add((target, p))
    assert model.connectivity(parts.numpy()) == len(rows) + len(sums)
    plan = Plan.of(edge_index, parts, num_parts)
    assert model.connectivity(parts.numpy()) >= plan.rows["hybrid"]
    assert build_hypergraph_model(edge_index, num_nodes).connectivity(parts.numpy()) == plan.rows["post"]


def test_work_follows_the_choice() -> None:
    """Three edges into node 0; post: its own work, pre: that of the sources."""
    edge_index = torch.tensor([[1, 2, 3], [0, 0, 0]])
    post, pre = (build_cover_model(edge_index, 4, torch.full((3,), is_post).numpy()) for is_post in (True, False))
    assert post.weight.tolist() == [4, 1, 1, 1]
    assert pre.weight.tolist() == [1, 2, 2, 2]
    assert not choice_by_degree(edge_index, 4).any()  # node 0 has three in-edges, each source one out-edge
    assert choice_by_degree(edge_index.flip(0), 4).all()
