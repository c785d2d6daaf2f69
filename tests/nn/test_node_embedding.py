"""Trainable rows: the same values and the same training on every layout, mesh and world size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from random_graphs import random_graph
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import conv as ours
from pyg_dist.nn import NodeEmbedding


def train(model: nn.Module, conv: nn.Module, weight: Any, data: Any, optimizer: Any) -> list[float]:
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        out = conv(weight(), data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compare(layout: str, mesh: dict[str, int] | None, name: str) -> tuple[list[float], Tensor]:
    """Train an embedding and a conv, on ours and on stock with the same first values."""
    graph = random_graph(47, 310, seed=1)
    data = pyg_dist.DistributedData(graph, layout=layout, mesh=mesh, partition="random")
    make = getattr(torch.optim, name)
    torch.manual_seed(0)
    embedding = NodeEmbedding(data, 5, dtype=torch.float64)
    conv = ours.DistributedSAGEConv(5, 4).double()
    stock_embedding = nn.Embedding(47, 5).double()
    stock_embedding.load_state_dict(embedding.state_dict())
    stock_conv = SAGEConv(5, 4).double()
    stock_conv.load_state_dict(conv.state_dict())
    got = train(embedding, conv, embedding, data, make([*embedding.parameters(), *conv.parameters()], lr=0.05))
    parameters = [*stock_embedding.parameters(), *stock_conv.parameters()]
    expected = train(stock_embedding, stock_conv, lambda: stock_embedding.weight, graph, make(parameters, lr=0.05))
    torch.testing.assert_close(torch.tensor(got), torch.tensor(expected), rtol=1e-10, atol=1e-10)
    state = embedding.state_dict()
    torch.testing.assert_close(state["weight"], stock_embedding.weight.detach(), rtol=1e-9, atol=1e-9)
    assert embedding.weight.to_local().numel() <= -(-47 * 5 // pyg_dist.world_size()) + 47
    torch.nn.init.zeros_(embedding.weight)
    embedding.load_state_dict(state)
    assert_same_bits(embedding.weight.full_tensor(), state["weight"])
    embedding.reset_parameters()
    assert not torch.equal(embedding.weight.full_tensor(), state["weight"])
    return got, state["weight"]


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_trains_as_in_one_process(workers: Pools, name: str) -> None:
    results = [result for result in workers(1).run(compare, "halo", None, name)]
    meshes = ({"x": 2, "z": 2}, {"y": 2, "z": 2}) if name == "Adam" else ()
    for layout, mesh in (("halo", None), ("grid", None), *(("grid", mesh) for mesh in meshes)):
        results += workers(4).run(compare, layout, mesh, name)
    losses = torch.tensor([losses for losses, _ in results])
    torch.testing.assert_close(losses, losses[:1].expand_as(losses), rtol=1e-10, atol=1e-10)


@on_ranks(1)
def test_bad_arguments() -> None:
    graph = random_graph(10, 30)
    with pytest.raises(pyg_dist.errors.DataError, match="expected a DistributedData"):
        NodeEmbedding(graph, 3)  # type: ignore[arg-type]
    with pytest.raises(pyg_dist.errors.OptionError, match="positive number of channels"):
        NodeEmbedding(pyg_dist.DistributedData(graph), 0)


@on_ranks(1)
def test_lists_of_tensors() -> None:
    """Functions of many tensors at once are called by optimizers: the way out is an argument of theirs."""
    weight = NodeEmbedding(pyg_dist.DistributedData(random_graph(10, 30), layout="grid"), 3).weight
    weight.square().sum().backward()
    calls: list[Callable[[], Any]] = [
        lambda: torch.optim.AdamW([weight], foreach=True).step(),
        lambda: torch.optim.AdamW([weight], fused=True).step(),
        lambda: nn.utils.clip_grad_norm_([weight], 0.1, foreach=True),
        lambda: nn.utils.clip_grad_value_([weight], 0.1, foreach=True),
    ]
    for call in calls:
        with pytest.raises(pyg_dist.errors.MixedRowsError, match="pass foreach=False, and fused=False"):
            call()


@on_ranks(2)
def test_models_with_embeddings_move() -> None:
    """``model.to`` and the like, which every script calls, with an embedding in the model."""
    for layout in ("halo", "grid"):
        data = pyg_dist.DistributedData(random_graph(10, 30), layout=layout)
        model = nn.Sequential(NodeEmbedding(data, 4), nn.Linear(4, 2))
        before = model[0].weight.full_tensor().detach().clone()
        model = model.to("cpu").double().float().to(torch.float64).cpu()
        weight = model[0].weight
        assert isinstance(weight, nn.Parameter)
        assert (weight.dtype, tuple(weight.shape)) == (torch.float64, (10, 4))
        assert torch.equal(weight.full_tensor().detach().float(), before)
        model[1](weight).sum().backward()
        assert weight.grad.full_tensor().shape == (10, 4)
