"""Models as they are written elsewhere, five steps against stock PyG: meshes, shops, pools of many graphs, traffic."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.utils import scatter, softmax
from workers import Pools

from pyg_dist import DistributedData, distribute

N, E, CHANNELS, CLASSES = 37, 150, 6, 3


def mlp(*widths: int) -> nn.Module:
    layers = [part for a, b in itertools.pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1], nn.LayerNorm(widths[-1]))


class Processor(gnn.MessagePassing):
    """A step of MeshGraphNet (Pfaff et al.): edges have a state, and nodes get the sum of the new ones."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.edge_mlp, self.node_mlp = mlp(3 * width, width, width), mlp(2 * width, width, width)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.propagate(edge_index, x=x, edge_attr=edge_attr, size=(x.size(0), x.size(0)))
        return x + self.node_mlp(torch.cat([x, out], dim=1)), edge_attr + state

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.edge_mlp(torch.cat([x_i, x_j, edge_attr], dim=1))
        return out

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int | None = None) -> tuple[Tensor, Tensor]:
        return scatter(inputs, index, dim=0, dim_size=dim_size, reduce="sum"), inputs


class Mapper(gnn.MessagePassing):
    """Messages from nodes to others along edges with a state, as GraphCast maps between grids (Lam et al.)."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="add")
        self.edge_mlp, self.node_mlp = mlp(3 * width, width, width), mlp(2 * width, width, width)

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Any, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        size = (x[0].size(0), x[1].size(0))
        edge_attr = self.edge_updater(edge_index, x=x, edge_attr=edge_attr, size=size)
        out = self.propagate(edge_index, edge_attr=edge_attr, size=size)
        return x[1] + self.node_mlp(torch.cat([x[1], out], dim=1)), edge_attr

    def edge_update(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = edge_attr + self.edge_mlp(torch.cat([x_i, x_j, edge_attr], dim=1))
        return out

    def message(self, edge_attr: Tensor) -> Tensor:
        return edge_attr


class Square(Mapper):
    """The same step with ``edge_updater``, within one set of nodes."""

    def forward(self, x: Any, edge_index: Any, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward((x, x), edge_index, edge_attr)


class Indexed(nn.Module):
    """The same step by hand: rows at the ends of edges, and a scattered sum."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge_mlp, self.node_mlp = mlp(3 * width, width, width), mlp(2 * width, width, width)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        row, col = edge_index
        state = edge_attr + self.edge_mlp(torch.cat([x[row], x[col], edge_attr], dim=1))
        sums = scatter(state, col, dim=0, dim_size=x.size(0), reduce="sum")
        return x + self.node_mlp(torch.cat([x, sums], dim=1)), state


def meta_layer(width: int) -> nn.Module:
    """The same step as a ``MetaLayer``."""

    class Edges(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp(3 * width, width, width)

        def forward(self, source: Tensor, target: Tensor, edge_attr: Tensor, u: Any, batch: Any) -> Tensor:
            return edge_attr + self.mlp(torch.cat([source, target, edge_attr], dim=1))  # type: ignore[no-any-return]

    class Nodes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = mlp(2 * width, width, width)

        def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor, u: Any, batch: Any) -> Tensor:
            sums = scatter(edge_attr, edge_index[1], dim=0, dim_size=x.size(0), reduce="mean")
            return x + self.mlp(torch.cat([x, sums], dim=1))  # type: ignore[no-any-return]

    return gnn.MetaLayer(Edges(), Nodes())


class Attended(gnn.MessagePassing):
    """anemoi's mapper with attention: keys and values get the edge's state, and targets a softmax over their edges."""

    def __init__(self, width: int, heads: int = 2) -> None:
        super().__init__(aggr="add", node_dim=0)
        self.heads, self.channels = heads, width // heads
        self.query, self.key, self.value, self.edge = (nn.Linear(width, width) for _ in range(4))
        self.out, self.mlp = nn.Linear(width, width), mlp(width, 2 * width, width)

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Any, edge_attr: Tensor) -> tuple[Tensor, Tensor]:
        shape = (-1, self.heads, self.channels)
        query, key, value = self.query(x[1]).view(shape), self.key(x[0]).view(shape), self.value(x[0]).view(shape)
        ends = {"query": (None, query), "key": (key, None), "value": (value, None)}
        size = (x[0].size(0), x[1].size(0))
        out = self.propagate(edge_index, edges=self.edge(edge_attr).view(shape), size=size, **ends)
        out = x[1] + self.out(out.reshape(x[1].size(0), self.heads * self.channels))
        return out + self.mlp(out), edge_attr

    def message(
        self, query_i: Tensor, key_j: Tensor, value_j: Tensor, edges: Tensor, index: Tensor, ptr: Any, size_i: Any
    ) -> Tensor:
        alpha = (query_i * (key_j + edges)).sum(dim=-1) / self.channels**0.5
        return (value_j + edges) * softmax(alpha, index, ptr, size_i).unsqueeze(-1)


class MeshGraphNet(nn.Module):
    def __init__(self, step: Callable[[int], nn.Module] = Processor) -> None:
        super().__init__()
        self.nodes, self.edges = mlp(CHANNELS, 8, 8), mlp(4, 8, 8)
        self.steps, self.out = nn.ModuleList(step(8) for _ in range(3)), nn.Linear(8, CLASSES)

    def forward(self, data: Any) -> Tensor:
        x, edge_attr = self.nodes(data.x), self.edges(data.edge_attr)
        for step in self.steps:
            x, edge_attr, *_ = step(x, data.edge_index, edge_attr)
        return F.cross_entropy(self.out(x)[data.train_mask], data.y[data.train_mask])


UP, ALONG, DOWN = ("grid", "up", "mesh"), ("mesh", "along", "mesh"), ("mesh", "down", "grid")


class EncodeProcessDecode(nn.Module):
    def __init__(self, mapper: Callable[[int], nn.Module] = Mapper) -> None:
        super().__init__()
        self.nodes, self.mesh, self.out = mlp(CHANNELS, 8, 8), mlp(2, 8, 8), nn.Linear(8, CLASSES)
        self.edges = nn.ModuleList(mlp(4, 8, 8) for _ in range(3))
        self.up, self.down = mapper(8), mapper(8)
        self.steps = nn.ModuleList(Mapper(8) for _ in range(3))

    def forward(self, data: Any) -> Tensor:
        grid, mesh = self.nodes(data["grid"].x), self.mesh(data["mesh"].x)
        up, along, down = (
            encode(data[kind].edge_attr) for encode, kind in zip(self.edges, (UP, ALONG, DOWN), strict=True)
        )
        mesh, _ = self.up((grid, mesh), data[UP].edge_index, up)
        for step in self.steps:
            mesh, along = step((mesh, mesh), data[ALONG].edge_index, along)
        grid, _ = self.down((mesh, grid), data[DOWN].edge_index, down)
        return F.mse_loss(self.out(grid), data["grid"].y) + along.square().mean()


def grid_and_mesh() -> HeteroData:
    rng = torch.Generator().manual_seed(8)
    data, sizes = HeteroData(), {"grid": N, "mesh": 11}
    for kind, channels in (("grid", CHANNELS), ("mesh", 2)):
        data[kind].x = torch.randn(sizes[kind], channels, generator=rng, dtype=torch.float64)
    data["grid"].y = torch.randn(N, CLASSES, generator=rng, dtype=torch.float64)
    for relation, number in ((UP, 70), (ALONG, 50), (DOWN, 90)):
        ends = [torch.randint(0, sizes[kind], (number,), generator=rng) for kind in (relation[0], relation[2])]
        data[relation].edge_index = torch.stack(ends)
        data[relation].edge_attr = torch.randn(number, 4, generator=rng, dtype=torch.float64)
    return data


class ByHand(nn.Module):
    """Messages of a batch ``[B, N, F]`` written out, with a reduction over the ends of edges."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.reduce, self.edge, self.node = reduce, nn.Linear(2 * CHANNELS + 4, 4), nn.Linear(CHANNELS + 4, CHANNELS)

    def forward(self, data: Any) -> Tensor:
        row, col = data.edge_index
        x = torch.stack([data.x, data.x.sin()])
        edge_attr = data.edge_attr.unsqueeze(0).expand(2, -1, -1)
        messages = self.edge(torch.cat([x[:, row], x[:, col], edge_attr], dim=-1)).tanh()
        sums = scatter(messages, col, dim=1, dim_size=N, reduce=self.reduce)
        x = x + self.node(torch.cat([x, sums], dim=-1))
        return F.mse_loss(x, torch.ones(2, N, CHANNELS).double())


class LightGCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = gnn.LightGCN(N, 8, num_layers=3)
        self.register_buffer("pairs", torch.arange(40).view(2, 20) % N)

    def forward(self, data: Any) -> Tensor:
        ranks = self.model(data.edge_index, self.pairs)
        return self.model.recommendation_loss(ranks[:10], ranks[10:], node_id=self.pairs.unique())  # type: ignore[no-any-return]


class Rgcn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gnn.RGCNConv(CHANNELS, 8, 3), gnn.RGCNConv(8, CLASSES, 3, num_bases=2)

    def forward(self, data: Any) -> Tensor:
        kind = (data.edge_attr[:, 0] > 0).long() + (data.edge_attr[:, 1] > 0).long()
        x = self.first(data.x, data.edge_index, kind).relu()
        return F.cross_entropy(self.second(x, data.edge_index, kind)[data.train_mask], data.y[data.train_mask])


class Stgcn(nn.Module):
    """Time before nodes, ``[B, T, N, F]``, and a batch norm whose channels are nodes (Yu et al.)."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.conv = nn.Conv2d(CHANNELS, 8, (1, 2)), gnn.ChebConv(8, 8, 3)
        self.by_node, self.by_channel = nn.BatchNorm2d(N), nn.BatchNorm1d(8)

    def forward(self, data: Any) -> Tensor:
        x = torch.linspace(-2, 2, 2 * 4 * N * CHANNELS, dtype=torch.float64).cos().view(2, 4, N, CHANNELS)  # plain
        x = self.time(x.permute(0, 3, 2, 1))
        x = self.conv(x.permute(0, 3, 2, 1), data.edge_index).tanh()
        x = self.by_node(x.permute(0, 2, 1, 3)).permute(0, 2, 1, 3)
        x = self.by_channel(x[:, 0].transpose(1, 2))
        return x.square().mean() + x.amax()


class Pooled(nn.Module):
    """A virtual node, attention within graphs, and a readout."""

    def __init__(self, pool: Callable[[], nn.Module], width: int = 8) -> None:
        super().__init__()
        self.virtual = nn.Embedding(1, 8)
        self.encode, self.conv = nn.Linear(CHANNELS, 8), gnn.GPSConv(8, gnn.GCNConv(8, 8), heads=2, act="tanh")
        self.pool, self.out = pool(), nn.Linear(width, 2)

    def forward(self, data: Any) -> Tensor:
        virtual = self.virtual(torch.zeros(data.num_graphs, dtype=torch.int64))
        x = self.conv(self.encode(data.x) + virtual[data.batch], data.edge_index, data.batch)
        return F.cross_entropy(self.out(self.pool(x, data.batch)), data.y)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "MeshGraphNet": MeshGraphNet,
    "MeshGraphNet, edge_updater": lambda: MeshGraphNet(Square),
    "MeshGraphNet, by hand": lambda: MeshGraphNet(Indexed),
    "MeshGraphNet, MetaLayer": lambda: MeshGraphNet(meta_layer),
    "encode, process, decode": EncodeProcessDecode,
    "encode, process, decode, attention": lambda: EncodeProcessDecode(Attended),
    "a batch by hand, sums": lambda: ByHand("sum"),
    "a batch by hand, extremes": lambda: ByHand("max"),
    "LightGCN": LightGCN,
    "RGCN": Rgcn,
    "STGCN": Stgcn,
    "pool of quantiles": lambda: Pooled(lambda: gnn.QuantileAggregation([0.2, 0.5]), 16),
    "pool of extremes": lambda: Pooled(gnn.MaxAggregation),
    "set to set": lambda: Pooled(lambda: gnn.Set2Set(8, 2), 16),
}


def graph() -> Data:
    rng = torch.Generator().manual_seed(3)
    floats = {"dtype": torch.float64, "generator": rng}
    edge_index = torch.randint(0, N - 3, (2, E), generator=rng)
    return Data(
        x=torch.randn(N, CHANNELS, **floats), edge_index=edge_index, edge_attr=torch.randn(E, 4, **floats),  # type: ignore[call-overload]
        y=torch.randint(0, CLASSES, (N,), generator=rng), train_mask=torch.rand(N, generator=rng) < 0.5,
    )  # fmt: skip


def many() -> Any:
    rng = torch.Generator().manual_seed(5)
    found = []
    for k in range(9):
        size = 3 + k % 4
        x = torch.randn(size, CHANNELS, generator=rng, dtype=torch.float64)
        edges = torch.randint(0, size, (2, 3 * size), generator=rng)
        found.append(Data(x=x, edge_index=edges, y=torch.tensor([k % 2])))
    return Batch.from_data_list(found)


def trained(name: str, data: Any, is_stock: bool) -> Results:
    torch.manual_seed(1)
    model = MODELS[name]().double()
    model = model if is_stock else distribute(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: Results = {}
    for step in range(2):
        optimizer.zero_grad()
        loss = model(data)
        loss.backward()
        if step == 0:
            found |= {f"{n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        found[f"loss {step}"] = loss.detach()
    return found | {n: v.detach() for n, v in model.state_dict().items()}


@functools.cache
def stock(name: str) -> Results:
    return trained(name, data_of(name), True)


def data_of(name: str) -> Any:
    if name.startswith("encode"):
        return grid_and_mesh()
    return many() if "pool" in name or "set" in name else graph()


def against_stock(layout: str, expected: dict[str, Results]) -> None:
    for name, want in expected.items():
        data = data_of(name)
        is_typed = isinstance(data, HeteroData)
        assert_same(trained(name, DistributedData(data, layout="halo" if is_typed else layout), False), want, name)


@pytest.mark.parametrize(("world_size", "layout"), [(1, "halo"), (2, "grid"), (3, "halo")])
def test_trained_as_by_stock_pyg(workers: Pools, world_size: int, layout: str) -> None:
    """One rank, from which nothing travels, trains every third model."""
    names = list(MODELS)[:: 3 if world_size == 1 else 1]
    workers(world_size).run(against_stock, layout, {name: stock(name) for name in names})
