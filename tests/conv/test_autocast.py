"""Attention and messages by blocks under autocast: stock PyG's dtypes, and errors of the same size."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from against_stock import Results, gradients
from random_graphs import random_graph, uneven_parts
from test_message_blocks import runs_by_blocks
from torch import Tensor, nn
from torch_geometric import nn as gnn
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist.conv import attention

F, C = 6, 4
ATTENTION: dict[str, Callable[[], Any]] = {
    "GATConv": lambda: gnn.GATConv(F, C, heads=3, edge_dim=3, residual=True),
    "GATConv, pair": lambda: gnn.GATConv((F, F), C, heads=2, concat=False),
    "GATv2Conv": lambda: gnn.GATv2Conv(F, C, heads=3, edge_dim=3),
    "TransformerConv": lambda: gnn.TransformerConv(F, C, heads=2, edge_dim=3, beta=True),
    "AGNNConv": lambda: gnn.AGNNConv(),
    "GeneralConv": lambda: gnn.GeneralConv(F, C, heads=2, attention=True),
}
MESSAGES: dict[str, Callable[[], Any]] = {
    "EdgeConv": lambda: gnn.EdgeConv(mlp(2 * F, C)),
    "GINEConv": lambda: gnn.GINEConv(mlp(F, C), edge_dim=3),
    "NNConv": lambda: gnn.NNConv(F, C, mlp(3, F * C)),
    "ResGatedGraphConv": lambda: gnn.ResGatedGraphConv(F, C),
}


def mlp(in_channels: int, out_channels: int) -> nn.Module:
    return nn.Sequential(nn.Linear(in_channels, 5), nn.Tanh(), nn.Linear(5, out_channels))


def attends() -> Any:
    """What counts the calls of the op of attention."""
    return patch.object(attention, "_attend", side_effect=attention._attend)


def step(model: Any, data: Any, dtype: torch.dtype | None, **arguments: Any) -> Results:
    """One step behind a linear map, whose rows autocast narrows; ``None``: without autocast."""
    x = data.x.detach().clone().requires_grad_()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        rows = model["before"](x)
        reads_edges = getattr(model["conv"], "edge_dim", None) or isinstance(model["conv"], (gnn.NNConv, gnn.GINEConv))
        is_pair = isinstance(getattr(model["conv"], "in_channels", None), tuple)
        given = [(rows, rows.tanh()) if is_pair else rows, data.edge_index, *([data.edge_attr] if reads_edges else [])]
        out = model["conv"](*given, **arguments)
        out, weights = out if isinstance(out, tuple) else (out, None)
        loss = out.float().square().sum()
        if weights is not None:
            loss = loss + weights[1].float().square().sum()
    loss.backward()
    found = {"out": out.detach(), "loss": loss.detach(), **gradients(model, x=x)}
    if weights is not None:
        found["weights"] = weights[1].detach()
    return {name: v.full_tensor() if hasattr(v, "full_tensor") else v for name, v in found.items()}


def sides(make: Callable[[], Any]) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"before": nn.Linear(F, F), "conv": make()})
    with torch.no_grad():
        for p in model.parameters():
            p.uniform_(-0.6, 0.6)
    return model, pyg_dist.distribute(copy.deepcopy(model))


def assert_as_stock(got: Results, want: Results, exact: Results, name: str) -> None:
    """Of one dtype, and off by no more than three times what stock is."""
    assert got.keys() == want.keys()
    # A bias of keys changes no softmax: its gradient is rounding, of the size of the other ones'.
    largest = max(float(v.abs().max()) for k, v in exact.items() if k.endswith("grad") and v is not None)
    for key, value in got.items():
        if value is None or want[key] is None:
            assert value is want[key] is None, f"{name}: {key}"
            continue
        assert value.dtype == want[key].dtype, f"{name}: {key} is {value.dtype}, expected {want[key].dtype}"
        scale = exact[key].abs().max().clamp(min=0.05 * largest if key.endswith("grad") else 1e-3)
        error, allowed = ((v.float() - exact[key]).abs().max() / scale for v in (value, want[key]))
        assert error <= 3 * allowed + 2**-7, (
            f"{name}: {key} is off by {error:.1e}; stock under autocast by {allowed:.1e}"
        )


def graph() -> Any:
    return random_graph(40, 300, F, seed=3, dtype=torch.float32)


def attention_under_autocast(mesh: dict[str, int] | None) -> None:
    data = graph()
    if mesh is None:
        ours = pyg_dist.DistributedData(data, partition=uneven_parts(40, pyg_dist.world_size()))
    else:
        ours = pyg_dist.DistributedData(data, layout="grid", mesh=mesh)
    for name, make in ATTENTION.items():
        asked = {"return_attention_weights": True} if name in ("GATConv", "GATv2Conv", "TransformerConv") else {}
        for arguments in ({}, asked) if asked else ({},):
            exact, want, got = sides(make)[0], sides(make)[0], sides(make)[1]
            with attends() as seen:
                found = step(got, ours, torch.bfloat16, **arguments)
            assert seen.call_count == 1, f"{name} took PyG's steps"
            wanted = step(want, data, torch.bfloat16, **arguments), step(exact, data, None, **arguments)
            assert_as_stock(found, *wanted, f"{name} {arguments}")


@pytest.mark.parametrize("world_size", [1, 3])
def test_attention(workers: Pools, world_size: int) -> None:
    workers(world_size).run(attention_under_autocast, None)


def test_attention_on_the_grid(workers: Pools) -> None:
    mesh = {"x": 2}
    workers(math.prod(mesh.values())).run(attention_under_autocast, mesh)


@on_ranks(2)
def test_narrow_parameters() -> None:
    """Parameters of 16 bits under an autocast to the others: PyG's products of both are float32."""
    data = graph()
    data.x = data.x.bfloat16()
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(40, pyg_dist.world_size()))
    for name, make in ATTENTION.items():
        want, got = (model.bfloat16() for model in sides(make))
        exact = copy.deepcopy(want).float()
        with attends() as seen:
            found = step(got, ours, torch.float16)
        assert seen.call_count == 1, f"{name} took PyG's steps"
        wide = data.clone()
        wide.x = data.x.float()
        assert_as_stock(found, step(want, data, torch.float16), step(exact, wide, None), name)


def sums_of_attention_weights() -> float:
    """How far they are from one, at most, where edges decide."""
    data = graph()
    data.edge_attr = data.edge_attr * 20
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(40, pyg_dist.world_size()))
    _, model = sides(ATTENTION["GATv2Conv"])
    with torch.autocast("cpu", torch.bfloat16):
        rows = model["before"](ours.x)
        _, (edges, alpha) = model["conv"](rows, ours.edge_index, ours.edge_attr, return_attention_weights=True)
    target, weights = edges.full_tensor()[1], alpha.full_tensor().float()
    sums = torch.zeros(40, weights.shape[1]).index_add_(0, target, weights)
    return float((sums - 1).abs().max())


def test_attention_weights_are_a_softmax(workers: Pools) -> None:
    for off in workers(2).run(sums_of_attention_weights):
        assert off < 1e-5


@on_ranks(1, 3)
@patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": "0.002"})
def test_messages_by_blocks() -> None:
    """The backward, which makes messages again, is outside of autocast, as in every script."""
    data = graph()
    ours = pyg_dist.DistributedData(data, partition=uneven_parts(40, pyg_dist.world_size()))
    for name, make in MESSAGES.items():
        exact, want, got = sides(make)[0], sides(make)[0], sides(make)[1]
        with runs_by_blocks() as seen:
            found = step(got, ours, torch.bfloat16)
            assert seen.call_count == 1, f"{name} made all messages at once"
            assert_as_stock(found, step(want, data, torch.bfloat16), step(exact, data, None), name)
            plain = step(sides(make)[0], data, None)
            assert_as_stock(step(sides(make)[1], ours, None), plain, plain, f"{name}, then without autocast")


def narrow_parameters(mib: str) -> Tensor:
    """The gradient of a parameter whose narrow copy autocast would keep from block to block."""
    with patch.dict(os.environ, {"PYG_DIST_MESSAGE_MIB": mib}):
        data = pyg_dist.DistributedData(graph(), partition=uneven_parts(40, pyg_dist.world_size()))
        model = sides(MESSAGES["EdgeConv"])[1]
        return step(model, data, torch.bfloat16)["conv.nn.0.weight.grad"]


def test_gradients_do_not_depend_on_blocks(workers: Pools) -> None:
    by_blocks, at_once = (workers(2).run(narrow_parameters, mib)[0] for mib in ("0.002", "512"))
    torch.testing.assert_close(by_blocks, at_once, rtol=0.05, atol=0.05 * float(at_once.abs().max()))
