"""Activation checkpointing in both modes, with dropout: recomputation draws the same masks, and no gradient changes.

Each script runs on stock PyG and on ours (see :mod:`against_stock`); the reference is stock *with* checkpointing, and
gradients without it are compared as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from against_stock import NUM_CLASSES, NUM_FEATURES, Net, Results, Side, assert_same, gradients, sides
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from workers import Pools, WorkersError

Wrapper = Callable[..., Any]  # called as checkpoint is: the function, then its arguments


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


class Deep(nn.Module):
    """Blocks of conv, norm, dropout and a residual, each checkpointed; one conv is in two of them."""

    def __init__(self, side: Side) -> None:
        super().__init__()
        self.side = side
        self.enter = nn.Linear(NUM_FEATURES, 6)
        self.convs = nn.ModuleList([side.SAGEConv(6, 6), side.GCNConv(6, 6), side.SAGEConv(6, 6, aggr="std")])
        self.norms = nn.ModuleList([nn.LayerNorm(6), nn.BatchNorm1d(6), nn.LayerNorm(6)])
        self.leave = nn.Linear(6, NUM_CLASSES)
        self.to(side.data.x.dtype)

    def block(self, k: int, x: Tensor, edge_index: Any) -> Tensor:
        h = self.norms[k](self.convs[k](x, edge_index)).tanh()
        return self.side.dropout(h, 0.3) + x

    def forward(self, x: Tensor, edge_index: Any, through: Wrapper) -> Tensor:
        x = self.side.dropout(self.enter(x), 0.2)
        for k in (0, 1, 2, 0):
            x = through(self.block, k, x, edge_index)
        return self.leave(x)  # type: ignore[no-any-return]


def blocks(side: Side, through: Wrapper) -> Results:
    net, x = Deep(side), side.features()
    out = net(x, side.data.edge_index, through)
    side.loss(out).backward()
    return {"out": out.detach(), **gradients(net, x=x)}


def accumulated(side: Side, through: Wrapper) -> Results:
    """Several backward passes, some layers frozen, the loss inside of a checkpoint, and a penalty beside it."""
    net, x = Deep(side), side.features()
    net.norms[0].requires_grad_(False)
    for mask in ("train_mask", "other_mask"):
        out = net(x, side.data.edge_index, through)
        loss = through(side.loss, out, mask)
        (loss + 0.01 * sum(p.square().sum() for p in net.parameters())).backward()
    return gradients(net, x=x)


def constant_features(side: Side, through: Wrapper) -> Results:
    """Nothing that goes into the checkpoint wants a gradient, but a dummy that reentrant checkpointing needs."""
    net, dummy = Net(side, p=0.4), torch.ones(1, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, dummy: Tensor) -> Tensor:
        return net(x, side.data.edge_index) * dummy

    side.loss(through(run, side.data.x, dummy)).backward()
    return gradients(net, dummy=dummy)


def nested(side: Side, through: Wrapper) -> Results:
    net, x = Deep(side), side.features()

    def inner(x: Tensor) -> Tensor:
        return net.block(0, x, side.data.edge_index)

    def outer(x: Tensor) -> Tensor:
        return through(inner, through(inner, x)) + inner(x)  # type: ignore[no-any-return]

    side.loss(net.leave(through(outer, net.enter(x)))).backward()
    return gradients(net, x=x)


def several_tensors(side: Side, through: Wrapper) -> Results:
    """Rows, edge weights, plain tensors and selections go in and come out."""
    net, x, weight = Net(side), side.features(), side.data.edge_weight.detach().clone().requires_grad_()
    scale = torch.rand(NUM_CLASSES, dtype=torch.float64).requires_grad_()

    def run(x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = net(side.dropout(x, 0.3), side.data.edge_index, weight) * scale.exp()
        return out, out.mean(0), out[side.data.train_mask]

    out, mean, selected = through(run, x, weight, scale)
    (side.loss(out) + mean.square().sum() + selected.abs().sum()).backward()
    return gradients(net, x=x, weight=weight, scale=scale)


MODES = {"reentrant": True, "not reentrant": False}


def compare_modes(script: Callable[[Side, Wrapper], Results], use_reentrant: bool) -> None:
    """Ours with checkpointing is stock with it, and ours without."""
    stock, ours = sides()
    through = partial(checkpoint, use_reentrant=use_reentrant)
    results = []
    for side, wrapper in ((stock, through), (ours, through), (ours, plain)):
        torch.manual_seed(1)
        results.append(script(side, wrapper))
    assert_same(results[1], results[0])
    # Recomputation moves batch norm's running statistics a second time, in torch as in ours.
    assert_same(*({name: value for name, value in r.items() if "." not in name or "grad" in name} for r in results[1:]))


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("use_reentrant", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize(
    "script", [blocks, accumulated, constant_features, several_tensors], ids=lambda script: script.__name__
)
def test_checkpoint(workers: Pools, world_size: int, script: Callable[..., Results], use_reentrant: bool) -> None:
    workers(world_size).run(compare_modes, script, use_reentrant)


@pytest.mark.parametrize("world_size", [1, 3])
def test_checkpoint_in_a_checkpoint(workers: Pools, world_size: int) -> None:
    workers(world_size).run(compare_modes, nested, True)


@pytest.mark.parametrize("world_size", [3])
def test_checkpoint_in_a_checkpoint_needs_the_reentrant_mode(workers: Pools, world_size: int) -> None:
    """What the outer one has saved for the inner one comes back without its class: an error, not local numbers."""
    with pytest.raises(WorkersError, match=r"UnsupportedError: .* pass use_reentrant=True"):
        workers(world_size).run(compare_modes, nested, False)


def sequential(side: Side, segments: int, use_reentrant: bool) -> Results:
    layers = nn.Sequential(*(nn.Linear(NUM_FEATURES, NUM_FEATURES) for _ in range(4)), nn.Tanh()).double()
    net, x = Net(side), side.features()
    hidden = checkpoint_sequential(layers, segments, x, use_reentrant=use_reentrant)
    side.loss(net(hidden, side.data.edge_index)).backward()
    return {**gradients(net, x=x), **gradients(layers)}


def selective(side: Side) -> Results:
    """Only what is cheap is recomputed."""
    net, x = Net(side, p=0.3), side.features()
    keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default])
    out = checkpoint(net, x, side.data.edge_index, use_reentrant=False, context_fn=keep)
    side.loss(out).backward()
    return gradients(net, x=x)


def gradient_of_a_gradient(side: Side) -> Results:
    """Only the mode that is not reentrant can."""
    net, x = Net(side, p=0.3), side.features()
    loss = side.loss(checkpoint(net, x, side.data.edge_index, use_reentrant=False))
    (by_x,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + by_x.norm()).backward()
    return gradients(net, x=x)


def asked_by_autograd_grad(side: Side) -> Results:
    net, x = Net(side, p=0.3), side.features()
    loss = side.loss(checkpoint(net, x, side.data.edge_index, use_reentrant=False))
    names = dict(net.named_parameters())
    return dict(zip(["x", *names], torch.autograd.grad(loss, [x, *names.values()]), strict=True))


def saved_elsewhere(side: Side) -> Results:
    """What autograd saves passes through hooks, which see what the user would see."""
    net, x, sizes = Net(side, p=0.3), side.features(), []
    with save_on_cpu():
        side.loss(net(x, side.data.edge_index)).backward()

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor.clone()

    with saved_tensors_hooks(pack, torch.clone):
        side.loss(net(x, side.data.edge_index)).backward()
    assert sizes
    return gradients(net, x=x)


def compare(script: Callable[..., Results], *args: Any) -> None:
    results = []
    for side in sides():
        torch.manual_seed(1)
        results.append(script(side, *args))
    assert_same(results[1], results[0])


@pytest.mark.parametrize(
    "case",
    [
        (sequential, 2, True), (sequential, 3, False), (selective,), (gradient_of_a_gradient,),
        (asked_by_autograd_grad,), (saved_elsewhere,),
    ],
    ids=lambda case: case[0].__name__,
)  # fmt: skip
def test_other_forms(workers: Pools, case: tuple[Any, ...]) -> None:
    workers(3).run(compare, *case)
