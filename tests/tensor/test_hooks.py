"""Hooks of parameters, rows and modules: each is a script, run on stock PyG and on ours (:mod:`against_stock`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_stock import Net, Results, Side, compare, gradients
from torch import Tensor, nn
from workers import Pools


def hooks_on_parameters(side: Side) -> Results:
    """They see the whole gradient, once, and what they return counts; shared and removed ones, too."""
    net, seen = Net(side), {}

    def hook(gradient: Tensor) -> Tensor:
        seen["weight"] = gradient.clone()
        return gradient / gradient.norm()

    calls = []
    net.first.lin_l.weight.register_hook(hook)
    net.first.lin_r.weight.register_hook(lambda gradient: calls.append(1)).remove()
    net.norm.weight.register_hook(lambda gradient: calls.append(2))
    hidden = net.first(side.data.x, side.data.edge_index)
    out = net.second(net.norm(net.norm(hidden)), side.data.edge_index)
    side.loss(out).backward()
    return {**gradients(net), "seen": seen["weight"], "calls": calls}


def hooks_on_several(side: Side) -> Results:
    """One hook for several gradients, of parameters and rows."""
    net, x, seen = Net(side), side.features(), []
    watched = [net.first.lin_l.weight, x, net.second.bias]
    torch.autograd.graph.register_multi_grad_hook(watched, lambda found: seen.extend(g.abs().sum() for g in found))
    torch.autograd.graph.register_multi_grad_hook(watched, lambda g: seen.append(g.square().sum()), mode="any")
    side.loss(net(x, side.data.edge_index)).backward()
    return {**gradients(net, x=x), **{f"seen {k}": value for k, value in enumerate(seen)}}


def hooks_after_accumulation(side: Side) -> Results:
    """They find the finished sum in ``.grad``, as the optimizer-in-backward recipe needs."""
    net, x, seen = Net(side), side.features(), {}

    def step(p: Tensor) -> None:
        seen[p] = p.grad.clone()
        p.data.sub_(0.1 * p.grad)
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    x.register_post_accumulate_grad_hook(step)
    loss = side.loss(net(x, side.data.edge_index)) + 0.1 * sum(p.square().sum() for p in net.parameters())
    loss.backward()
    named = {**dict(net.named_parameters()), "x": x}
    return {**{n: p.detach() for n, p in named.items()}, **{f"seen {n}": seen[p] for n, p in named.items()}}


def hooks_on_rows(side: Side) -> Results:
    """On features and on what is computed from them: a norm in a hook is global."""
    net, x, seen = Net(side), side.features(), {}
    hidden = net.norm(net.first(x, side.data.edge_index))
    hidden.retain_grad()
    hidden.register_hook(lambda gradient: gradient / gradient.norm())
    x.register_hook(lambda gradient: seen.update(x=gradient.clone(), total=gradient.abs().sum()))
    side.loss(net.second(hidden.tanh(), side.data.edge_index)).backward()
    return {**gradients(net, x=x), **seen, "hidden.grad": hidden.grad}


def hooks_on_modules(side: Side) -> Results:
    """Backward hooks of modules see rows as well, and what they return counts."""
    net, x, seen = Net(side), side.features(), {}

    def clip(module: nn.Module, by_input: Any, by_output: Any) -> Any:
        seen["total"] = by_output[0].sum().clone()
        return tuple(g / g.norm() for g in by_input)

    net.norm.register_full_backward_hook(clip)
    net.first.register_full_backward_hook(lambda module, i, o: seen.update(first=i[0].clone(), rows=len(i[0])))
    net.second.register_full_backward_pre_hook(lambda module, o: (o[0] / o[0].norm(),))
    net.first.lin_l.register_full_backward_hook(lambda module, i, o: seen.update(lin_l=o[0].abs().sum()))
    net.register_forward_hook(lambda module, i, o: seen.update(out=o.detach().mean()) or o * 2)
    side.loss(net(x, side.data.edge_index)).backward()
    return {**gradients(net, x=x), **seen}


SCRIPTS = [hooks_on_parameters, hooks_on_several, hooks_after_accumulation, hooks_on_rows, hooks_on_modules]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_hooks(workers: Pools, world_size: int, script: Callable[[Side], Results]) -> None:
    workers(world_size).run(compare, script)
