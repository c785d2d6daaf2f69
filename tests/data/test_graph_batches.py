"""A ``Batch`` of graphs as input: pooling by graph, norms by graph, and what else looks at nodes by a number."""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same, gradients
from random_graphs import random_graph
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch_geometric import nn as gnn
from torch_geometric.data import Batch, Data, TemporalData
from torch_geometric.loader import DataLoader
from torch_geometric.utils import coalesce, degree, scatter
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import DistributedData, distribute
from pyg_dist.errors import DataError, MixedRowsError, UnsupportedError

FEATURES, CLASSES = 6, 3


def batch() -> Any:
    """Graphs of several sizes, with a label each, numbers of types that ascend, and edge attributes."""
    graphs = []
    for k in range(5):
        graph = random_graph(5 + 3 * k, 20 + 10 * k, FEATURES, CLASSES, seed=k)
        attributes = {"x": graph.x, "edge_index": graph.edge_index, "edge_attr": torch.randn(20 + 10 * k, 4).double()}
        graphs.append(Data(y=torch.tensor([k % CLASSES]), kind=torch.full((5 + 3 * k,), k), **attributes))
    return Batch.from_data_list(graphs)


class Pooled(nn.Module):
    def __init__(self, pool: Callable[..., Tensor], norm: nn.Module) -> None:
        super().__init__()
        self.pool, self.norm = pool, norm
        self.conv, self.head = gnn.SAGEConv(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, data: Any) -> Tensor:
        x = self.conv(data.x, data.edge_index).tanh()
        x = self.norm(x) if isinstance(self.norm, nn.SyncBatchNorm) else self.norm(x, data.batch)
        return self.head(self.pool(x, data.batch))


class EdgeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2 * FEATURES + 4, 4)

    def forward(self, source: Tensor, target: Tensor, edge_attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        return self.lin(torch.cat([source, target, edge_attr], 1)).tanh()


class NodeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(2 * FEATURES + 4, FEATURES)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        source, target = edge_index
        messages = torch.cat([x[source], edge_attr], 1)
        return self.lin(torch.cat([x, scatter(messages, target, dim=0, dim_size=x.size(0), reduce="mean")], 1))


class GlobalModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(FEATURES + 2, CLASSES)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        return self.lin(torch.cat([u, scatter(x, batch, dim=0, dim_size=5, reduce="mean")], 1))


class Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = gnn.MetaLayer(EdgeModel(), NodeModel(), GlobalModel())
        self.types = gnn.HeteroLinear(FEATURES, FEATURES, 5, is_sorted=True)

    def forward(self, data: Any) -> Tensor:
        u = torch.ones(5, 2, dtype=torch.float64)
        x, _, u = self.layer(self.types(data.x, data.kind), data.edge_index, data.edge_attr, u, data.batch)
        return u + x.square().mean()


class Saved(nn.Module):
    """With what its backward needs on disk, or where ``save_on_cpu`` puts it."""

    def __init__(self, on_disk: bool) -> None:
        super().__init__()
        self.first, self.second, self.on_disk = gnn.GCNConv(FEATURES, 8), gnn.GATConv(8, CLASSES), on_disk

    def forward(self, data: Any) -> Tensor:
        folder = Path(tempfile.gettempdir())

        def pack(x: Tensor) -> Path:
            path = folder / str(uuid.uuid4())
            torch.save(x, path)
            return path

        def unpack(path: Path) -> Any:
            found = torch.load(path)
            path.unlink()
            return found

        with saved_tensors_hooks(pack, unpack) if self.on_disk else save_on_cpu():
            x = self.second(self.first(data.x, data.edge_index).relu(), data.edge_index)
            return gnn.global_add_pool(x, data.batch, 5)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "add, GraphNorm": lambda: Pooled(gnn.global_add_pool, gnn.GraphNorm(FEATURES)),
    "mean, InstanceNorm": lambda: Pooled(gnn.global_mean_pool, gnn.InstanceNorm(FEATURES)),
    "max, InstanceNorm": lambda: Pooled(
        gnn.global_max_pool, gnn.InstanceNorm(FEATURES, affine=True, track_running_stats=True)
    ),
    "LayerNorm": lambda: Pooled(gnn.global_mean_pool, gnn.LayerNorm(FEATURES)),
    "PairNorm": lambda: Pooled(gnn.global_mean_pool, gnn.PairNorm()),
    "GraphSizeNorm": lambda: Pooled(gnn.global_mean_pool, gnn.GraphSizeNorm()),
    "MeanSubtractionNorm": lambda: Pooled(gnn.global_add_pool, gnn.MeanSubtractionNorm()),
    "attention": lambda: Pooled(gnn.aggr.AttentionalAggregation(nn.Linear(FEATURES, 1)), gnn.GraphNorm(FEATURES)),
    "MetaLayer, HeteroLinear": Meta,
    "saved on disk": lambda: Saved(on_disk=True),
    "saved on the host": lambda: Saved(on_disk=False),
}


def step(model: nn.Module, data: Any) -> Results:
    out = model(data)
    loss = F.cross_entropy(out, data.y)
    loss.backward()
    found = {"out": out.detach(), "loss": loss.detach(), **gradients(model)}
    model.eval()
    with torch.no_grad():  # an output that save_on_cpu has packed, and no backward pass frees, keeps itself alive
        return {**found, "eval": model(data)}


def looks(data: Any) -> Results:
    """What scripts ask of edges and of a batch."""
    edges = data.edge_index
    return {
        "num_graphs": data.num_graphs, "len": len(data), "batch": data.batch, "ptr": data.ptr, "largest": edges.max(),
        "smallest": edges.min(), "list": edges.tolist(), "array": torch.from_numpy(edges.numpy()),
        "targets": edges[1, :], "first": edges[0, :7], "counts": torch.bincount(edges[1], minlength=data.num_nodes),
        "in": degree(edges[1], data.num_nodes, torch.float64), "loops": (edges[0] == edges[1]).sum(),
    }  # fmt: skip


@on_ranks()
@pytest.mark.parametrize(("world_size", "layout"), [(1, "halo"), (2, "grid"), (3, "halo")])
def test_batches(layout: str) -> None:
    plain = batch()
    ours: Any = pyg_dist.DistributedData(plain, layout=layout, partition="random")
    assert_same(looks(ours), looks(plain))
    for name, make in MODELS.items():
        torch.manual_seed(0)
        stock = make().double()
        model = pyg_dist.distribute(copy.deepcopy(stock))
        assert_same(step(model, ours), step(stock, plain), name)
    norm = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5)).double()
    as_sync = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(norm))
    expected, got = (m(d.x) for m, d in ((norm, plain), (as_sync, ours)))
    expected.pow(3).sum().backward(), got.pow(3).sum().backward()
    assert_same({"out": got, **gradients(as_sync)}, {"out": expected, **gradients(norm)}, "SyncBatchNorm")
    single = pyg_dist.distribute(nn.SyncBatchNorm(FEATURES).double())
    assert_same({"out": single(ours.x)}, {"out": nn.BatchNorm1d(FEATURES).double()(plain.x)})
    with pytest.raises(pyg_dist.errors.UnsupportedError, match=r"asks for a GPU: call pyg_dist.distribute"):
        nn.SyncBatchNorm(FEATURES).double()(ours.x)
    for options in ({}, {"num_nodes": 55}):
        assert torch.equal(coalesce(ours.edge_index, **options).full_tensor(), coalesce(plain.edge_index, **options))


def many() -> Any:
    graphs = [random_graph(4 + k % 5, 9 + k % 7, FEATURES, CLASSES, seed=k) for k in range(40)]
    return Batch.from_data_list([Data(x=g.x, edge_index=g.edge_index, y=g.y[:1]) for g in graphs])


def whole() -> tuple[str, list[int], str]:
    """The partition of many graphs, the rows that a sum sends, and what is printed."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        data = DistributedData(many())
    torch.manual_seed(0)
    stock = Pooled(gnn.global_mean_pool, gnn.GraphNorm(FEATURES)).double()
    assert_same(step(distribute(copy.deepcopy(stock)), data), step(stock, many()))
    with pytest.raises(DataError, match="Expected a Batch of graphs with partition='graphs'"):
        DistributedData(random_graph(9, 20, FEATURES, CLASSES, seed=0), partition="graphs")
    assert DistributedData(batch(), partition="graphs").plan.rows["hybrid"] == 0
    with pytest.raises(MixedRowsError, match="would take apart a distributed graph"):
        data[0]
    with pytest.raises(KeyError):
        data["a", "to", "b"]
    for join in (Batch.from_data_list, lambda graphs: next(iter(DataLoader(graphs)))):
        with pytest.raises(UnsupportedError, match="joins plain graphs"):
            join([data])
    return data.plan.partition, list(data.plan.rows.values()), told.getvalue()


def test_each_graph_of_many_is_whole_on_a_rank(workers: Pools) -> None:
    for rank, (partition, rows, told) in enumerate(workers(3).run(whole)):
        assert partition == "graphs"
        assert rows == [0] * len(rows)
        assert told.startswith("pyg_dist: each graph of the batch is whole on one of 3 ranks") == (rank == 0)
        assert told.count("\n") == (rank == 0)


def advice() -> dict[str, str]:
    ids = torch.tensor([0, 1])
    given = {
        "TemporalData": TemporalData(src=ids, dst=ids, t=ids, msg=torch.ones(2, 3)),
        "list": [batch()],
        "dict": {"x": torch.ones(2, 3), "edge_index": torch.stack([ids, ids])},
        "int": 3,
    }
    found = {}
    for name, data in given.items():
        with pytest.raises(pyg_dist.errors.UnsupportedError) as caught:
            pyg_dist.DistributedData(data)
        found[name] = str(caught.value)
    return found


def test_advice_for_other_inputs(workers: Pools) -> None:
    (found,) = workers(1).run(advice)
    assert "Data(edge_index=torch.stack([data.src, data.dst]), t=data.t, edge_attr=data.msg)" in found["TemporalData"]
    assert "Batch.from_data_list(graphs)" in found["list"]
    assert "Data.from_dict(data)" in found["dict"]
    assert "to_homogeneous" not in "".join(found.values())
