"""The handle of edges outside of convs: whatever a tensor of all edges does, with its values, on every rank."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch_geometric.utils as pyg
from random_graphs import random_graph
from torch import Tensor
from torch.nn import functional as F
from torch_geometric.data import Data
from torch_geometric.transforms import ToSparseTensor
from workers import on_ranks

import pyg_dist

NUM_NODES = 31
IDS = torch.arange(NUM_NODES).flip(0)

# Of edges, and of a row for each node.
READS: list[Callable[[Any, Any], Any]] = [
    lambda e, x: x[e].sum(0), lambda e, x: x[e[:, :9].T], lambda e, x: IDS[e], lambda e, x: e.unique(),
    lambda e, x: torch.unique(e, return_counts=True)[1], lambda e, x: torch.bincount(e.view(-1)),
    lambda e, x: e.flatten(), lambda e, x: e[:, 0], lambda e, x: e[:, -1], lambda e, x: e[e > 3], lambda e, x: e[None],
    lambda e, x: e == 3, lambda e, x: (e != 3).all(0), lambda e, x: e == e.flip(0), lambda e, x: e[:, (e < 9).all(0)],
    lambda e, x: torch.isin(e, IDS[:4]), lambda e, x: e.sort(dim=1)[0], lambda e, x: e + NUM_NODES,
    lambda e, x: 5 - e, lambda e, x: e % 7, lambda e, x: e * 2, lambda e, x: e / 2, lambda e, x: -e, lambda e, x: e & 3,
    lambda e, x: [e**2, 2**e, abs(e - 9), e << 1, 99 >> e, 1 & e, 1 | e, 5 ^ e, 7 // (e + 1), 9 % (e + 1), 3 in e],
    lambda e, x: torch.hstack([e, e.flip([0])]), lambda e, x: torch.cat([e, e]), lambda e, x: e.repeat(1, 2),
    lambda e, x: e.flip(1), lambda e, x: e.unbind(1)[2], lambda e, x: e.int(), lambda e, x: e.float().mean(),
    lambda e, x: e.permute(1, 0), lambda e, x: torch.transpose(e, 0, 1),
    lambda e, x: torch.from_numpy(e.numpy()), lambda e, x: np.array(e), lambda e, x: e.new_full((e.size(1),), 7),
    lambda e, x: e.new_zeros(2, 3), lambda e, x: e.new_tensor([1, 2]), lambda e, x: torch.equal(e, e.full_tensor()),
    lambda e, x: [e.is_cuda, e.requires_grad, e.is_contiguous(), e.dtype, e.layout, torch.numel(e), e.is_leaf],
    lambda e, x: F.one_hot(e, NUM_NODES).sum((0, 1)), lambda e, x: torch.index_select(e, 1, IDS[:3]),
    lambda e, x: [hasattr(e, "sparse_size"), getattr(e, "e_id", 1), e in [e], e is None, e.mT.shape],
]  # fmt: skip


def degree_of_all(e: Any, x: Any) -> Any:
    return pyg.degree(e.view(-1), NUM_NODES)


# PyG's functions of edges, not told how many nodes there are.
FUNCTIONS: list[Callable[[Any, Any], Any]] = [
    degree_of_all, lambda e, x: pyg.subgraph(IDS[:20], e)[0], lambda e, x: pyg.k_hop_subgraph([3, 5], 2, e),
    lambda e, x: pyg.subgraph(IDS[:20], e, relabel_nodes=True)[0], lambda e, x: pyg.contains_isolated_nodes(e),
    lambda e, x: pyg.k_hop_subgraph(3, 1, e, relabel_nodes=True, num_nodes=NUM_NODES),
    lambda e, x: pyg.get_laplacian(e, normalization="sym")[1], lambda e, x: pyg.get_self_loop_attr(e),
    lambda e, x: pyg.contains_isolated_nodes(e, NUM_NODES + 1), lambda e, x: pyg.remove_isolated_nodes(e)[0],
    lambda e, x: pyg.unbatch_edge_index(e, IDS.flip(0) // 40), lambda e, x: pyg.structured_negative_sampling(e),
    lambda e, x: pyg.dropout_node(e)[0], lambda e, x: pyg.to_dense_adj(e)[0], lambda e, x: pyg.add_self_loops(e)[0],
]  # fmt: skip


def whole(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [*map(whole, value)]
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def same(got: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(same, got, expected))
    if not isinstance(expected, (Tensor, np.ndarray)):
        return bool(got == expected)
    assert type(got) is type(expected)
    return got.shape == expected.shape and got.dtype == expected.dtype and np.allclose(got, expected, 1e-12, 1e-12)


@on_ranks(2)
def test_what_one_rank_may_do_alone() -> None:
    graph = random_graph(NUM_NODES, 130)
    ours: Any = pyg_dist.DistributedData(graph)
    edges = ours.edge_index
    if pyg_dist.rank() == 0:  # another rank would wait, or raise, where all edges are gathered
        assert f"{edges}" == format(edges, "") == str(edges) == repr(edges)
        assert "full_tensor" in dir(edges)
        assert copy.copy(edges) is copy.deepcopy(edges) is edges
        assert (edges.nbytes, edges.stride(), edges.is_pinned()) == (16 * graph.num_edges, (graph.num_edges, 1), False)
        assert edges.is_signed()
        assert not torch.is_floating_point(edges)
    with pytest.raises(pyg_dist.errors.UnsupportedError, match=r"torch\.jit compiles for plain tensors"):
        torch.jit.trace(lambda e: e + 1, edges)  # type: ignore[no-untyped-call]


@on_ranks(2)
def test_another_dtype_is_of_a_plain_tensor() -> None:
    graph = random_graph(NUM_NODES, 130)
    edges: Any = pyg_dist.DistributedData(graph).edge_index
    assert edges.to("cpu") is edges.to(torch.int64) is edges.to(torch.arange(3)) is edges
    for asked in ((torch.int32,), ("cpu", torch.float32), (torch.zeros(1),)):
        got, expected = edges.to(*asked), graph.edge_index.to(*asked)
        assert type(got) is Tensor
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    assert torch.equal(edges.to(dtype=torch.int32), graph.edge_index.int())


@pytest.mark.parametrize("layout", ["halo", "grid"])
@on_ranks(1, 3)
def test_what_a_tensor_of_all_edges_does(layout: str) -> None:
    graph = random_graph(NUM_NODES, 130)
    graph.x = graph.x.detach()
    ours: Any = pyg_dist.DistributedData(graph, layout=layout, partition="random")
    graph.edge_index.full_tensor = lambda: graph.edge_index  # type: ignore[attr-defined]
    for k, read in enumerate(READS + FUNCTIONS):
        values = []
        for data in (ours, graph):
            torch.manual_seed(k)
            values.append(whole(read(data.edge_index, data.x)))
        assert same(*values), (k, *values)
    for write in (
        lambda e: e.add_(1), lambda e: torch.add(e, 1, out=e), lambda e: torch.relu_(e),
        lambda e: torch.sub(IDS, 1, out=e), lambda e: e.__setitem__((slice(None), 0), 1), lambda e: operator.iadd(e, 1),
    ):  # fmt: skip
        with pytest.raises(
            pyg_dist.errors.MixedRowsError, match="would change a distributed edge_index, which is fixed"
        ):
            write(ours.edge_index)
    matrix = ToSparseTensor(layout=torch.sparse_csr)(Data(x=graph.x, edge_index=graph.edge_index))
    sparse: Any = pyg_dist.DistributedData(matrix, layout=layout)
    for refused in (lambda a: a + 1, lambda a: a > 1, lambda a: torch.relu(a), lambda a: a.unique(), lambda a: a[0]):
        with pytest.raises(pyg_dist.errors.MixedRowsError, match=r"adj_t.* needs all edges, and each rank holds"):
            refused(sparse.adj_t)
    assert sparse.adj_t == sparse.adj_t
    assert sparse.adj_t != 3
    scaled, ones = sparse.adj_t, sparse.adj_t @ sparse.x
    scaled *= 6
    scaled /= 2
    torch.testing.assert_close((scaled @ sparse.x).full_tensor(), 3 * ones.full_tensor())
