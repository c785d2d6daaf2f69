"""Batches of several data groups: the union of theirs, on every mesh."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from batch_cases import laid_out
from neighbor_cases import N, graph_of, loader_of, model, step, whole_of
from random_graphs import random_graph
from torch_geometric.data import Data
from workers import Pools

import pyg_dist
from pyg_dist.loader import LinkNeighborLoader, NeighborLoader

GROUPS: list[list[tuple[int, dict[str, int]]]] = [
    [(2, {"data": 2, "part": 1}), (4, {"data": 2, "x": 2})],
    [(4, {"data": 2, "part": 2}), (2, {"data": 2})],
]  # whose batches are the same


def trained_in_groups(name: str, mesh: dict[str, int], steps: int) -> list[tuple[Any, ...]]:
    """Facts of batches; their losses are those of stock PyG on the same edges, step after step."""
    graph = graph_of(name)
    data, twin = laid_out(graph, mesh), model()
    convs = pyg_dist.distribute(copy.deepcopy(twin))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (convs, twin)]
    found, loader = [], loader_of(data, name)
    assert isinstance(loader, NeighborLoader)
    for _, batch in zip(range(steps), loader, strict=False):
        n_id, e_id, edge_index = (whole_of(batch[key]) for key in ("n_id", "e_id", "edge_index"))
        assert torch.equal(n_id[edge_index], graph.edge_index[:, e_id])
        assert torch.equal(n_id[: batch.batch_size], batch.input_id)
        assert sum(batch.num_sampled_nodes) == n_id.numel() == batch.num_nodes
        plain = Data(x=graph.x[n_id], y=graph.y[n_id], edge_index=edge_index, batch_size=batch.batch_size)
        plain.edge_attr, plain.edge_weight = graph.edge_attr[e_id], graph.edge_weight[e_id]
        losses = [step(m, b) for m, b in ((convs, batch), (twin, plain))]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[0].item(), losses[1].item(), rtol=0, atol=1e-10)
        trees = whole_of(batch.batch).tolist() if "disjoint" in name else None
        found.append((n_id.tolist(), e_id.tolist(), edge_index.tolist(), batch.num_sampled_nodes, trees))
    return found


@pytest.mark.parametrize(("name", "turn"), [("directional", 0), ("induced", 1), ("disjoint", 1), ("replace", 0)])
def test_a_batch_of_data_groups_is_the_union_of_theirs(name: str, turn: int, workers: Pools) -> None:
    runs = [found for size, mesh in GROUPS[turn] for found in workers(size).run(trained_in_groups, name, mesh, 3)]
    assert all(found == runs[0] for found in runs)
    for n_id, _, edge_index, counts, _ in runs[0]:
        edges = torch.tensor(edge_index).view(2, -1)
        group = torch.zeros(len(n_id), dtype=torch.int64)  # by which seeds a node is reached
        group[-(-counts[0] // 2) : counts[0]] = 1
        for _ in range(4):
            group.scatter_reduce_(0, edges[0], group[edges[1]], "amax")
        assert torch.equal(group[edges[0]], group[edges[1]])
        assert int(group[: counts[0]].sum()) == counts[0] // 2
        if name != "disjoint" and counts[0] > 1:
            repeated = Counter(zip(n_id, group.tolist(), strict=True))
            assert max(repeated.values()) == 1


def link_facts(mesh: dict[str, int], negatives: Any) -> list[Any]:
    graph = random_graph(N, 150)
    found = []
    loader = LinkNeighborLoader(laid_out(graph, mesh), [3, 2], batch_size=20, shuffle=True, neg_sampling=negatives)
    for batch in loader:
        n_id, edges = whole_of(batch.n_id), graph.edge_index[:, batch.input_id]
        if negatives == "binary":
            assert torch.equal(n_id[batch.edge_label_index][:, batch.edge_label == 1], edges)
            ends = [batch.edge_label_index]
        else:
            assert torch.equal(n_id[torch.stack([batch.src_index, batch.dst_pos_index])], edges)
            ends = [batch.src_index, batch.dst_pos_index, batch.dst_neg_index]
        found.append((n_id.tolist(), [end.tolist() for end in ends]))
    return found


@pytest.mark.parametrize(("negatives", "turn"), [("binary", 0), ("triplet", 1)])
def test_links_of_data_groups(negatives: str, turn: int, workers: Pools) -> None:
    runs = [found for size, mesh in GROUPS[turn] for found in workers(size).run(link_facts, mesh, negatives)]
    assert all(found == runs[0] for found in runs)
    assert len(runs[0]) == 4
