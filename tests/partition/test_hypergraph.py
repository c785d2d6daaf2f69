"""Nets, weights, and that the connectivity is the number of rows that an aggregation, or a choice by edge, sends."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_graphs import random_graph

from pyg_dist.halo.plan.plan import Plan
from pyg_dist.partition.hypergraph import HypergraphModel, build_cover_model, build_hypergraph_model, choice_by_degree


def nets_of(model: HypergraphModel) -> list[list[int]]:
    return [model.pin[a:b].tolist() for a, b in zip(model.start[:-1], model.start[1:], strict=True)]


def connectivity(model: HypergraphModel, parts: list[int]) -> int:
    """The sum over nets of their parts less one."""
    return sum(len({parts[node] for node in net}) - 1 for net in nets_of(model))


def test_by_hand() -> None:
    """Loops, a duplicate edge, a node without neighbours, and one that only receives."""
    edge_index = torch.tensor([[0, 0, 0, 1, 2, 2], [1, 1, 3, 0, 2, 0]])
    model = build_hypergraph_model(edge_index, 5, torch.tensor([False, True, False, False, False]))
    assert nets_of(model) == [[0, 1, 3], [0, 1], [0, 2]]
    assert model.weight.tolist() == [3, 4, 2, 2, 1]
    assert connectivity(model, [0, 0, 0, 0, 0]) == 0
    assert connectivity(model, [0, 1, 1, 2, 0]) == 4


@settings(max_examples=40, deadline=None)
@given(
    num_nodes=st.integers(1, 30), num_edges=st.integers(0, 150), num_parts=st.integers(1, 7), seed=st.integers(0, 2**31)
)
def test_connectivity_is_what_the_plan_sends(num_nodes: int, num_edges: int, num_parts: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    parts = torch.randint(num_parts, (num_nodes,), generator=generator)
    model = build_hypergraph_model(edge_index, num_nodes)
    assert connectivity(model, parts.tolist()) == Plan.of(edge_index, parts, num_parts, "post").rows["post"]


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
