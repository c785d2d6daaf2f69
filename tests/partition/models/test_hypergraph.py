"""Nets, weights, and that the connectivity is the number of rows that an aggregation sends."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_dist.halo.plan.plan import Plan
from pyg_dist.partition.hypergraph import HypergraphModel, build_hypergraph_model


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
