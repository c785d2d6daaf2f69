"""Tiles behave as the whole tensor: against torch on the gathered one, on several meshes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bits import assert_same_bits
from random_graphs import random_graph
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from workers import Pools, on_ranks

import pyg_dist
from pyg_dist import DistributedData
from pyg_dist.conv import DistributedGCNConv, DistributedSAGEConv
from pyg_dist.errors import MixedRowsError

MESHES = {1: [{}], 4: [{"x": 2, "y": 2}, {"y": 2, "z": 2}, {"x": 2, "z": 2}], 6: [{"x": 3, "y": 2}]}
LAYOUTS: list[tuple[int, str, Any]] = [
    (2, "halo", None),
    (1, "grid", {}),
    (4, "grid", {"x": 2, "y": 2}),
    (2, "grid", {"z": 2}),
]


def whole(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def both(data: Any, mesh_seed: int = 0) -> tuple[Any, Tensor]:
    """A tile that learns, in a layout that a conv leaves, and its plain twin."""
    full = torch.randn(47, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data.x = full
    return data.x.detach().requires_grad_(), full.clone().requires_grad_()


W = torch.linspace(-1, 1, 35, dtype=torch.float64).view(5, 7)
V = torch.linspace(0.5, 2, 7, dtype=torch.float64)
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relu": lambda x: x.relu(),
    "add a number": lambda x: 2 - x * 3,
    "add a row": lambda x: x + V,
    "one number for all": lambda x: x * V.sum().sigmoid(),
    "a row of ones": lambda x: x * V.view(1, 7),
    "by rows": lambda x: x * torch.arange(47.0).double().view(47, 1),
    "by everything": lambda x: x * torch.arange(47.0 * 7).double().view(47, 7),
    "where": lambda x: torch.where(x > 0, x, -x * 2),
    "square of itself": lambda x: x * x + x / (x.abs() + 1),
    "linear": lambda x: F.linear(x, W, W[:, 0]),
    "linear with one bias": lambda x: F.linear(x, W, W[0, :1]),
    "linear with a bias by rows": lambda x: F.linear(x, W, torch.arange(47.0).double().view(47, 1)),
    "matmul": lambda x: x @ W.t(),
    "layer_norm": lambda x: F.layer_norm(x, (7,), V, V - 1),
    "layer_norm without weights": lambda x: F.layer_norm(x, (7,), eps=0.1),
    "rms_norm": lambda x: F.rms_norm(x, (7,), V),
    "rms_norm with eps": lambda x: F.rms_norm(input=x, normalized_shape=[7], eps=0.2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, V, V - 1, True),
    "prelu": lambda x: F.prelu(x, V),
    "log_softmax": lambda x: x.log_softmax(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "column": lambda x: x[:, 2],
    "columns": lambda x: x[:, 1:4],
    "one row": lambda x: x[5],
    "rows by ids": lambda x: x[torch.tensor([4, 0, 4, 46])],
    "sum": lambda x: x.sum(),
    "mean of columns": lambda x: x.mean(0),
    "mean of rows": lambda x: x.mean(1),
    "centred": lambda x: x - x.mean(0),
    "norm": lambda x: x.norm(),
    "cat": lambda x: torch.cat([x, x.tanh()], dim=-1),
    "clone": lambda x: x.clone().detach(),
    "float": lambda x: x.float().double(),
    "masked_fill": lambda x: x.masked_fill(x > 0.3, 0.0),
    "in place": lambda x: (x * 1).add_(1).mul_(2).relu_(),
    "assignment": lambda x: assigned(x * 1),
    "max": lambda x: x.max(dim=1).values,
    "prod": lambda x: x.view(47, 7, 1).prod(1),
    "like": lambda x: torch.zeros_like(x) + x.new_ones(7),
}


def assigned(x: Any) -> Any:
    x[torch.tensor([1, 5])] = 3.0
    x[:, 2] = -1.0
    return x


def functions(mesh: dict[str, int], stride: int) -> None:
    data = pyg_dist.DistributedData(random_graph(47, 310, seed=1), layout="grid", mesh=mesh)
    for name, function in list(FUNCTIONS.items())[stride - 1 :: stride]:
        x, plain = both(data)
        out, want = function(x), function(plain)
        assert out.shape == want.shape, name
        torch.testing.assert_close(whole(out), want, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")
        if want.requires_grad:
            weight = torch.linspace(-1, 1, want.numel(), dtype=torch.float64).view(want.shape)
            (out * weight).sum().backward()
            (want * weight).sum().backward()
            torch.testing.assert_close(
                whole(x.grad), plain.grad, rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )


@on_ranks(4)
def test_parameters_of_another_width() -> None:
    """Every rank raises, before it sends anything: a slice on some ranks, or on all of them, would fit."""
    data = pyg_dist.DistributedData(random_graph(47, 310, seed=1), layout="grid", mesh={"x": 2, "y": 2})
    x, _ = both(data)
    conv = DistributedGCNConv(7, 12).double()

    def refused(function: Callable[..., Any], *args: Any) -> None:
        with pytest.raises(pyg_dist.errors.DataError, match="Expected"):
            function(*args)

    sent = data.traffic.num_bytes
    for width in (3, 9, 1):
        v, fits = torch.ones(width, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
        for channels in ((v, fits), (fits, v), (fits, fits, v), (fits, fits, None, v)):
            refused(F.batch_norm, x, *channels)
            refused(F.batch_norm, x, *(*channels, None, None)[:4], True)
        assert torch.equal(fits, torch.ones_like(fits))
        refused(F.layer_norm, x, (7,), v)
        refused(F.layer_norm, x, (7,), None, v)
        refused(F.rms_norm, x, (7,), v)
    refused(F.batch_norm, x, None, None)
    refused(F.linear, x, W, W[0])
    assert data.traffic.num_bytes == sent
    conv.bias = torch.nn.Parameter(torch.ones(14, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="must match"):
        conv(x, data.edge_index)


@pytest.mark.parametrize("num_ranks", [1, 4, pytest.param(6, marks=pytest.mark.slow)])
def test_functions(workers: Pools, num_ranks: int) -> None:
    """All on the first mesh of so many ranks, a part of them on each other one."""
    for turn, mesh in enumerate(MESHES[num_ranks]):
        workers(num_ranks).run(functions, mesh, turn + 1)


def autograd(mesh: dict[str, int]) -> None:
    data = pyg_dist.DistributedData(random_graph(47, 310, seed=1), layout="grid", mesh=mesh)
    x, plain = both(data)
    # Gradients of gradients, through a linear map and a sum over columns.
    for of in (lambda x: (F.linear(x, W).tanh() ** 2).sum(), lambda x: F.layer_norm(x, (7,)).pow(3).sum()):
        (g,) = torch.autograd.grad(of(x), x, create_graph=True)
        (h,) = torch.autograd.grad(of(plain), plain, create_graph=True)
        torch.testing.assert_close(whole(g), h, rtol=1e-10, atol=1e-10)
        (g,) = torch.autograd.grad((g * g).sum(), x)
        (h,) = torch.autograd.grad((h * h).sum(), plain)
        torch.testing.assert_close(whole(g), h, rtol=1e-9, atol=1e-9)
    seen = []
    handle = x.register_hook(lambda g: seen.append(g.shape))
    checkpoint(lambda t: F.dropout(t, 0.5).tanh(), x, use_reentrant=False).sum().backward()
    handle.remove()
    assert seen == [torch.Size((47, 7))]
    twin = copy.deepcopy(x)
    assert_same_bits(twin.full_tensor(), x.full_tensor())
    assert_same_bits(twin.grad.full_tensor(), x.grad.full_tensor())
    x.grad = None
    x.grad = torch.ones(47, 7, dtype=torch.float64)
    assert torch.equal(x.grad.full_tensor(), torch.ones(47, 7, dtype=torch.float64))
    x.grad = (plain.detach() * 2).clone()
    torch.testing.assert_close(x.grad.full_tensor(), plain.detach() * 2)
    x.grad = data.y.view(-1, 1).double().expand(47, 7) * 1  # whole rows for a tile
    assert x.grad.shape == (47, 7)
    assert "NodeTensor(shape=[47, 7]" in repr(x)
    assert isinstance(x, pyg_dist.NodeTensor)
    assert x.numel() == 329
    assert len(x) == 47
    with pytest.raises(pyg_dist.errors.MixedRowsError, match="pickled"):
        copy.copy(x)
    with pytest.raises(IndexError, match="out of range"):
        x.sum(5)


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_autograd(workers: Pools, num_ranks: int) -> None:
    for mesh in MESHES[num_ranks][:2]:
        workers(num_ranks).run(autograd, mesh)


def draws(layout: str, mesh: dict[str, int] | None) -> dict[str, Tensor]:
    graph = random_graph(47, 310, seed=1)
    data = pyg_dist.DistributedData(graph, layout=layout, mesh=mesh, partition="random")
    conv = DistributedGCNConv(5, 7).double()
    with torch.no_grad():
        for p in conv.parameters():
            p.fill_(0.1)
    torch.manual_seed(0)
    h = conv(data.x, data.edge_index)
    ones = h * 0 + 1
    results = {
        "input": F.dropout(data.x * 0 + 1, 0.3),
        "hidden": F.dropout(ones, 0.3),
        "in place": F.dropout(ones.clone(), 0.3, inplace=True),
        "uniform": torch.rand_like(h),
        "normal": torch.randn_like(h),
        "bernoulli": torch.bernoulli(ones * 0.4),
        "bernoulli_": ones.clone().bernoulli_(ones * 0.4),
        "exponential_": ones.clone().exponential_(2.0),
        "normal of tiles": torch.normal(ones, ones * 2),
        "normal of a number": torch.normal(1.0, ones),
        "log_normal_": ones.clone().log_normal_(0.5, 0.25),
        "cauchy_": ones.clone().cauchy_(),
        "geometric_": ones.clone().geometric_(0.3),
        "randint_like": torch.randint_like(ones, 3, 9),
        "randint_like of integers": torch.randint_like(ones, 9, dtype=torch.int64),
        "random_": ones.clone().random_(3, 9),
        "random_ of integers": ones.long().random_(9),
        "few counts": torch.poisson(ones * 2.5),
        "many counts": torch.poisson(ones * 40),
        "gamma": torch.distributions.Gamma(ones * 0.3, ones * 2).rsample(),
        "beta": torch.distributions.Beta(ones * 2, ones).sample(),
        "dirichlet": torch.distributions.Dirichlet(ones * 2).sample(),
        "alpha_dropout": F.alpha_dropout(ones, 0.2, training=True),
        "alpha_dropout in place": F.alpha_dropout(ones.clone(), 0.2, True, inplace=True),
        "feature_alpha_dropout": torch.feature_alpha_dropout(ones, 0.2, True),
        "feature_dropout": torch.feature_dropout(ones, 0.25, True),
        "dropout1d": F.dropout1d(ones.unsqueeze(-1), 0.25).squeeze(-1),
        "dropout2d": F.dropout2d(torch.stack([ones, ones], dim=-1), 0.25)[..., 0],
        "rrelu": F.rrelu(-ones, training=True),
        "rrelu_": torch.rrelu_(-ones, 0.1, 0.3, True),
        "gumbel_softmax": F.gumbel_softmax(ones, hard=True),
        "multinomial": torch.multinomial(ones, 3),
        "init.kaiming_uniform_": torch.nn.init.kaiming_uniform_(ones.clone()),
        "init.trunc_normal_": torch.nn.init.trunc_normal_(ones.clone()),
    }
    return {name: value.detach().full_tensor() for name, value in results.items()}


# Powers, logarithms and tangents round by a number's place in a vector.
TAKE_POWERS = (
    "exponential_", "log_normal_", "cauchy_", "gamma", "beta", "dirichlet", "gumbel_softmax", "init.trunc_normal_",
)  # fmt: skip


def test_masks_are_those_of_every_other_layout(workers: Pools) -> None:
    expected = workers(1).run(draws, "halo", None)[0]
    for num_ranks, layout, mesh in LAYOUTS:
        for got in workers(num_ranks).run(draws, layout, mesh):
            for name, value in expected.items():
                what = f"{name} of {num_ranks} ranks, {layout}, {mesh}"
                if name in TAKE_POWERS:
                    torch.testing.assert_close(got[name], value, rtol=1e-13, atol=0, msg=what)
                else:
                    assert_same_bits(got[name], value, what)


def dropout_losses(layout: str, mesh: dict[str, int] | None) -> list[float]:
    graph = random_graph(47, 310, seed=1)
    data = pyg_dist.DistributedData(graph, layout=layout, mesh=mesh, partition="random")
    torch.manual_seed(0)
    first, second = DistributedSAGEConv(5, 11).double(), DistributedSAGEConv(11, 4).double()
    optimizer = torch.optim.Adam([*first.parameters(), *second.parameters()], lr=0.05)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        h = F.dropout(first(F.dropout(data.x, 0.2), data.edge_index).relu(), 0.5)
        loss = F.cross_entropy(second(h, data.edge_index)[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_dropout_trains_alike_on_every_layout(workers: Pools) -> None:
    expected = torch.tensor(workers(1).run(dropout_losses, "halo", None)[0])
    for num_ranks, layout, mesh in LAYOUTS:
        for got in workers(num_ranks).run(dropout_losses, layout, mesh):
            torch.testing.assert_close(torch.tensor(got), expected, rtol=1e-10, atol=1e-10)


def reentrant(mesh: dict[str, int]) -> None:
    """Gradients that a reentrant checkpoint hands to the engine are node tensors, and meet changes of layout."""
    from torch_geometric.nn import GCNConv

    graph = random_graph(23, 90)
    layers = [[kind(5, 5).double() for _ in range(3)] for kind in (DistributedGCNConv, GCNConv)]
    for ours, stock in zip(*layers, strict=True):
        stock.load_state_dict(ours.state_dict())
    for side, convs in zip((DistributedData(graph.clone(), layout="grid", mesh=mesh), graph), layers, strict=True):
        h = convs[0](side.x, side.edge_index).tanh()
        h = h + convs[1](h, side.edge_index)
        checkpoint(convs[2], h, side.edge_index, use_reentrant=True).sin().sum().backward()
    for ours, stock in zip(*layers, strict=True):
        torch.testing.assert_close(ours.lin.weight.grad, stock.lin.weight.grad, rtol=0, atol=1e-10)


def test_reentrant_checkpoints(workers: Pools) -> None:
    for mesh in ({"x": 2, "y": 2}, {"y": 2, "z": 2}):
        workers(4).run(reentrant, mesh)


@on_ranks(2)
@pytest.mark.parametrize("mesh", [{"y": 2}, {"x": 2}], ids=str)
def test_views(mesh: dict[str, int]) -> None:
    """Columns of a tile are copies, where torch has views: writing to them raises, assigning to the tile works."""
    graph = random_graph(47, 310, seed=1)
    data = pyg_dist.DistributedData(graph, layout="grid", mesh=mesh)
    tile, full = both(data)
    writes: dict[str, Callable[[Any], Any]] = {
        "columns": lambda x: x[:, :2].zero_(),
        "a view of a view": lambda x: x[:, 1:][:, :2].mul_(3),
        "a column": lambda x: x[:, 3].add_(1),
        "another shape": lambda x: x.view(-1, 7, 1)[:, 2].relu_(),
        "a range": lambda x: x.narrow(1, 4, 3).exp_(),
        "an operator": lambda x: x[:, 4:].__imul__(2),
        "assignment": lambda x: x[:, :3].__setitem__((slice(None), 1), 5.0),
        "of a detached tile": lambda x: x.detach()[:, :2].add_(1),
        "a detached column": lambda x: x[:, 0].detach().add_(1),
        "data": lambda x: x[:, :2].data.add_(1),
        "a function in place": lambda x: F.relu(x[:, :2], inplace=True),
        "out": lambda x: torch.add(x[:, :2], 1, out=x[:, :2]),
    }
    for name, write in writes.items():
        for x in (tile * 1, tile.detach() * 1):
            with pytest.raises(MixedRowsError, match="of columns of rows in tiles would change a copy"):
                write(x)
            assert_same_bits(whole(x), full, name)
            assert_same_bits(whole(x[:, :5]), full[:, :5], name)
    x, y = tile * 1, full * 1
    for z in (x, y):
        z[:, :2] = z[:, :2].exp() * 3
        z[:, 3] = z[:, :2].clone().mul_(2).sum(1)
        (z * z).sum().backward()
    torch.testing.assert_close(whole(x), y, rtol=0, atol=1e-10)
    torch.testing.assert_close(tile.grad.full_tensor(), full.grad, rtol=0, atol=1e-10)
    x = tile.detach().clone()
    with pytest.raises(MixedRowsError, match="does not take 'out'"):
        torch.add(x, 1, out=torch.zeros(47, 7, dtype=torch.float64))
    torch.add(x, 1, out=(out := torch.empty_like(x)))
    assert torch.equal(out.full_tensor(), x.full_tensor() + 1)
