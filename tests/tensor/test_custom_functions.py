"""A script's own ``autograd.Function`` on distributed rows: what its methods see, and every gradient, against torch."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from against_stock import Results, assert_same, of_first_rank
from own_functions import (
    CLASSES,
    ONE,
    TWO,
    AddBias,
    Backward,
    Centred,
    Exp,
    Loss,
    Mapped,
    Norm,
    Once,
    Reversed,
    Scaled,
    SetUp,
    Softmax,
    Unused,
    early,
    native,
)
from random_graphs import random_graph, uneven_parts
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.utils.checkpoint import checkpoint
from torch_geometric import nn as gnn
from workers import on_ranks

import pyg_dist
from pyg_dist.errors import LayoutMismatchError, UnsupportedError

N = 61


def loss_of(out: Any, data: Any) -> Tensor:
    if isinstance(out, tuple):
        return out[0] + out[1].square().sum()  # type: ignore[no-any-return]
    if out.dim() == 0:
        return out  # type: ignore[no-any-return]
    return F.cross_entropy(out[data.train_mask], data.y[data.train_mask]) + out.tanh().mean()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.p = gnn.GCNConv(6, CLASSES), nn.Parameter(torch.linspace(0.3, 1.1, CLASSES))

    def forward(self, x: Tensor, data: Any, call: Callable[[Tensor, Tensor], Any]) -> Tensor:
        out = call(self.conv(x, data.edge_index), self.p)
        return loss_of(out, data)


def on_edges(call: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor, Any], Any]:
    """The function on a value for each edge."""

    def run(h: Tensor, p: Tensor, data: Any) -> Any:
        out = call(h[data.edge_index[0]], p)
        return out if isinstance(out, tuple) or out.dim() == 0 else out.square().mean(0).sum() + out.norm()

    return run


def on_selection(call: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor, Tensor, Any], Any]:
    def run(h: Tensor, p: Tensor, data: Any) -> Any:
        out = call(h[data.train_mask], p)
        return out if isinstance(out, tuple) or out.dim() == 0 else F.cross_entropy(out, data.y[data.train_mask])

    return run


def calls() -> dict[str, Callable[[Tensor, Tensor, Any], Any]]:
    """What a model does with its rows and its parameter, by name."""
    found: dict[str, Callable[[Tensor, Tensor, Any], Any]] = {}
    for one in ONE:
        found[one.__name__] = lambda h, p, data, one=one: one.apply(h * p)  # type: ignore[misc]
    for two in TWO:
        found[two.__name__] = lambda h, p, data, two=two: two.apply(h, p.sigmoid())  # type: ignore[misc]
        found[f"{two.__name__} of a leaf"] = lambda h, p, data, two=two: two.apply(h, p)  # type: ignore[misc]
        found[f"{two.__name__} on edges"] = on_edges(two.apply)
        found[f"{two.__name__} on a selection"] = on_selection(two.apply)
    found["on edges"] = on_edges(lambda h, p: Norm.apply(h * p))  # type: ignore[no-untyped-call]
    found["on a selection"] = on_selection(lambda h, p: Exp.apply(h * p))  # type: ignore[no-untyped-call]
    found["several"] = lambda h, p, data: (lambda out: out[0] + out[3])(Unused.apply(h * p))  # type: ignore[no-untyped-call]
    found["some of several"] = lambda h, p, data: Unused.apply(h * p)[0]  # type: ignore[no-untyped-call]
    found["two"] = lambda h, p, data: Norm.apply(Centred.apply(h * p)) + Norm.apply(h)  # type: ignore[no-untyped-call]
    found["bound early"] = lambda h, p, data: early(h * p)  # type: ignore[no-untyped-call]
    found["native"] = lambda h, p, data: native(h * p)
    found["a factor"] = lambda h, p, data: Reversed.apply(h * p, 0.5)  # type: ignore[no-untyped-call]
    for reentrant in (True, False):
        found[f"checkpoint {reentrant}"] = lambda h, p, data, reentrant=reentrant: checkpoint(  # type: ignore[misc]
            lambda h, p: Scaled.apply(Exp.apply(h), p), h, p, use_reentrant=reentrant
        )
    found["saved elsewhere"] = _saved_elsewhere
    return found


def _saved_elsewhere(h: Tensor, p: Tensor, data: Any) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        return Exp.apply(h * p)  # type: ignore[no-untyped-call]


def step(data: Any, model: Any, call: Callable[[Tensor, Tensor, Any], Any]) -> Results:
    x = data.x.detach().clone().requires_grad_()
    loss = model(x, data, lambda h, p: call(h, p, data))
    loss.backward()
    assert x.grad is not None
    return {
        "loss": loss.detach(),
        "x": x.grad,
        **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
    }


def layouts(data: Any) -> list[Any]:
    size = pyg_dist.world_size()
    return [
        pyg_dist.DistributedData(data, partition=uneven_parts(N, size)),
        pyg_dist.DistributedData(data, layout="grid"),
    ]


@on_ranks(1, 3)
def test_gradients() -> None:
    data = random_graph(N, 420, 6, seed=5)
    torch.manual_seed(0)
    made = Model().double()
    both = layouts(data)
    expected = of_first_rank(lambda: {name: step(data, copy.deepcopy(made), call) for name, call in calls().items()})
    for ours in both:
        is_shared = pyg_dist.world_size() > 1
        stride = 1 if ours.plan.layout == "halo" and is_shared else 2  # on tiles one half alone, the other on three
        for name, call in list(calls().items())[int(stride > 1 and not is_shared) :: stride]:
            got = step(ours, pyg_dist.distribute(copy.deepcopy(made)), call)
            assert_same(got, expected[name], f"{name}, {ours.plan.layout}")


@on_ranks(1, 2)
def test_second_derivatives() -> None:
    data = random_graph(N, 420, 6, seed=5)
    for ours in layouts(data):
        for function in (Norm, Centred, Exp, Softmax, SetUp, Scaled, Mapped, Loss):
            results: list[Results] = []
            for side in (data, ours):
                x = side.x.detach().clone()[:, :CLASSES].clone().requires_grad_()
                p = torch.linspace(0.3, 1.1, CLASSES, dtype=torch.float64).requires_grad_()
                out: Any = function.apply(x, p) if function in TWO else function.apply(x * p)  # type: ignore[no-untyped-call]
                of_x, of_p = torch.autograd.grad(out.tanh().square().sum(), (x, p), create_graph=True)
                (of_x.square().sum() + of_p.pow(3).sum()).backward()
                results.append({"x": of_x.detach(), "p": of_p.detach(), "x twice": x.grad, "p twice": p.grad})
            assert_same(results[1], results[0], f"{function.__name__}, {ours.plan.layout}")
        x = ours.x.detach().clone().requires_grad_()
        (once,) = torch.autograd.grad(Once.apply(x).tanh().sum(), x, create_graph=True)  # type: ignore[no-untyped-call]
        with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_different"):
            once.square().sum().backward()


class Seen(Function):
    """Says what it sees."""

    kinds: list[str]

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor) -> Any:
        ctx.save_for_backward(x, p)
        assert isinstance(ctx, torch.autograd.function.FunctionCtx)
        assert ctx.needs_input_grad == (True, False)
        return x * p, p * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor, of_p: Tensor) -> Any:
        Seen.kinds = [f"{type(t).__name__} {list(t.shape)}" for t in (g, of_p, *ctx.saved_tensors)]
        return g, None


class Local(Backward):
    """Gives this rank's rows for all."""

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g.to_local()[:1]


class TooFew(AddBias):
    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return (g,)


class Captures(Function):
    """Reads rows that are no argument, or part of one."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, rows: list[Tensor]) -> Any:
        return rows[0] + p

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.sum(0), None


class Keeps(Backward):
    """An attribute lives as long as what comes out."""

    kept: weakref.ref[Any]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = Centred()  # type: ignore[no-untyped-call]
        Keeps.kept = weakref.ref(ctx.kept)
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        assert ctx.kept is Keeps.kept()
        del ctx.kept
        assert not hasattr(ctx, "kept")
        return g


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@on_ranks(1, 2)
def test_what_a_function_keeps_goes_with_its_output() -> None:
    x = pyg_dist.DistributedData(random_graph(N, 420, 6, seed=5)).x.detach().clone().requires_grad_()
    gc.disable()
    out: Any = Keeps.apply(x)  # type: ignore[no-untyped-call]
    assert Keeps.kept() is not None
    out.sum().backward()
    del out
    left = Keeps.kept()
    gc.enable()
    del Keeps.kept
    assert left is None


@on_ranks(1)
def test_methods_may_be_any_callable() -> None:
    """Also of functions without rows, while there are some elsewhere."""
    x = pyg_dist.DistributedData(random_graph(N, 420, 6, seed=5)).x.detach().clone().requires_grad_()
    plain = torch.ones(3, requires_grad=True)

    class Scales(Function):
        forward = functools.partial(lambda factor, ctx, x: x * factor, 3.0)  # type: ignore[assignment]
        backward = staticmethod(lambda ctx, g: g * 3.0)

    for value in (plain, x):
        Scales.apply(value).sum().backward()  # type: ignore[no-untyped-call]
        grad: Any = value.grad
        assert torch.equal(getattr(grad, "full_tensor", grad.clone)(), torch.full(value.shape, 3.0, dtype=value.dtype))
    with mock.patch.object(Scales, "forward", lambda ctx, x: x * 5):
        assert torch.equal(Scales.apply(plain), torch.full((3,), 5.0))  # type: ignore[no-untyped-call]
    assert torch.equal(Scales.apply(plain), torch.full((3,), 3.0))  # type: ignore[no-untyped-call]


@on_ranks(1, 2)
def test_what_a_function_sees() -> None:
    ours = pyg_dist.DistributedData(random_graph(N, 420, 6, seed=5))
    x = ours.x.detach().clone().requires_grad_()
    out, doubled = Seen.apply(x, torch.ones(6, dtype=torch.float64))  # type: ignore[no-untyped-call]
    assert (type(out).__name__, type(doubled)) == ("NodeTensor", Tensor)
    assert out.grad_fn.name() == "SeenBackward"
    out.sum().backward()
    assert Seen.kinds == ["NodeTensor [61, 6]", "Tensor [6]", "NodeTensor [61, 6]", "Tensor [6]"]
    del Seen.kinds
    p = torch.ones(6, dtype=torch.float64)
    assert Captures.apply(p, [x.detach()]).shape == x.shape  # type: ignore[no-untyped-call]
    with pytest.raises(
        UnsupportedError, match=r"Captures\.apply expected the distributed tensors that its forward reads"
    ):
        Captures.apply(p.requires_grad_(), [x.detach()])  # type: ignore[no-untyped-call]
    with pytest.raises(LayoutMismatchError, match="Expected a gradient or value for 61 nodes"):
        Local.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    with pytest.raises(
        RuntimeError, match=r"TooFewBackward returned an incorrect number of gradients \(expected 2, got 1\)"
    ):
        TooFew.apply(x, torch.ones(6, dtype=torch.float64)).sum().backward()  # type: ignore[no-untyped-call]
