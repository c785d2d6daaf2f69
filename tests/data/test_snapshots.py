"""Snapshots over the same nodes: further edge sets, further graphs, and the recurrent cells that run over them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from against_stock import assert_same
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from workers import Pools, on_ranks

from pyg_dist import DistributedData, distribute
from pyg_dist.conv import DistributedSAGEConv
from pyg_dist.errors import DataError, LayoutMismatchError, OptionError
from pyg_dist.graph import edge_index as module

Results = dict[str, Any]
NUM_NODES, NUM_FEATURES, NUM_PERIODS = 37, 4, 3


def snapshots(count: int = 5) -> list[Data]:
    """Graphs over the same nodes, each with edges, weights and features of its own; one has a single edge."""
    generator = torch.Generator().manual_seed(4)
    found = []
    for k in range(count):
        num_edges = 1 if k == 3 else 90 + 3 * k
        found.append(
            Data(
                x=torch.randn(NUM_NODES, NUM_FEATURES, generator=generator, dtype=torch.float64),
                periods=torch.randn(NUM_NODES, NUM_FEATURES, NUM_PERIODS, generator=generator, dtype=torch.float64),
                y=torch.randn(NUM_NODES, 1, generator=generator, dtype=torch.float64),
                edge_index=torch.randint(0, NUM_NODES, (2, num_edges), generator=generator),
                edge_weight=torch.rand(num_edges, generator=generator, dtype=torch.float64) + 0.1,
            )
        )
    return found


# ---- Cells, as torch_geometric_temporal writes them ------------------------------------------------------------------


class GConvGRU(nn.Module):
    """Seo et al., Structured Sequence Modeling with Graph Convolutional Recurrent Networks."""

    def __init__(self, in_channels: int, out_channels: int, K: int) -> None:
        super().__init__()
        self.out_channels = out_channels
        for gate in "zrh":
            setattr(self, f"conv_x_{gate}", gnn.ChebConv(in_channels, out_channels, K))
            setattr(self, f"conv_h_{gate}", gnn.ChebConv(out_channels, out_channels, K))

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Any = None, H: Tensor | None = None) -> Tensor:
        if H is None:
            H = torch.zeros(X.shape[0], self.out_channels, dtype=X.dtype).to(X.device)
        Z = torch.sigmoid(self.conv_x_z(X, edge_index, edge_weight) + self.conv_h_z(H, edge_index, edge_weight))
        R = torch.sigmoid(self.conv_x_r(X, edge_index, edge_weight) + self.conv_h_r(H, edge_index, edge_weight))
        new = torch.tanh(self.conv_x_h(X, edge_index, edge_weight) + self.conv_h_h(H * R, edge_index, edge_weight))
        return Z * H + (1 - Z) * new


class TGCN(nn.Module):
    """Zhao et al., T-GCN."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.out_channels = out_channels
        for gate in "zrh":
            setattr(self, f"conv_{gate}", gnn.GCNConv(in_channels, out_channels))
            setattr(self, f"linear_{gate}", nn.Linear(2 * out_channels, out_channels))

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Any = None, H: Tensor | None = None) -> Tensor:
        if H is None:
            H = torch.zeros(X.shape[0], self.out_channels, dtype=X.dtype).to(X.device)
        Z = torch.sigmoid(self.linear_z(torch.cat([self.conv_z(X, edge_index, edge_weight), H], dim=1)))
        R = torch.sigmoid(self.linear_r(torch.cat([self.conv_r(X, edge_index, edge_weight), H], dim=1)))
        new = torch.tanh(self.linear_h(torch.cat([self.conv_h(X, edge_index, edge_weight), H * R], dim=1)))
        return Z * H + (1 - Z) * new


class A3TGCN(nn.Module):
    """Zhu et al., A3T-GCN: attention over the periods of ``X``, ``[N, F, T]``."""

    def __init__(self, in_channels: int, out_channels: int, periods: int) -> None:
        super().__init__()
        self.periods = periods
        self._base_tgcn = TGCN(in_channels, out_channels)
        self._attention = nn.Parameter(torch.rand(periods))

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Any = None, H: Tensor | None = None) -> Tensor:
        H_accum: Any = 0
        probs = F.softmax(self._attention, dim=0)
        for period in range(self.periods):
            H_accum = H_accum + probs[period] * self._base_tgcn(X[:, :, period], edge_index, edge_weight, H)
        return H_accum  # type: ignore[no-any-return]


class GCNConvFixedW(gnn.MessagePassing):
    """A GCN whose weight is an argument."""

    def __init__(self) -> None:
        super().__init__(aggr="add")

    def forward(self, W: Tensor, x: Tensor, edge_index: Any, edge_weight: Any = None) -> Tensor:
        edge_index, edge_weight = gcn_norm(edge_index, edge_weight, x.size(0), False, True, dtype=x.dtype)
        return self.propagate(edge_index, x=torch.matmul(x, W), edge_weight=edge_weight, size=None)  # type: ignore[no-any-return]

    def message(self, x_j: Tensor, edge_weight: Tensor) -> Tensor:
        return edge_weight.view(-1, 1) * x_j


class EvolveGCNO(nn.Module):
    """Pareja et al., EvolveGCN: the weight of the GCN is the state of a GRU."""

    def __init__(self, in_channels: int) -> None:
        super().__init__()
        self.initial_weight = nn.Parameter(torch.empty(1, in_channels, in_channels))
        self.initial_weight.data.uniform_(-1 / math.sqrt(in_channels), 1 / math.sqrt(in_channels))
        self.recurrent_layer = nn.GRU(in_channels, in_channels, 1)
        self.conv_layer = GCNConvFixedW()

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Any, W: Tensor | None) -> tuple[Tensor, Tensor]:
        W = self.initial_weight if W is None else W
        _, W = self.recurrent_layer(W, W)
        return self.conv_layer(W.squeeze(dim=0), X, edge_index, edge_weight), W


class EvolveGCNH(EvolveGCNO):
    """The form whose GRU reads the nodes of the highest scores; they make a weight, so every rank has them."""

    def __init__(self, in_channels: int) -> None:
        super().__init__(in_channels)
        self.pooling_layer = gnn.TopKPooling(in_channels, in_channels / NUM_NODES)

    def forward(self, X: Tensor, edge_index: Any, edge_weight: Any, W: Tensor | None) -> tuple[Tensor, Tensor]:
        W = self.initial_weight if W is None else W
        top = self.pooling_layer(X, edge_index)
        _, W = self.recurrent_layer(top[0][None, :, :], W)
        return self.conv_layer(W.squeeze(dim=0), X, edge_index, edge_weight), W


class Model(nn.Module):
    """A cell and a linear map."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.cell: nn.Module = {
            "GConvGRU": lambda: GConvGRU(NUM_FEATURES, 5, 2),
            "A3TGCN": lambda: A3TGCN(NUM_FEATURES, 5, NUM_PERIODS),
            "EvolveGCNO": lambda: EvolveGCNO(NUM_FEATURES),
            "EvolveGCNH": lambda: EvolveGCNH(NUM_FEATURES),
        }[name]()
        self.linear = nn.Linear(4 if "Evolve" in name else 5, 1)

    def forward(self, snapshot: Data, edges: Any, weight: Any, state: Any) -> tuple[Tensor, Any]:
        if "Evolve" in self.name:
            out, state = self.cell(snapshot.x, edges, weight, state)
        else:
            out = state = self.cell(snapshot.periods if self.name == "A3TGCN" else snapshot.x, edges, weight, state)
        return self.linear(out.tanh()), state


def trained(name: str, given: list[tuple[Any, Any, Any]], is_stock: bool) -> Results:
    """Two steps, each over all snapshots with one state, as torch_geometric_temporal's examples train."""
    torch.manual_seed(2)
    model = Model(name).double()
    model = model if is_stock else distribute(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found: Results = {}
    for step in range(2):
        state: Any = None
        cost: Any = 0
        for snapshot, edges, weight in given:
            out, state = model(snapshot, edges, weight, state)
            cost = cost + F.mse_loss(out, snapshot.y)
        optimizer.zero_grad()
        cost.backward()
        if step == 0:
            found |= {f"{key}.grad": p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
            found |= {"out": out.full_tensor() if not is_stock else out}
        optimizer.step()
        found[f"loss {step}"] = cost.detach()
    return found | {key: p.detach() for key, p in model.named_parameters()}


@functools.cache
def stock_results(name: str) -> Results:
    return trained(name, [(s, s.edge_index, s.edge_weight) for s in snapshots()], is_stock=True)


def as_graphs(layout: str, name: str, expected: Results) -> None:
    """Each snapshot is a ``DistributedData`` over the nodes of the first one."""
    first, *others = snapshots()
    data = DistributedData(first, layout=layout)
    given = [data, *(DistributedData(s, nodes_of=data) for s in others)]
    assert all(s.graph.node_sharding is data.graph.node_sharding and s.plan is data.plan for s in given)
    assert [s.num_edges for s in given] == [s.num_edges for s in snapshots()]
    assert_same(trained(name, [(s, s.edge_index, s.edge_weight) for s in given], is_stock=False), expected)


def as_edge_sets(layout: str, name: str, expected: Results) -> None:
    """Features and targets stay plain; the edges are laid out once."""
    data = DistributedData(snapshots()[0], layout=layout)
    sets = [(s, data.edge_set(s.edge_index, s.edge_weight)) for s in snapshots()]
    given = [(s, edges, edges.edge_attr) for s, edges in sets]
    assert_same(trained(name, given, is_stock=False), expected)
    assert not data.graph.node_sharding.edge_sets, "nothing is looked up by value"


@pytest.mark.parametrize(
    ("world_size", "layout", "name"),
    [
        *[(1, "halo", "EvolveGCNO"), (3, "halo", "GConvGRU"), (3, "halo", "EvolveGCNH")],
        *[(1, "grid", "GConvGRU"), (3, "grid", "A3TGCN"), (3, "grid", "EvolveGCNO")],
        pytest.param(4, "halo", "A3TGCN", marks=pytest.mark.slow),
    ],
)
def test_graphs_over_the_same_nodes(workers: Pools, world_size: int, layout: str, name: str) -> None:
    workers(world_size).run(as_graphs, layout, name, stock_results(name))


@pytest.mark.parametrize(
    ("world_size", "layout", "name"),
    [
        *[(3, "halo", "A3TGCN"), (3, "halo", "EvolveGCNO"), (1, "grid", "EvolveGCNH")],
        pytest.param(3, "grid", "GConvGRU", marks=pytest.mark.slow),
    ],
)
def test_edge_sets(workers: Pools, world_size: int, layout: str, name: str) -> None:
    workers(world_size).run(as_edge_sets, layout, name, stock_results(name))


def kept_by_the_script() -> None:
    """More sets than the cache has: each keeps its operators, and no digest is compared in a call."""
    made = snapshots(12)
    data = DistributedData(made[0])
    sets = [data.edge_set(s.edge_index) for s in made]
    conv = DistributedSAGEConv(NUM_FEATURES, 3).double()
    expected = [conv(data.x, edges).full_tensor() for edges in sets]
    stock = gnn.SAGEConv(NUM_FEATURES, 3).double()
    stock.load_state_dict(conv.state_dict())
    for out, snapshot in zip(expected, made, strict=True):
        assert_same({"out": out}, {"out": stock(made[0].x, snapshot.edge_index)})
    compared, module.require_same = module.require_same, None  # type: ignore[attr-defined,assignment]
    try:
        again = [conv(data.x, edges).full_tensor() for edges in sets]
    finally:
        module.require_same = compared  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    cached = gnn.GCNConv(NUM_FEATURES, 3, cached=True).double()
    from pyg_dist import distribute
    from pyg_dist.errors import DataError

    cached = distribute(cached)
    assert torch.equal(cached(data.x, sets[1]).full_tensor(), cached(data.x, sets[1]).full_tensor())
    with pytest.raises(DataError, match="cached=True got a second graph"):
        cached(data.x, sets[2])


def refusals() -> None:
    first, second = snapshots()[:2]
    data = DistributedData(first)
    with pytest.raises(DataError, match="below num_nodes=37"):
        data.edge_set(torch.tensor([[37], [0]]))
    with pytest.raises(DataError, match=r"got a DistributedEdgeIndex\): give edge_index.full_tensor\(\)"):
        data.edge_set(data.edge_index)
    with pytest.raises(LayoutMismatchError, match="a value for each of 90 edges"):
        data.edge_set(first.edge_index, torch.ones(91))
    with pytest.raises(OptionError, match="Expected no option layout, option epsilon with nodes_of"):
        DistributedData(second, layout="grid", epsilon=0.1, nodes_of=data)
    with pytest.raises(OptionError, match="Expected nodes_of to be a DistributedData"):
        DistributedData(second, nodes_of=first)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="over the 37 nodes of nodes_of"):
        DistributedData(Data(edge_index=second.edge_index, num_nodes=40), nodes_of=data)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("body", [kept_by_the_script, refusals])
def test_edge_sets_themselves(workers: Pools, body: Callable[[], None], world_size: int) -> None:
    workers(world_size).run(body)


@on_ranks(2)
def test_a_plain_state() -> None:
    """A first state of zeros beside plain edges is told what to write."""
    data = DistributedData(snapshots()[0])
    conv = distribute(gnn.GraphConv(5, 5).double())
    for zeros in (torch.zeros(NUM_NODES, 5).double(), data.x.new_zeros(NUM_NODES, 5)):
        with pytest.raises(DataError, match=r"data\.edge_set\(edge_index\), or a state of torch\.zeros_like"):
            conv(zeros, snapshots()[1].edge_index)
        assert conv(zeros, data.edge_set(snapshots()[1].edge_index)).shape == (NUM_NODES, 5)
