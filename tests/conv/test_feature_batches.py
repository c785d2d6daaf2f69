"""Features with a batch or time dimension before the nodes, ``[B, N, F]``: the numbers of stock PyG, one exchange."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from against_stock import NUM_CLASSES, NUM_FEATURES, NUM_NODES, Results, assert_same, gradients, graph, parts
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.utils import softmax
from workers import Pools

from pyg_dist import DistributedData, distribute, rank, world_size
from pyg_dist.errors import DataError, UnsupportedError

BATCH, HIDDEN, EDGE_FEATURES = 3, 4, 2
NUM_STEPS = 2
LAYOUTS = [(1, "halo"), (2, "halo"), (3, "halo"), (1, "grid"), (3, "grid")]


class Attention(gnn.MessagePassing):
    """Attention with heads of a script's own, along the edges of each item of the batch."""

    def __init__(self) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(NUM_FEATURES, 2 * HIDDEN)
        self.att = nn.Parameter(torch.randn(2, HIDDEN))
        self.out = nn.Linear(2 * HIDDEN, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Any) -> Tensor:
        rows = self.lin(x).view(*x.shape[:-1], 2 * HIDDEN)
        return self.out(self.propagate(edge_index, x=rows))  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor, index: Tensor) -> Tensor:
        heads = x_j.view(*x_j.shape[:-1], 2, HIDDEN)
        logits = F.leaky_relu(((x_i.view(heads.shape) + heads).tanh() * self.att).sum(-1), 0.2)
        alpha = softmax(logits, index, dim=logits.dim() - 2)
        return (alpha.unsqueeze(-1) * heads).flatten(-2)


class Interaction(gnn.MessagePassing):
    """An interaction network as weather models have it: edge state, sums at targets, residuals."""

    def __init__(self, aggr: str = "sum") -> None:
        super().__init__(aggr=aggr)
        self.encode = nn.Linear(EDGE_FEATURES, NUM_FEATURES)
        self.edge = nn.Sequential(nn.Linear(3 * NUM_FEATURES, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, NUM_FEATURES))
        self.norm = nn.LayerNorm(NUM_FEATURES)
        self.node = nn.Linear(2 * NUM_FEATURES, NUM_FEATURES)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        state = self.encode(edge_attr).unsqueeze(0).expand(x.shape[0], -1, -1)
        for _ in range(2):
            messages = self.edge_updater(edge_index, x=x, state=state)
            state = state + messages
            x = x + self.node(torch.cat([x, self.propagate(edge_index, messages=messages)], dim=-1))
        return x

    def edge_update(self, x_i: Tensor, x_j: Tensor, state: Tensor) -> Tensor:
        return 0.1 * self.norm(self.edge(torch.cat([state, x_j, x_i], dim=-1)))  # type: ignore[no-any-return]

    def message(self, messages: Tensor) -> Tensor:
        return messages


class Diffusion(gnn.MessagePassing):
    """A message of its own: differences of rows, and features of edges."""

    def __init__(self, aggr: str) -> None:
        super().__init__(aggr=aggr)
        self.lin = nn.Linear(NUM_FEATURES, NUM_CLASSES)
        self.attr = nn.Linear(EDGE_FEATURES, NUM_CLASSES)

    def forward(self, x: Tensor, edge_index: Any, edge_attr: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x), edge_attr=self.attr(edge_attr))  # type: ignore[no-any-return]

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return (x_j - x_i).tanh() * edge_attr


BY_BLOCKS = {"messages": 1, "attention": 1, "interaction": 2}
"""Calls of ``propagate`` in a forward."""

SHAPE = NUM_FEATURES, NUM_CLASSES
CONVS: dict[str, tuple[Callable[[], nn.Module], str]] = {  # a conv and what it takes beside x and edges
    "sage": (lambda: gnn.SAGEConv(*SHAPE), ""),
    "sage, max": (lambda: gnn.SAGEConv(*SHAPE, aggr="max", project=True), ""),
    "sage, softmax": (lambda: gnn.SAGEConv(*SHAPE, aggr=gnn.SoftmaxAggregation(learn=True), normalize=True), ""),
    "gcn": (lambda: gnn.GCNConv(*SHAPE), ""),
    "gcn, weights": (lambda: gnn.GCNConv(*SHAPE, improved=True), "edge_weight"),
    "graph": (lambda: gnn.GraphConv(*SHAPE, aggr="mean"), "edge_weight"),
    "gin": (lambda: gnn.GINConv(nn.Sequential(nn.Linear(*SHAPE), nn.ReLU()), eps=0.3, train_eps=True), ""),
    "cheb": (lambda: gnn.ChebConv(*SHAPE, K=3), "edge_weight"),
    "tag": (lambda: gnn.TAGConv(*SHAPE, K=2), "edge_weight"),
    "sg": (lambda: gnn.SGConv(*SHAPE, K=2), ""),
    "appnp": (lambda: gnn.APPNP(2, 0.3), "edge_weight"),
    "le": (lambda: gnn.LEConv(*SHAPE), "edge_weight"),
    "attention": (Attention, ""),
    "interaction": (Interaction, "edge_attr"),
    "interaction, max": (lambda: Interaction("max"), "edge_attr"),
    "messages": (lambda: Diffusion("sum"), "edge_attr"),
    "messages, std": (lambda: Diffusion("std"), "edge_attr"),
}


def data_of_batch() -> Data:
    data, generator = graph(), torch.Generator().manual_seed(8)
    data.edge_attr = torch.randn(data.num_edges, EDGE_FEATURES, generator=generator, dtype=torch.float64)
    return data


def batch() -> Tensor:
    generator = torch.Generator().manual_seed(9)
    return torch.randn(BATCH, NUM_NODES, NUM_FEATURES, generator=generator, dtype=torch.float64)


def results(data: Any, name: str, form: str) -> Results:
    """Values, gradients, and parameters after two steps. ``form``: what x is on distributed data."""
    torch.manual_seed(2)
    make, beside = CONVS[name]
    model = nn.ModuleDict({"conv": make()}).double()
    model = model if form == "stock" else distribute(model)
    x = batch().requires_grad_()
    others = [data[beside]] if beside else []
    found: Results = {}
    optimizer = torch.optim.SGD([*model.parameters(), x], lr=0.05)
    for step in range(NUM_STEPS):
        given: Any = x
        if form == "stacked":  # rows first on each rank, seen with nodes second
            given = torch.stack([data.x * 0 + item for item in x])
        out = model.conv(given, data.edge_index, *others)  # type: ignore[operator]
        target = torch.sin(torch.arange(out.shape[-1], dtype=torch.float64))
        loss = F.mse_loss(out.tanh(), (0 * out + target).detach()) + out[:, data.train_mask].square().mean()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            found |= {"out": out.full_tensor() if form != "stock" else out, **gradients(model, x=x)}
        optimizer.step()
        found[f"loss {step}"] = loss.detach()
    return found | {key: p.detach() for key, p in model.named_parameters()}


@functools.cache
def stock_results(name: str) -> Results:
    return results(data_of_batch(), name, "stock")


def as_stock(layout: str, expected: dict[str, Results]) -> None:
    data = data_of_batch()
    options: Any = {"layout": "grid"} if layout == "grid" else {"partition": parts(data, world_size())}
    distributed = DistributedData(data, **options)
    view: Any = type(distributed.graph.edge_view)
    for name, want in expected.items():
        # What x is and where it lies are two things: each conv with both, each layout with both, by turns.
        form = ["stacked", "plain"][(list(CONVS).index(name) + (layout == "grid") + world_size()) % 2]
        assert_same(results(distributed, name, form), want, f"{name}, {form}")
        if name in BY_BLOCKS:
            with (
                patch.dict("os.environ", PYG_DIST_MESSAGE_MIB="0.001"),
                patch.object(view, "reduce_by_blocks", autospec=True, side_effect=view.reduce_by_blocks) as by_blocks,
            ):
                assert_same(results(distributed, name, "plain"), want, f"{name}, by blocks")
            assert by_blocks.call_count == NUM_STEPS * BY_BLOCKS[name]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_batches(workers: Pools, world_size: int, layout: str) -> None:
    """Every third conv on one rank, the others on three: by turns, a layout after the other, each in both."""
    turn = int(layout == "grid")
    names = [name for k, name in enumerate(CONVS) if ((k + turn) % 3 == 0) == (world_size == 1)]
    workers(world_size).run(as_stock, layout, {name: stock_results(name) for name in names})


def one_exchange() -> None:
    """A batch sends as many messages as one item of it; its rows are as much wider."""
    data = DistributedData(data_of_batch())
    for make in (CONVS["sage"][0], CONVS["cheb"][0], Attention):
        conv = distribute(make()).double().eval()
        conv(batch(), data.edge_index)  # makes operators
        counts = []
        for x in (batch()[:1], batch()):
            before = data.traffic.num_messages
            with torch.no_grad():
                conv(x, data.edge_index)
            counts.append(data.traffic.num_messages - before)
        assert counts[0] == counts[1] > 0, make


def in_a_model() -> None:
    """Norms, dropout, edges of the script's own and a checkpoint; dropout draws for nodes, wherever they are."""
    from torch.utils.checkpoint import checkpoint

    data, other = data_of_batch(), torch.randint(0, NUM_NODES, (2, 80), generator=torch.Generator().manual_seed(3))
    owners = parts(data, world_size())
    found = []
    for given in (data, DistributedData(data, partition=owners)):
        torch.manual_seed(4)
        first, norm, second = gnn.GraphConv(*SHAPE), nn.LayerNorm(NUM_CLASSES), gnn.GCNConv(NUM_CLASSES, 2)
        model = nn.ModuleList([first, norm, second]).double()
        model = model if given is data else distribute(model)
        first, norm, second = model
        x = batch().requires_grad_()

        def layer(x: Tensor, edges: Any = given.edge_index, first: Any = first, norm: Any = norm) -> Tensor:
            return norm(first(x, edges)).relu()  # type: ignore[no-any-return]

        out = second(checkpoint(layer, x, use_reentrant=False), other)
        F.l1_loss(out, torch.zeros(BATCH, NUM_NODES, 2, dtype=torch.float64)).backward()
        found.append({"out": out if given is data else out.full_tensor(), **gradients(model, x=x)})
    assert_same(found[1], found[0])

    distributed = DistributedData(data, partition=owners)
    torch.manual_seed(5)
    rows = torch.stack([distributed.x, distributed.x])
    dropped = F.dropout(rows, 0.5).full_tensor()
    torch.manual_seed(5)
    alone = DistributedData(data, partition=torch.full((NUM_NODES,), world_size() - 1))
    assert torch.equal(F.dropout(torch.stack([alone.x, alone.x]), 0.5).full_tensor(), dropped), rank()
    kept = (dropped != 0).double()
    torch.testing.assert_close(dropped, 2 * kept * torch.stack([data.x, data.x]))
    assert 0.3 < kept.mean() < 0.7
    assert not torch.equal(kept[0], kept[1])


def refusals() -> None:
    data = DistributedData(data_of_batch())
    x, times = batch(), data.x.view(NUM_NODES, NUM_FEATURES, 1).expand(-1, -1, 3).transpose(1, 2)
    gcn, gat, gin = (
        distribute(conv).double() for conv in (gnn.GCNConv(*SHAPE), gnn.GATConv(*SHAPE), gnn.GINConv(nn.Linear(*SHAPE)))
    )
    moved = torch.stack([data.x, data.x])
    with pytest.raises(UnsupportedError, match=r"reads features along dimension -2 .*as x\.transpose\(0, 1\) is"):
        gcn(times, data.edge_index)
    with pytest.raises(UnsupportedError, match=r"reads features along dimension -2 .*as x\.transpose\(0, 1\) is"):
        gin(times, data.edge_index)
    assert gcn(times.transpose(0, 1), data.edge_index).shape == (3, NUM_NODES, NUM_CLASSES)
    with pytest.raises(UnsupportedError, match=r"GATConv has nodes in dimension 0 .*call it for each item of a batch"):
        gat(moved, data.edge_index)
    with pytest.raises(DataError, match=r"47 rows in dimension 0 \(got \[3, 47, 5\]\)"):
        gat(x, data.edge_index)
    with pytest.raises(DataError, match=r"47 rows in dimension -2 \(got \[3, 46, 5\]\)"):
        gcn(x[:, :46], data.edge_index)
    with pytest.raises(UnsupportedError, match=r"GCNConv has nodes in dimension -2 .*with nodes in dimension 2"):
        gcn(moved.transpose(1, 2), data.edge_index)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("body", [one_exchange, in_a_model, refusals])
def test_batches_themselves(workers: Pools, body: Callable[[], None], world_size: int) -> None:
    workers(world_size).run(body)
