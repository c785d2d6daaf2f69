"""The model that METIS sees, against a dense matrix."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_dist.partition.metis import build_graph_model


@settings(max_examples=30, deadline=None)
@given(num_nodes=st.integers(1, 12), num_edges=st.integers(0, 600), seed=st.integers(0, 2**31))
def test_symmetric_without_loops_and_duplicates(num_nodes: int, num_edges: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    dense = torch.zeros(num_nodes, num_nodes, dtype=torch.bool)
    dense[edge_index[0], edge_index[1]] = True
    dense = (dense | dense.T).fill_diagonal_(False)
    graph = build_graph_model(edge_index, num_nodes)
    assert graph.num_nodes == num_nodes
    assert graph.start.tolist() == [0, *dense.sum(1).cumsum(0).tolist()]
    assert graph.neighbor.tolist() == dense.nonzero()[:, 1].tolist()


def test_weights_count_in_edges_nodes_and_training_nodes() -> None:
    edge_index = torch.tensor([[1, 1, 2, 3, 0, 0, 2, 3], [0, 0, 0, 0, 1, 2, 2, 2]])  # in-degrees 4, 1, 3, 0; mean 2
    train_mask = torch.tensor([True, False, False, True])
    assert build_graph_model(edge_index, 4).weight.tolist() == [6, 3, 5, 2]
    assert build_graph_model(edge_index, 4, train_mask).weight.tolist() == [8, 3, 5, 4]
    assert build_graph_model(edge_index, 4, torch.stack([train_mask, ~train_mask], 1)).weight.tolist() == [8, 5, 7, 4]


def test_isolated_nodes_still_weigh_something() -> None:
    assert build_graph_model(torch.empty(2, 0, dtype=torch.long), 3).weight.tolist() == [1, 1, 1]
