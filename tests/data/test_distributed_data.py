"""``data`` behaves as the ``Data`` it was made from, is really distributed, and refuses bad input on every rank."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import load_npz
from random_graphs import random_graph, uneven_parts
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import transforms as T
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import add_self_loops, to_undirected
from workers import Workers

Pools = Callable[[int], Workers]
WORLD_SIZES = [1, 2, 3]


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
    from pyg_dist import DistributedData

    return DistributedData(graph, partition=uneven_parts(graph.num_nodes, world_size))


def like_data(world_size: int) -> tuple[int, int]:
    from pyg_dist import EdgeTensor, NodeTensor
    from pyg_dist.tensor import DistributedEdgeIndex

    graph = random_graph(31, 130)
    graph.name, graph.label = "random", torch.tensor([7])
    data = distribute(graph, world_size)
    assert isinstance(data, Data)
    assert isinstance(data.edge_index, DistributedEdgeIndex)
    assert data.edge_index.shape == (2, 130) == data.edge_index.size()
    assert (data.num_nodes, data.num_edges, data.num_features, data.num_node_features) == (31, 130, 5, 5)
    assert data.num_edge_features == graph.num_edge_features
    assert set(data.keys()) == set(graph.keys())
    assert "x" in data
    assert "nothing" not in data
    assert data.is_node_attr("y")
    assert data.is_edge_attr("edge_attr")
    assert not data.is_edge_attr("x")
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


def assignments(world_size: int) -> None:
    from pyg_dist import EdgeTensor, NodeTensor

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
    assert deep.x._rows is data.x._rows, "a copy must still work with the same edge_index"
    masks = torch.rand(31, 10) < 0.5
    data.train_mask = masks
    assert torch.equal(data.train_mask[:, 3].full_tensor(), masks[:, 3])
    assert message_of(lambda: setattr(data, "x", torch.zeros(30, 5))).startswith("DataError")
    assert message_of(lambda: setattr(data, "val_mask", torch.zeros(30) > 0)).startswith("DataError")
    assert message_of(lambda: setattr(data, "edge_index", graph.edge_index)).startswith("MixedRowsError")
    assert message_of(lambda: setattr(data, "z", data.y[data.y > 0])).startswith("LayoutMismatchError")
    assert message_of(lambda: pickle.dumps(data)).startswith("MixedRowsError")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_assignments(workers: Pools, world_size: int) -> None:
    workers(world_size).run(assignments, world_size)


def transforms(world_size: int) -> None:
    from pyg_dist import NodeTensor

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
    for structural in (
        lambda: T.ToUndirected()(data),
        lambda: T.AddSelfLoops()(data),
        lambda: T.ToSparseTensor()(data),
        lambda: T.GCNNorm()(data),
        lambda: T.LargestConnectedComponents()(data),
        lambda: add_self_loops(data.edge_index),
        lambda: to_undirected(data.edge_index),
        lambda: data.edge_index[:, None],
        lambda: data.edge_index[:5],
        lambda: torch.cat([data.edge_index, data.edge_index], dim=1),
        lambda: data.subgraph(torch.arange(5)),
        lambda: data.edge_subgraph(torch.arange(5)),
        lambda: data.sort(),
    ):
        message = message_of(structural)
        # PyG's own helpers raise a bare NotImplementedError for whatever is no tensor.
        ways = ("before DistributedData", "full_tensor()", "NotImplementedError")
        assert any(way in message for way in ways), message


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_transforms(workers: Pools, world_size: int) -> None:
    workers(world_size).run(transforms, world_size)


def whole_edges() -> None:
    from torch_geometric.transforms import ToSparseTensor

    from pyg_dist import DistributedData
    from pyg_dist.errors import MixedRowsError

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
    sparse = ToSparseTensor(layout=torch.sparse_csr)(Data(edge_index=both, num_nodes=31, x=graph.x))
    data = DistributedData(sparse)
    assert data.is_undirected()
    with pytest.raises(MixedRowsError, match="apply it to the graph before DistributedData"):
        data.adj_t.full_tensor()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_edges_as_a_whole(workers: Pools, world_size: int) -> None:
    workers(world_size).run(whole_edges)


def mistakes(world_size: int) -> dict[str, str]:
    import pyg_dist
    from pyg_dist import DistributedData

    rank, graph = pyg_dist.rank(), random_graph(20, 60)

    def wrap(**options: Any) -> str:
        return message_of(lambda: DistributedData(graph, **options))

    def changed(**attributes: Any) -> str:
        other = copy.copy(graph)
        for name, value in attributes.items():
            other[name] = value
        return message_of(lambda: DistributedData(other))

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
        "planned": wrap(partition="cover"),
        "partition type": wrap(partition=None),
        "epsilon": wrap(epsilon=-1.0),
        "seed": wrap(seed=1.5),
        "parts of the grid": wrap(layout="grid", partition=torch.full((3,), 99)),
        "data groups": wrap(layout="auto", mesh={"data": world_size}),
        "hetero": message_of(lambda: DistributedData(HeteroData())),
        "batch": message_of(lambda: DistributedData(Batch.from_data_list([graph, graph]))),
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
    "partition name": "OptionError: Expected partition to be 'metis' or 'random' (got 'metiss')",
    "layout name": "OptionError: Expected layout to be 'halo' or 'grid' or 'auto' (got 'ring')",
    "planned": "UnsupportedError: partition='cover' is planned",
    "partition type": "OptionError: Expected partition to be 'metis' or 'random', the owner of each node, or",
    "epsilon": "OptionError: Expected 0 < epsilon < 1",
    "seed": "OptionError: Expected seed to be an integer (got 1.5)",
    "parts of the grid": "OptionError: Expected no partition with layout='grid'",
    "data groups": "OptionError: Expected a mesh without data groups with layout='auto'",
    "hetero": "UnsupportedError: Expected a homogeneous",
    "batch": "UnsupportedError: Expected one graph (got a Batch)",
    "no error": "no error",
}


@pytest.mark.parametrize("world_size", [2, 3])
def test_mistakes(workers: Pools, world_size: int) -> None:
    for rank, messages in enumerate(workers(world_size).run(mistakes, world_size)):
        for name, expected in EXPECTED.items():
            assert messages[name].startswith(expected), name
        one_wrong = messages["only one rank's graph is wrong"]
        assert one_wrong.startswith("DataError" if rank == world_size - 1 else "RankFailedError"), one_wrong
        assert "node ids below num_nodes=20" in one_wrong


class Largest(TorchDispatchMode):
    """Keeps the shape of the largest result of all calls that reach the kernels, backward and optimizer included."""

    def __init__(self) -> None:
        super().__init__()
        self.shape = torch.Size([0])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.numel() > self.shape.numel():
                self.shape = tensor.shape
        return out


RING = 400  # nodes


def ring() -> Data:
    """Each node and its two neighbours on either side: the halo is small, as it is on large graphs."""
    node = torch.arange(RING)
    edge_index = torch.cat([torch.stack([node, (node + k) % RING]) for k in (-2, -1, 1, 2)], dim=1)
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(RING, 6, generator=rng), torch.randint(0, 5, (RING,), generator=rng)
    return Data(x=x, y=y, edge_index=edge_index, edge_weight=torch.rand(4 * RING, generator=rng), train_mask=y > 1)


def epochs(conv_name: str) -> dict[str, Any]:
    from pyg_dist import DistributedData
    from pyg_dist import conv as ours

    data = DistributedData(ring(), exchange="post")
    conv = getattr(ours, conv_name)
    weights = [data.edge_weight.requires_grad_()] if conv_name == "DistributedGCNConv" else []
    first, norm, second = conv(6, 7), torch.nn.BatchNorm1d(7), conv(7, 5)
    model = torch.nn.ModuleList([first, norm, second])
    optimizer = torch.optim.Adam([*model.parameters(), *weights])
    with Largest() as largest:
        for _ in range(2):
            optimizer.zero_grad()
            out = second(F.dropout(norm(first(data.x, data.edge_index)).relu()), data.edge_index, *weights)
            F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
            optimizer.step()
            accuracy = (out.argmax(dim=-1)[data.train_mask] == data.y[data.train_mask]).float().mean()
    assert 0 <= float(accuracy) <= 1
    traffic = data.traffic
    return {
        "largest": largest.shape, "bytes": traffic.num_bytes, "rows": traffic.num_rows,
        "messages": traffic.num_messages, "plan": data.plan.to_dict(),
    }  # fmt: skip


class Wire:
    """Counts the bytes that the process group is given to send to other ranks, apart from all-reduces."""

    def __enter__(self) -> Wire:
        self.num_bytes, self.num_collectives = 0, 0
        self._send, self._all_to_all = dist.batch_isend_irecv, dist.all_to_all_single
        dist.batch_isend_irecv, dist.all_to_all_single = self._count_messages, self._count_all_to_all
        return self

    def __exit__(self, *exception: object) -> None:
        dist.batch_isend_irecv, dist.all_to_all_single = self._send, self._all_to_all

    def _count_messages(self, messages: list[Any]) -> Any:
        self.num_bytes += sum(m.tensor.numel() * m.tensor.element_size() for m in messages if m.op is dist.isend)
        return self._send(messages)

    def _count_all_to_all(self, output: Any, rows: Any, in_counts: Any, out_counts: Any, **options: Any) -> Any:
        self.num_collectives += 1
        assert out_counts[dist.get_rank()] == 0 == in_counts[dist.get_rank()], "own rows need no message"
        self.num_bytes += rows[: sum(out_counts)].numel() * rows.element_size()
        return self._all_to_all(output, rows, in_counts, out_counts, **options)


def epoch(world_size: int, conv_name: str, exchange: Any) -> dict[str, int]:
    from pyg_dist import DistributedData
    from pyg_dist import conv as ours

    graph = random_graph(211, 900, num_features=6)
    # Of uneven_parts, the last of three ranks has no node: a third of the pairs exchange. At random, all do.
    partition = uneven_parts(211, world_size) if world_size < 4 else "random"
    data = DistributedData(graph, partition=partition, exchange=exchange)
    conv = getattr(ours, conv_name)
    first, norm, second = conv(6, 8).double(), torch.nn.BatchNorm1d(8).double(), conv(8, 4).double()
    with Wire() as wire:
        out = second(F.dropout(norm(first(data.x, data.edge_index)).relu()), data.edge_index)
        F.cross_entropy(out[data.train_mask], data.y[data.train_mask]).backward()
        accuracy = (out.argmax(dim=-1)[data.train_mask] == data.y[data.train_mask]).float().mean()
    assert 0 <= float(accuracy) <= 1
    assert wire.num_bytes == data.traffic.num_bytes
    assert (wire.num_collectives > 0) == data.plan.is_dense
    return {"bytes": data.traffic.num_bytes, "planned": data.plan.rows[exchange], "dense": data.plan.is_dense}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("conv_name", ["DistributedSAGEConv", "DistributedGCNConv"])
def test_no_rank_sees_all_rows(workers: Pools, world_size: int, conv_name: str) -> None:
    """All that training makes is smaller than [N, 5], the narrowest features; and what is sent is what was planned."""
    ranks = workers(world_size).run(epochs, conv_name)
    for rank in ranks:
        assert (rank["largest"].numel() >= 5 * RING) == (world_size == 1), rank["largest"]
    plan = ranks[0]["plan"]
    assert (plan["rows"]["post"] > 0) == (world_size > 1)
    assert sum(rank["bytes"] for rank in ranks) > 0 or world_size == 1


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("conv_name", ["DistributedSAGEConv", "DistributedGCNConv"])
@pytest.mark.parametrize("exchange", ["post", "pre", "hybrid"])
def test_bytes_are_as_planned_and_counted(workers: Pools, world_size: int, conv_name: str, exchange: str) -> None:
    ranks = workers(world_size).run(epoch, world_size, conv_name, exchange)
    columns = 6 + 4 + 4  # the input needs no gradient; the second layer projects first, forward and backward
    assert sum(r["bytes"] for r in ranks) == ranks[0]["planned"] * columns * 8
    assert ranks[0]["dense"] == (world_size == 4)
    assert (ranks[0]["planned"] > 0) == (world_size > 1)


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS"))


def memory_of(path: str) -> int:
    """What this rank keeps of the graph, in bytes, when the input is gone and an epoch has run."""
    from pyg_dist import DistributedData
    from pyg_dist.conv import DistributedSAGEConv

    warm = distribute(random_graph(50, 100, dtype=torch.float32), 1)
    conv = DistributedSAGEConv(5, 3)
    conv(warm.x, warm.edge_index).sum().backward()
    del warm, conv
    before = resident_bytes()
    data = DistributedData(load_npz(path))
    conv = DistributedSAGEConv(data.num_features, 16)
    conv(data.x, data.edge_index).sum().backward()
    return resident_bytes() - before


def test_memory_shrinks_with_ranks(workers: Pools, shared_data: Any) -> None:
    path = str(shared_data / "amazon_computers.npz")
    (alone,) = workers(1).run(memory_of, path)
    shares = workers(4).run(memory_of, path)
    assert max(shares) <= 0.45 * alone, (alone, shares)
