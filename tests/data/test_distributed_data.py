"""``data`` behaves as the ``Data`` it was made from, is really distributed, and refuses bad input on every rank."""

from __future__ import annotations

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from random_graphs import random_graph, uneven_parts
from torch_geometric import transforms as T
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import to_dense_adj, to_undirected
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import DistributedData, EdgeTensor, NodeTensor
from pyg_dist.errors import MixedRowsError
from pyg_dist.graph.edge_index import DistributedEdgeIndex

WORLD_SIZES = [1, 3]


def message_of(call: Callable[[], Any]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    else:
        return "no error"
    assert "\n" not in message, "expected an error of one line"
    return message


def distribute(graph: Data, world_size: int) -> Any:
    return DistributedData(graph, partition=uneven_parts(graph.num_nodes, world_size))


def like_data(world_size: int) -> tuple[int, int]:
    graph = random_graph(31, 130)
    graph.name, graph.label = "random", torch.tensor([7])
    data = distribute(graph, world_size)
    assert isinstance(data, Data)
    assert isinstance(data.edge_index, DistributedEdgeIndex)
    assert data.edge_index.shape == (2, 130) == data.edge_index.size()
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_node_features) == (31, 130, 5, 5)
    assert data.num_edge_features == graph.num_edge_features
    assert data.keys() == [*graph.to_dict()]  # those of Data come from a set
    assert "x" in data
    assert "nothing" not in data
    assert data.is_node_attr("y")
    assert data.is_edge_attr("edge_attr")
    assert not data.is_edge_attr("x")
    assert set(data.edge_attrs()) == set(graph.edge_attrs())
    for name, kind in (("x", NodeTensor), ("y", NodeTensor), ("train_mask", NodeTensor), ("edge_attr", EdgeTensor)):
        assert isinstance(data[name], kind)
        assert data[name].shape == graph[name].shape
        assert torch.equal(data[name].full_tensor(), graph[name])
    assert data.name == "random"
    assert torch.equal(data.label, graph.label)
    assert data.validate()
    assert data.has_self_loops() == graph.has_self_loops()
    assert torch.equal(data.edge_index.full_tensor(), graph.edge_index)
    assert (data.is_undirected(), data.is_coalesced()) == (graph.is_undirected(), graph.is_coalesced())
    assert data.has_isolated_nodes() == graph.has_isolated_nodes()
    assert data.to("cpu") is data
    assert data.cpu() is data
    assert "NodeTensor" in repr(data.x)
    assert "x=[31, 5]" in repr(data)
    return data.x.to_local().shape[0], data.edge_attr.to_local().shape[0]


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_like_data(workers: Pools, world_size: int) -> None:
    shares = workers(world_size).run(like_data, world_size)
    assert [sum(n) for n in zip(*shares, strict=True)] == [31, 130]


@on_ranks(*WORLD_SIZES)
def test_assignments(world_size: int) -> None:
    graph = random_graph(31, 130)
    data = distribute(graph, world_size)
    data.x = F.normalize(data.x)
    assert torch.allclose(data.x.full_tensor(), F.normalize(graph.x))
    data.score = torch.arange(31.0)
    assert isinstance(data.score, NodeTensor)
    assert torch.equal(data.score.full_tensor(), torch.arange(31.0))
    data["pos"] = torch.randn(31, 2)
    assert isinstance(data.pos, NodeTensor)
    data.edge_weight = torch.rand(130)
    assert isinstance(data.edge_weight, EdgeTensor)
    data.threshold = 0.5
    data.weights = torch.rand(3)
    assert type(data.weights) is torch.Tensor
    del data.score
    assert "score" not in data
    other = copy.copy(data)
    other.x = torch.zeros(31, 5)
    assert data.x.abs().sum() > 0
    deep = copy.deepcopy(data)
    deep.x.add_(1.0)
    assert not torch.equal(deep.x.full_tensor(), data.x.full_tensor())
    assert deep.x._sharding is data.x._sharding, "a copy must still work with the same edge_index"
    masks = torch.rand(31, 10) < 0.5
    data.train_mask = masks
    assert torch.equal(data.train_mask[:, 3].full_tensor(), masks[:, 3])
    assert message_of(lambda: setattr(data, "x", torch.zeros(30, 5))).startswith("DataError")
    assert message_of(lambda: setattr(data, "val_mask", torch.zeros(30) > 0)).startswith("DataError")
    assert message_of(lambda: setattr(data, "edge_index", graph.edge_index)).startswith("MixedRowsError")
    data.chosen, data.appended = data.x[data.y > 0], torch.cat([data.x, torch.ones(2, data.x.shape[1])])
    assert torch.equal(data.chosen.full_tensor(), data.x.full_tensor()[graph.y > 0])
    assert data.appended.full_tensor().shape[0] == 33
    everyone = (data.y >= 0) & torch.ones(31, dtype=torch.bool)
    data.x = data.x[everyone]  # by a mask that selects all
    assert data.x._sharding is data.graph.node_sharding
    assert message_of(lambda: data.subgraph([0])).startswith("LayoutMismatchError: Expected 'appended'")
    some = copy.copy(data)
    del some.appended
    assert torch.equal(some.subgraph([0, 3]).chosen.full_tensor(), data.chosen.full_tensor())  # as PyG has them
    few = some.subgraph([0, 3, 7]).subgraph([0, 1])
    assert torch.equal(few.chosen.full_tensor(), data.chosen.full_tensor())
    some.chosen = data.x[[5, 1, 2]]
    few = some.subgraph([0, 3, 7])
    assert message_of(lambda: few.subgraph([0])).startswith("LayoutMismatchError: Expected 'chosen'")  # PyG cuts it
    order = torch.arange(30, -1, -1)
    data.z = data.x[order]
    assert torch.equal(data.z.full_tensor(), data.x.full_tensor()[order])
    assert [data.is_node_attr(name) for name in ("z", "chosen", "appended")] == [True, False, False]
    leaf = data.x[order].detach().requires_grad_()
    assert message_of(lambda: setattr(data, "z", leaf)).startswith("LayoutMismatchError: Expected 'z' in the order of")
    assert message_of(lambda: setattr(data, "x", data.chosen)).startswith("DataError")
    other_graph = distribute(random_graph(31, 130, seed=5), world_size)
    if world_size > 1:
        assert message_of(lambda: setattr(data, "z", other_graph.x)).startswith("LayoutMismatchError")
    assert message_of(lambda: pickle.dumps(data)).startswith("MixedRowsError")
    # In PyG's order, that of a set, ranks would sum up other masks than each other.
    names = [name for name, _ in data]
    assert data.keys() == names
    assert data.node_attrs() == [name for name in names if data.is_node_attr(name)]
    assert data.edge_attrs() == [name for name in names if data.is_edge_attr(name)]
    assert len(data.node_attrs()) > 3


@on_ranks(*WORLD_SIZES)
def test_transforms(world_size: int) -> None:
    graph = random_graph(31, 130)
    graph.x = graph.x.abs()
    data = distribute(graph, world_size)
    torch.manual_seed(5)
    expected = T.NormalizeFeatures()(copy.copy(graph)).x
    assert torch.allclose(T.NormalizeFeatures()(data).x.full_tensor(), expected)
    torch.manual_seed(5)
    want = T.RandomNodeSplit(num_val=5, num_test=6)(copy.copy(graph))
    torch.manual_seed(5)
    split = T.RandomNodeSplit(num_val=5, num_test=6)(data)
    assert isinstance(split.val_mask, NodeTensor)
    assert torch.equal(split.val_mask.full_tensor(), want.val_mask)
    assert torch.equal(to_dense_adj(data.edge_index), to_dense_adj(graph.edge_index))
    for structural in (
        lambda: T.ToUndirected()(data),
        lambda: T.AddSelfLoops()(data),
        lambda: T.ToSparseTensor()(data),
        lambda: T.GCNNorm()(data),
        lambda: data.edge_subgraph(torch.arange(5)),
        lambda: data.sort(),
        lambda: data.to_data_list(),
        lambda: data.to_heterogeneous(),
        lambda: data.concat(data),
        lambda: data.get_example(0),
    ):
        message = message_of(structural)
        ways = ("before DistributedData", "full_tensor()")
        assert any(way in message for way in ways), message


@on_ranks(*WORLD_SIZES)
def test_a_second_adjacency() -> None:
    """``full_adj_t`` of OGB's scripts: the graph's own edges, or those with the validation set's."""
    from torch_geometric.nn import GraphConv

    from pyg_dist import DistributedData, distribute

    graph = random_graph(31, 130)
    edges = graph.edge_index.flip(0), torch.randint(0, 31, (2, 150), generator=torch.Generator().manual_seed(3))
    both = [e.unique(dim=1) for e in edges]
    adj_t, full = (torch.sparse_coo_tensor(e, torch.ones(e.shape[1]).double(), (31, 31)).to_sparse_csr() for e in both)
    sparse = Data(x=graph.x.double(), adj_t=adj_t, same=adj_t.clone(), full_adj_t=full * 0.5)
    conv = GraphConv(graph.num_features, 4).double()
    expected = conv(sparse.x, sparse.full_adj_t)
    data = DistributedData(sparse)
    assert data.same is data.adj_t
    data = DistributedData(Data(x=sparse.x, adj_t=full * 0.5, same=full * 0.5, full_adj_t=full * 0.5))
    assert data.same is data.adj_t
    data.full_adj_t = full
    assert data.full_adj_t is not data.adj_t
    data.full_adj_t = full * 0.5
    torch.testing.assert_close(distribute(conv)(data.x, data.full_adj_t).full_tensor(), expected)


@on_ranks(*WORLD_SIZES)
def test_edges_as_a_whole() -> None:
    from torch_geometric.transforms import ToSparseTensor

    graph = random_graph(31, 130)
    both = to_undirected(graph.edge_index, num_nodes=31)
    attr = (both[0] + both[1]).double().view(-1, 1)
    shuffled = both[:, torch.randperm(both.shape[1], generator=torch.Generator().manual_seed(0))]
    for layout in ("halo", "grid"):
        for edge_index, edge_attr in ((both, None), (both, attr), (both, both[:1].t()), (shuffled, None)):
            plain = Data(edge_index=edge_index, edge_attr=edge_attr, num_nodes=31, x=graph.x)
            data = DistributedData(plain, layout=layout)
            assert torch.equal(data.edge_index.full_tensor(), edge_index)
            assert data.is_undirected() == plain.is_undirected() == (not data.is_directed())
            assert data.is_coalesced() == plain.is_coalesced()
            assert torch.equal(torch.as_tensor(data.edge_index), edge_index)
    sparse = ToSparseTensor(layout=torch.sparse_csr)(Data(edge_index=both, num_nodes=31, x=graph.x))
    data = DistributedData(sparse)
    assert data.is_undirected()
    assert data.is_coalesced()
    with pytest.raises(MixedRowsError, match="apply it to the graph before DistributedData"):
        data.adj_t.full_tensor()
    target, source, values = data.adj_t.coo()
    assert torch.equal(
        torch.stack([target.full_tensor(), source.full_tensor()]), sparse.adj_t.to_sparse_coo().indices()
    )
    assert values is None


def mistakes(world_size: int) -> dict[str, str]:
    rank, graph = pyg_dist.rank(), random_graph(20, 60)

    def wrap(**options: Any) -> str:
        return message_of(lambda: DistributedData(graph, **options))

    def changed(**attributes: Any) -> str:
        other = copy.copy(graph)
        for name, value in attributes.items():
            other[name] = value
        return message_of(lambda: DistributedData(other))

    def set_on_one_rank(name: str) -> str:
        if rank == 1:
            os.environ[name] = "1"
        try:
            return wrap()
        finally:
            os.environ.pop(name, None)

    one_different = graph.x.clone()
    one_different[3, 1] += rank
    return {
        "out of range": changed(edge_index=graph.edge_index + 1),
        "float edges": changed(edge_index=graph.edge_index.float()),
        "mask length": changed(train_mask=torch.ones(21, dtype=torch.bool)),
        "empty train mask": changed(train_mask=torch.zeros(20, dtype=torch.bool)),
        "only one rank's graph is wrong": changed(edge_index=graph.edge_index + 20 * (rank == world_size - 1)),
        "different features": changed(x=one_different),
        "different attributes": changed(**{f"only_{rank}": torch.zeros(20)}),
        "different seeds": wrap(seed=rank),
        "different partitions": wrap(partition=torch.full((20,), rank)),
        "partition length": wrap(partition=torch.zeros(19, dtype=torch.int64)),
        "partition range": wrap(partition=torch.full((20,), world_size)),
        "partition floats": wrap(partition=torch.zeros(20)),
        "partition name": wrap(partition="metiss"),
        "layout name": wrap(layout="ring"),
        "cover for post": wrap(partition="cover", exchange="post"),
        "partition type": wrap(partition=None),
        "epsilon": wrap(epsilon=-1.0),
        "seed": wrap(seed=1.5),
        "large seed": wrap(seed=2**70),
        "ragged parts": wrap(partition=[[0], [0, 1]]),
        "no parts": wrap(partition=np.array([], dtype=int)),
        "parts as floats": wrap(partition=torch.zeros(20, dtype=torch.bfloat16)),
        "numbers of numpy": wrap(seed=np.int64(3), epsilon=np.float32(0.1), partition="random"),
        "name of ours": changed(plan=3),
        "setting": set_on_one_rank("PYG_DIST_PROJECT_FIRST"),
        "setting of one rank": set_on_one_rank("PYG_DIST_GRID_SUMS"),
        "exchange of the grid": wrap(layout="grid", exchange="post"),
        "exchange of auto": wrap(layout="auto", exchange="pre"),
        "parts of the grid": wrap(layout="grid", partition=torch.full((3,), 99)),
        "data groups": wrap(layout="auto", mesh={"data": world_size}),
        "hetero": message_of(lambda: DistributedData(HeteroData())),
        "batch": message_of(lambda: DistributedData(Batch.from_data_list([graph, graph]))),
        "list": message_of(lambda: DistributedData([graph, graph])),
        "no error": message_of(lambda: DistributedData(graph)),
    }


EXPECTED = {
    "out of range": "DataError: Expected 'edge_index' to hold node ids below num_nodes=20 (got 20)",
    "float edges": "DataError: Expected 'edge_index' to hold integer node ids (got torch.float32)",
    "mask length": "DataError: Expected 'train_mask' to have 20 rows",
    "empty train mask": "DataError: Expected 'train_mask' to select at least one node",
    "different features": "AgreementError: Expected the same on every rank: data.x",
    "different attributes": "AgreementError: Expected the same on every rank: data.only_0",
    "different seeds": "AgreementError: Expected the same on every rank: option seed (got 0 on rank 0, 1 on rank",
    "different partitions": "AgreementError: Expected the same on every rank: option partition",
    "partition length": "DataError: Expected 'partition' to have one part for each of 20 nodes (got shape [19])",
    "partition range": "DataError: Expected parts in [0, ",
    "partition floats": "DataError: Expected 'partition' to hold integers (got torch.float32)",
    "partition name": "OptionError: Expected partition to be 'metis' or 'metis-cut' or 'hypergraph' or ",
    "layout name": "OptionError: Expected layout to be 'halo' or 'grid' or 'auto' (got 'ring')",
    "cover for post": "OptionError: Expected exchange='hybrid' with partition='cover' (got 'post'",
    "partition type": "OptionError: Expected partition to be 'metis' or 'metis-cut' or 'hypergraph' or ",
    "epsilon": "OptionError: Expected 0 < epsilon < 1",
    "seed": "OptionError: Expected seed to be an integer of 64 bits (got 1.5)",
    "large seed": "OptionError: Expected seed to be an integer of 64 bits (got 1180591620717411303424)",
    "ragged parts": "DataError: Expected 'partition' to be a vector of integers",
    "no parts": "DataError: Expected 'partition' to have one part for each of 20 nodes (got shape [0])",
    "parts as floats": "DataError: Expected 'partition' to hold integers (got torch.bfloat16)",
    "numbers of numpy": "no error",
    "name of ours": "DataError: Expected no attribute 'plan', which every DistributedData has",
    "setting": "AgreementError: Expected the same on every rank: setting PYG_DIST_PROJECT_FIRST (got False on rank",
    "exchange of the grid": "OptionError: Expected no exchange with layout='grid', which has none (got 'post')",
    "exchange of auto": "OptionError: Expected no exchange with layout='auto', which chooses it (got 'pre')",
    "parts of the grid": "OptionError: Expected no partition with layout='grid'",
    "data groups": "OptionError: Expected a mesh without data groups with layout='auto'",
    "hetero": "DataError: Expected a HeteroData with nodes (got none)",
    "batch": "no error",
    "list": "UnsupportedError: Expected a homogeneous torch_geometric.data.Data, or a Batch of them (got list): join",
    "no error": "no error",
}


@pytest.mark.parametrize("world_size", [3])
def test_mistakes(workers: Pools, world_size: int) -> None:
    for rank, messages in enumerate(workers(world_size).run(mistakes, world_size)):
        for name, expected in EXPECTED.items():
            assert messages[name].startswith(expected), name
        assert "OptionError: Expected PYG_DIST_GRID_SUMS to be all_reduce or" in messages["setting of one rank"]
        one_wrong = messages["only one rank's graph is wrong"]
        assert one_wrong.startswith("DataError" if rank == world_size - 1 else "RankFailedError"), one_wrong
        assert "node ids below num_nodes=20" in one_wrong
