"""``isinstance(edge_index, Tensor)`` in a script, and in PyG's functions of edges, is true."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.utils as pyg
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.typing import SparseTensor
from workers import on_ranks

import pyg_dist


class Looped(nn.Module):
    """Self loops as a module of a script's own adds them."""

    def forward(self, x: Tensor, edge_index: Any) -> Any:
        if isinstance(edge_index, (Tensor, list)):
            edge_index, _ = pyg.add_self_loops(edge_index, num_nodes=x.size(0))
        return edge_index


class LoopedUnlessSparse(nn.Module):
    def forward(self, x: Tensor, edge_index: Any) -> Any:
        if not isinstance(edge_index, SparseTensor):
            edge_index, _ = pyg.add_self_loops(edge_index, num_nodes=x.size(0))
        return edge_index


def over_lines(edge_index: Any) -> bool:
    return isinstance(edge_index, torch.Tensor)


# Each of them asks in a line of PyG's own whether the edges are a tensor.
OF_PYG: list[Callable[[Any, Any], Any]] = [
    lambda edges, weight: pyg.coalesce(edges),
    lambda edges, weight: pyg.coalesce(edges, weight, reduce="mean")[1],
    lambda edges, weight: pyg.sort_edge_index(edges, sort_by_row=False),
    lambda edges, weight: torch.tensor(pyg.is_undirected(edges)),
    lambda edges, weight: torch.tensor(pyg.assortativity(edges)),
    lambda edges, weight: pyg.to_torch_csr_tensor(edges, weight, size=20).to_dense(),
    lambda edges, weight: pyg.to_torch_csc_tensor(edges, size=20).to_dense(),
    lambda edges, weight: pyg.to_torch_coo_tensor(edges, size=20) @ torch.eye(20),
]

ASKING: list[Callable[[Any], object]] = [
    lambda data: torch.is_tensor(data.edge_index),
    lambda data: isinstance(data.edge_index, torch.Tensor) and data.edge_index.size(0) == 2,
    lambda data: over_lines(data.edge_index),
    lambda data: asked_for_two(data.edge_index, torch.ones(60)),
]


def asked_for_two(edge_index: Any, edge_weight: Any) -> bool:
    return isinstance(edge_weight, SparseTensor) or (isinstance(edge_index, Tensor) and edge_weight is not None)


def used_where_asked(edge_index: Any) -> Any:
    return edge_index.unique() if isinstance(edge_index, Tensor) else None


@pytest.mark.parametrize("partition", ["metis", "random"])
@on_ranks(3)
def test_edges_are_a_tensor(partition: str) -> None:
    graph = random_graph(20, 60)
    data = pyg_dist.DistributedData(graph, partition=partition)
    assert [ask(data) for ask in ASKING] == [True] * len(ASKING)
    assert torch.equal(used_where_asked(data.edge_index), graph.edge_index.unique())
    assert torch.equal(torch.tensor(data.edge_index), graph.edge_index)
    with pytest.raises(TypeError, match="only integer tensors of a single element"):
        torch.LongTensor([data.edge_index])
    for module in (Looped(), LoopedUnlessSparse()):
        looped = module(data.x, data.edge_index)
        assert torch.equal(looped, pyg.add_self_loops(graph.edge_index, num_nodes=20)[0])
    handle = data.edge_index
    assert isinstance(handle, pyg_dist.DistributedEdgeIndex)
    assert not isinstance(handle, SparseTensor)
    assert copy.deepcopy(handle) is handle
    for function in OF_PYG:
        ours = function(handle, data.edge_weight)
        ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(ours, function(graph.edge_index, graph.edge_weight))


@pytest.mark.parametrize("layout", ["halo", "grid"])
@pytest.mark.parametrize("last_has_edges", [True, False])
@on_ranks(3)
def test_the_number_of_nodes_is_the_largest_that_edges_name(last_has_edges: bool, layout: str) -> None:
    graph = random_graph(20, 60)
    graph.edge_index = graph.edge_index % (20 if last_has_edges else 17)
    data = pyg_dist.DistributedData(graph, layout=layout)
    handle = data.edge_index
    assert np.array_equal(np.asarray(handle), graph.edge_index)
    for turned in (handle.t(), handle.T, handle.transpose(0, 1)):
        assert torch.equal(turned, graph.edge_index.t())
    ours, stock = (pyg.to_networkx(g, node_attrs=["y"], edge_attrs=["edge_weight"]) for g in (data, graph))
    assert dict(ours.nodes(data=True)) == dict(stock.nodes(data=True))
    assert [*ours.edges(data=True)] == [*stock.edges(data=True)]
    matrices = [pyg.to_scipy_sparse_matrix(edges) for edges in (handle, graph.edge_index)]
    assert np.array_equal(*(matrix.toarray() for matrix in matrices))
    for looped in (pyg.add_self_loops, pyg.add_remaining_self_loops):
        assert torch.equal(looped(handle)[0], looped(graph.edge_index)[0])
    weight = gcn_norm(handle)[1]
    torch.testing.assert_close(weight, gcn_norm(graph.edge_index)[1])
