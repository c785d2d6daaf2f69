"""Stock convs on a sparse ``adj_t``: as PyG runs them on it, or refused where its values are no edge weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import Results, assert_same, gradients, of_first_rank
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch_geometric import nn as gnn
from torch_geometric.data import Data
from torch_geometric.utils import add_self_loops, coalesce, remove_self_loops, to_torch_csr_tensor
from workers import on_ranks

import pyg_dist
from pyg_dist import distribute
from pyg_dist.conv import DistributedGCNConv

F, G, NUM_NODES = 6, 4, 47


class Looped(gnn.MessagePassing):
    """Asks for a loop at each node without saying how many there are: the matrix has its shape."""

    def forward(self, x: Tensor, adj_t: Tensor) -> Any:
        return self.propagate(add_self_loops(adj_t)[0], x=x)


WEIGHTED: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: gnn.GCNConv(F, G),
    "GCN2": lambda: gnn.GCN2Conv(F, 0.1),
    "GCN2 without loops": lambda: gnn.GCN2Conv(F, 0.1, add_self_loops=False),
    "Graph": lambda: gnn.GraphConv(F, G),
    "Graph lstm": lambda: gnn.GraphConv(F, G, aggr=gnn.aggr.LSTMAggregation(F, F)),
    "TAG": lambda: gnn.TAGConv(F, G),
    "SG": lambda: gnn.SGConv(F, G, K=2),
    "APPNP": lambda: gnn.APPNP(3, 0.1),
    "GatedGraph": lambda: gnn.GatedGraphConv(F, 2),
    "LE": lambda: gnn.LEConv(F, G),
    "LG": lambda: gnn.LGConv(),
    "MixHop": lambda: gnn.MixHopConv(F, G),
    "FA": lambda: gnn.FAConv(F),
}
CONVS = WEIGHTED | {
    "GAT": lambda: gnn.GATConv(F, G, heads=2),
    "GIN": lambda: gnn.GINConv(nn.Linear(F, G)),
    "GIN max": lambda: gnn.GINConv(nn.Linear(F, G), aggr="max"),
    "Edge": lambda: gnn.EdgeConv(nn.Linear(2 * F, G)),
    "EG": lambda: gnn.EGConv(F, 8, ["symnorm", "max", "mean"], num_heads=2, num_bases=2),
    "SAGE lstm": lambda: gnn.SAGEConv(F, G, aggr="lstm"),
    "of a script": lambda: Looped(),
}


def graph(is_weighted: bool, has_loops: bool) -> Data:
    data = random_graph(NUM_NODES, 310, F, seed=1)
    edge_index = data.edge_index if has_loops else remove_self_loops(data.edge_index)[0]
    edge_index = coalesce(edge_index.flip(0))
    edge_index = edge_index[:, (edge_index < NUM_NODES - 2).all(0)]  # the last two nodes have no edges
    values = torch.rand(edge_index.shape[1], generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values = values if is_weighted else torch.ones_like(values)
    adj_t = to_torch_csr_tensor(edge_index, values, size=(NUM_NODES, NUM_NODES))
    return Data(x=data.x, y=data.y, train_mask=data.train_mask, adj_t=adj_t)


def step(data: Any, make: Callable[[], nn.Module], is_ours: bool) -> Results:
    torch.manual_seed(0)
    model = make().double()
    if is_ours:
        pyg_dist.distribute(model)
    x = data.x.detach().clone().requires_grad_()
    given = (x, x.tanh()) if isinstance(model, (gnn.GCN2Conv, gnn.FAConv)) else (x,)
    out = model(*given, data.adj_t)
    loss = (out.tanh() * (out.sigmoid() + 1)).square().mean()
    loss.backward()
    return {"out": out.detach(), "loss": loss.detach(), **gradients(model, x=x)}


@on_ranks(1, 3)
def test_convs() -> None:
    for is_weighted, has_loops in ((False, False), (False, True), (True, False), (True, True)):
        data = graph(is_weighted, has_loops)
        ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
        convs = list((WEIGHTED if is_weighted else CONVS).items())
        # Weights and self loops are two things: half of the convs with either alone, all with both and with neither.
        for name, make in convs if is_weighted == has_loops else convs[is_weighted::2]:
            expected = of_first_rank(lambda make=make, data=data: step(data, make, is_ours=False))
            assert_same(step(ours, make, is_ours=True), expected, f"{name}, {is_weighted}, {has_loops}")
        if not is_weighted:  # values that are all one are dropped, and their dtype with them
            continue
        labels = [
            model(nn.functional.one_hot(d.y).double(), d.adj_t, d.train_mask)
            for d, model in ((data, gnn.LabelPropagation(2, 0.5)), (ours, distribute(gnn.LabelPropagation(2, 0.5))))
        ]
        assert_same({"labels": labels[1]}, {"labels": labels[0]})


@on_ranks(2)
def test_refusals() -> None:
    ours = pyg_dist.DistributedData(graph(is_weighted=True, has_loops=False))
    for conv in (gnn.GATConv(F, G), gnn.GINConv(nn.Linear(F, G)), gnn.GATConv(F, G, edge_dim=1)):
        with pytest.raises(pyg_dist.errors.UnsupportedError, match="got adj_t, whose values"):
            pyg_dist.distribute(conv.double())(ours.x, ours.adj_t)


@on_ranks(1, 2)
def test_improved() -> None:
    """GCN's heavier loops leave the adj_t as it is, for convs that read no values and for other dtypes."""
    data = graph(is_weighted=False, has_loops=True)
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(NUM_NODES, pyg_dist.world_size()))
    for layout in (ours, pyg_dist.DistributedData(data, layout="grid")):
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(0)
            stock, conv = (kind(F, G, improved=True).to(dtype) for kind in (gnn.GCNConv, DistributedGCNConv))
            conv.load_state_dict(stock.state_dict())
            adj_t = data.adj_t.to(dtype)
            out, expected = conv(layout.x.to(dtype), layout.adj_t), stock(data.x.to(dtype), adj_t)
            assert out.dtype == dtype
            torch.testing.assert_close(
                out.full_tensor(), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-10
            )
    pyg_dist.distribute(gnn.GINConv(nn.Linear(F, G)).double())(ours.x, ours.adj_t)
