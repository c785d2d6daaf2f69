"""What is kept with a tensor is dropped when the tensor changes, however it changes, and goes when it goes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from workers import Pools, on_ranks

from pyg_dist import DistributedData
from pyg_dist.conv import DistributedGCNConv
from pyg_dist.nn import NodeEmbedding

LAYOUTS: dict[str, dict[str, Any]] = {"halo": {}, "grid": {"layout": "grid", "mesh": {"x": 2}}}


def near(ours: Any, stock: Tensor) -> None:
    torch.testing.assert_close(ours.full_tensor(), stock, rtol=0, atol=1e-10)


def gradients_after_a_look() -> None:
    """Values are read before the tensor is told to learn."""
    graph = random_graph(23, 90)
    data = DistributedData(graph.clone(), layout="grid", mesh={"x": 2})
    F.normalize(data.x)
    ours, stock = data.x.requires_grad_(), graph.x.clone().requires_grad_()
    for x in (ours, stock):
        (F.normalize(x).pow(3).sum() + x.sin().sum()).backward()
    near(ours.grad, stock.grad)  # type: ignore[arg-type]


def copies() -> None:
    data = DistributedData(random_graph(23, 90), layout="grid", mesh={"x": 2})
    embedding = NodeEmbedding(data, 6, dtype=torch.float64)
    F.normalize(embedding())
    twin, values = copy.deepcopy(embedding), torch.arange(23 * 6.0).double().view(23, 6)
    twin.load_state_dict({"weight": values})
    near(F.normalize(twin()), F.normalize(values))
    F.normalize(twin()).sum().backward()
    assert twin.weight.grad is not None
    assert embedding.weight.grad is None


def leaves_are_freed() -> None:
    data = DistributedData(random_graph(23, 90), layout="grid", mesh={"x": 2})
    for uses_it in (lambda x: x.norm(), lambda x: F.normalize(x), lambda x: F.normalize(x).sum().backward()):
        embedding = NodeEmbedding(data, 6)
        uses_it(embedding())
        weight = weakref.ref(embedding.weight)
        del embedding
        gc.collect()
        assert weight() is None
    hidden = nn.Linear(5, 3).double()(data.x)
    assert hidden.to_rows() is hidden.to_rows()  # no leaf: each epoch's output is brought to rows once


@pytest.mark.parametrize("body", [gradients_after_a_look, copies, leaves_are_freed])
def test_whole_rows_of_tiles(workers: Pools, body: Callable[[], None]) -> None:
    workers(2).run(body)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "data in place": lambda x: x.data.mul_(2),
    "data of data": lambda x: x.data.data.mul_(2),
    "data of detach": lambda x: x.detach().mul_(2),
    "item of data": lambda x: x.data.__setitem__(3, 1.0),
    "data assigned": lambda x: setattr(x, "data", x.data * 2),
    "data assigned plain": lambda x: setattr(x, "data", torch.ones(x.shape, dtype=x.dtype)),
    "assigned data in place": lambda x: (setattr(x, "data", x.data * 2), x.data.add_(1)),
}


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_changes_through_data(layout: str) -> None:
    for change in CHANGES.values():
        graph = random_graph(23, 90)
        data, plain = DistributedData(graph.clone(), **LAYOUTS[layout]), graph.clone()
        ours, stock = DistributedGCNConv(5, 3).double(), GCNConv(5, 3).double()
        ours(data.x, data.edge_index)
        stock.load_state_dict(ours.state_dict())
        handed_out = data.x.data
        for side in (data, plain):
            F.normalize(side.x)
        with torch.no_grad():
            for _ in range(3):
                for name in ("x", "edge_weight"):
                    change(data[name])
                    change(plain[name])
                near(F.normalize(data.x), F.normalize(plain.x))
                out = stock(plain.x, plain.edge_index, plain.edge_weight)
                near(ours(data.x, data.edge_index, data.edge_weight), out)
                ours(handed_out, data.edge_index)
        data.x[3] = 2.0
        plain.x[3] = 2.0
        if change is CHANGES["data in place"]:  # a tensor that was handed out sees changes of where it came from
            near(ours(handed_out, data.edge_index), stock(plain.x, plain.edge_index))
        near(ours(data.x, data.edge_index), stock(plain.x, plain.edge_index))
        for mask, x in ((data.train_mask, data.x), (plain.train_mask, plain.x)):
            x[mask]
            mask.data[:5] = True
        near(data.x[data.train_mask], plain.x[plain.train_mask])


@on_ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sgd_by_hand(layout: str) -> None:
    """As in torch: no gradient flows through ``.data``, and autograd does not count its changes."""
    data = DistributedData(random_graph(23, 90), **LAYOUTS[layout])
    embedding = NodeEmbedding(data, 6, dtype=torch.float64)
    ours, stock = embedding.weight, embedding.weight.full_tensor().detach().clone().requires_grad_()
    slope = torch.linspace(-1, 1, 6, dtype=torch.float64)
    for _ in range(3):
        losses = []
        for weight in (ours, stock):
            weight.grad = None
            loss = (F.normalize(weight) * slope + weight.data).sum()
            loss.backward()
            weight.data.add_(weight.grad, alpha=-0.1)
            assert not weight.data.requires_grad
            losses.append(loss)
        torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-10)
        near(ours, stock)
    loss = (ours * ours).sum()
    ours.data.add_(1)  # autograd does not notice
    loss.backward()
