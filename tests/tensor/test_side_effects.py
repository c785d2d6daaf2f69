"""Torch and other libraries beside distributed rows: all that they do gives what it gives without pyg_dist's rows.

Each behaviour runs before the first rows, beside them, and after the last ones, in a process of its own.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from random_graphs import random_graph
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex, Index
from workers import Workers

import pyg_dist


class Sub(Tensor):
    """As images of vision libraries are: a class and nothing else."""


class Boxes(Tensor):
    """With an attribute that its functions keep (torchvision's ``tv_tensors``)."""

    def __new__(cls, data: Any, size: int = 3) -> Boxes:
        out: Any = torch.as_tensor(data, dtype=torch.float32).as_subclass(cls)
        out.size_of_image = size
        return out  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
        return out.as_subclass(cls) if isinstance(out, Tensor) and func is Tensor.clone else out


class Scaled(Tensor):
    """A wrapper whose own shape is another one than that of what it wraps."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Scaled:
        out: Any = Tensor._make_wrapper_subclass(cls, (7, *inner.shape), dtype=inner.dtype)  # type: ignore[attr-defined]
        out.inner = inner
        return out  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(a.inner if isinstance(a, Scaled) else a for a in args), **(kwargs or {}))


class OwnShape(Tensor):
    """Answers for its shape itself."""

    @property
    def shape(self) -> Any:
        return torch.Size([99])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class OwnParameter(nn.Parameter):
    """A parameter's own class."""


class Twice(torch.autograd.Function):
    """A function of somebody else's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, ctx.factor = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.factor / grad.shape[0], None


class Counts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Names(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(torch.overrides.resolve_name(func) or func.__name__)
        return func(*args, **(kwargs or {}))


def ones(*size: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel()).view(size)


def work(x: Any) -> Any:
    """Constructors, conversions, aliases, views and a derivative."""
    y = torch.as_tensor(x, dtype=torch.float64) + torch.tensor(2.0) + torch.asarray([1.0])
    return torch.Tensor(y.float())[...].view_as(y) * x.to("cpu", torch.float64)


def in_mode(mode: Any) -> Any:
    with mode:
        out = work(ones(2, 3))
    return mode.seen, out


def grads_of(function: Callable[[Tensor], Tensor]) -> Any:
    x = ones(3).requires_grad_()
    out = function(x)
    out.sum().backward()
    assert out.grad_fn is not None
    return out.detach(), x.grad, out.grad_fn.name()


def in_fake() -> Any:
    with FakeTensorMode() as mode:
        out = work(mode.from_tensor(ones(2, 3)))
    return type(out).__name__, tuple(out.shape), out.dtype


def compiled(**options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(lambda x: work(x) * torch.tensor([1.0, 2.0, 3.0]), backend="eager", **options)(ones(2, 3))


def recomputed() -> Any:
    """Checkpointing compares what it has recomputed by what tensors say of themselves."""
    x = ones(3).requires_grad_()
    out = checkpoint(lambda x: x.sin() * x.cos(), x, use_reentrant=False)
    out.sum().backward()
    known = torch.utils.checkpoint._allowed_determinism_checks_to_fns["default"](ones(3).as_subclass(OwnShape))  # type: ignore[arg-type]
    assert known["shape"] == (99,)
    return out.detach(), x.grad


def lazy(make: Callable[[], nn.Module], x: Tensor) -> Any:
    torch.manual_seed(0)
    model = make()
    out = model(x)
    out.sum().backward()
    return out.detach(), *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())


def pickled(x: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return pickle.loads(pickle.dumps(x)), torch.load(buffer, weights_only=False)


def fails_backward(error: Exception) -> str:
    """Whatever fails in somebody else's backward pass is raised as it is."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise error

    with pytest.raises(type(error)) as caught:
        Fails.apply(ones(3).requires_grad_()).sum().backward()  # type: ignore[no-untyped-call]
    return f"{type(caught.value).__name__}: {caught.value}"


BEHAVIOURS: dict[str, Callable[[], Any]] = {
    "as_subclass": lambda: ones(3).as_subclass(Sub) + 1,
    "as_subclass, learning": lambda: grads_of(lambda x: (x.as_subclass(Sub) * 2).as_subclass(Tensor)),  # type: ignore[arg-type]
    "of a tensor": lambda: Sub(ones(3)),
    "of a list": lambda: Sub([1.0, 2.0]),
    "of an array": lambda: torch.from_numpy(np.ones(3)).as_subclass(Sub),  # type: ignore[arg-type]
    "with attributes": lambda: (Boxes([[1, 2]]).clone(), Boxes(ones(2), 5).size_of_image),
    "make_subclass": lambda: Tensor._make_subclass(Sub, ones(3)) + 1,
    "make_wrapper_subclass": lambda: (tuple(Scaled(ones(3)).shape), Scaled(ones(3)) + 1),
    "subclass of inference": lambda: torch.inference_mode()(lambda: Sub(ones(3)) * 2)(),
    "subclass of a view": lambda: ones(2, 3).t()[1:].as_subclass(Sub),  # type: ignore[arg-type]
    "sparse": lambda: torch.eye(3).to_sparse().to("cpu", torch.float64).to_dense(),
    "complex": lambda: torch.tensor([1 + 2j]).as_subclass(Sub).conj() * 1j,  # type: ignore[arg-type]
    "legacy": lambda: (
        torch.Tensor([1, 2]),
        torch.LongTensor([1]),
        torch.Tensor(ones(2)),
        ones(1).new(ones(2)),
        torch.FloatTensor(2).shape,
    ),
    "shares memory": lambda: (lambda x: torch.Tensor(x).data_ptr() == x.data_ptr())(ones(3)),
    "alias, learning": lambda: grads_of(torch.Tensor),
    "ellipsis, learning": lambda: grads_of(lambda x: x[...]),
    "conversion, learning": lambda: grads_of(lambda x: x.to("cpu", torch.float64)),
    "as_tensor, learning": lambda: grads_of(lambda x: torch.as_tensor(x, dtype=torch.float64)),
    "as_tensor of itself": lambda: (
        lambda x: (torch.as_tensor(x) is x, torch.asarray(x) is x, x.to("cpu", x.dtype) is x)
    )(ones(3)),
    "tensor of lists": lambda: (
        torch.tensor([[1, 2], [3, 4]]),
        torch.tensor(3.5, dtype=torch.float16),
        torch.asarray(np.arange(3)),
    ),
    "new_tensor": lambda: (ones(2).new_tensor([1, 2]), nn.Parameter(ones(2)).new_tensor(3.5)),
    "new_tensor, compile": lambda: torch.compile(lambda x: x + x.new_tensor([1.0]), backend="eager", fullgraph=True)(
        ones(3)
    ),
    "compressed": lambda: torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), ones(2)).to_dense(),
    "parameter": lambda: (OwnParameter(ones(2)).data, nn.Parameter(ones(2)), nn.Buffer(ones(3))),
    "uninitialized": lambda: nn.UninitializedParameter().materialize((2,)),
    "deepcopy": lambda: copy.deepcopy((OwnParameter(ones(2)), nn.LayerNorm(3))),
    "pickle": lambda: pickled([ones(2).as_subclass(Sub), nn.Parameter(ones(2)), EdgeIndex([[0, 1], [1, 0]])]),  # type: ignore[arg-type]
    "dispatch mode": lambda: in_mode(Counts()),
    "function mode": lambda: in_mode(Names()),
    "device mode": lambda: on_meta(),
    "fake": in_fake,
    "make_fx": lambda: make_fx(work)(ones(2, 3)).code,
    "fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())).code,
    "export": lambda: torch.export.export(nn.LayerNorm(2), (ones(1, 2),)).module()(ones(1, 2)),
    "compile": compiled,
    "compile, whole": lambda: compiled(fullgraph=True),
    "script": lambda: torch.jit.script(_scripted)(ones(2)),
    "trace": lambda: (
        torch.jit.trace(nn.Linear(2, 2, bias=False).requires_grad_(False), ones(1, 2)).graph.__str__().count("aten")
    ),
    "vmap": lambda: torch.vmap(lambda x: x.to(torch.float64)[...] * torch.tensor(2.0))(ones(2, 3)),
    "func.grad": lambda: torch.func.grad(lambda x: (x[...] * torch.as_tensor(2.0)).sin().sum())(ones(3)),
    "func.jvp": lambda: torch.func.jvp(lambda x: x[...].sin(), (ones(3),), (ones(3),)),
    "functional_call": lambda: torch.func.functional_call(nn.LayerNorm(3), {"weight": ones(3)}, ones(2, 3)),
    "masked": lambda: torch.masked.masked_tensor(ones(3), torch.tensor([True, False, True])).sum().get_data(),
    "nested": lambda: (torch.nested.nested_tensor([ones(2), ones(3)]) * 2).to_padded_tensor(0),
    "jagged": lambda: (torch.nested.nested_tensor([ones(2), ones(3)], layout=torch.jagged) * 2).values(),
    "EdgeIndex": lambda: (
        EdgeIndex([[0, 1], [1, 0]], sparse_size=(2, 2)).sort_by("row")[0].matmul(ones(2, 1)),
        EdgeIndex([[0, 1], [1, 0]]).as_tensor(),
    ),
    "Index": lambda: Index([0, 1, 1], dim_size=2) + 1,
    "mkldnn": lambda: ones(3, 3).to_mkldnn().to_dense(),
    "lazy linear": lambda: lazy(lambda: nn.LazyLinear(2), ones(4, 3)),
    "lazy conv": lambda: lazy(lambda: nn.LazyConv1d(2, 1), ones(1, 4, 3)),
    "lazy batch norm": lambda: lazy(nn.LazyBatchNorm1d, ones(4, 3)),
    "lazy instance norm": lambda: lazy(
        lambda: nn.LazyInstanceNorm1d(affine=True, track_running_stats=True), ones(2, 4, 3)
    ),
    "lazy model": lambda: lazy(
        lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2)), ones(4, 3)
    ),
    "checkpoint": recomputed,
    "function": lambda: grads_of(Twice.apply),
    "function of a subclass": lambda: Twice.apply(ones(3).as_subclass(Sub), 3.0),
    "function, vmap": lambda: torch.vmap(Twice.apply)(ones(2, 3)),
    "function, func.grad": lambda: torch.func.grad(lambda x: Twice.apply(x).sum())(ones(3)),
    "function, compile": lambda: torch.compile(lambda x: Twice.apply(x, 2.0), backend="eager", fullgraph=True)(ones(3)),
    "function, names": lambda: [
        f"{f.__module__}.{f.__qualname__}" for f in (Twice.apply, torch.autograd.Function.apply)
    ],
    "no memory": lambda: fails_backward(RuntimeError("[enforce fail] tried to allocate 80 bytes")),
    "memory error": lambda: fails_backward(MemoryError("bad_alloc")),
    "overridable": lambda: torch.tensor in torch.overrides.get_ignored_functions(),
    "names": lambda: [
        f"{f.__module__}.{f.__qualname__}.{f.__doc__}" for f in (torch.tensor, torch.as_tensor, torch.asarray)
    ],
    "isinstance": lambda: [
        isinstance(ones(1), kind) for kind in (torch.Tensor, torch.FloatTensor, torch.LongTensor, nn.Parameter)
    ],
    "excepthook": lambda: sys.excepthook is sys.__excepthook__,
    "errors": lambda: errors_of_constructors(),
}


def on_meta() -> Any:
    with torch.device("meta"):
        return torch.tensor(1.0).is_meta, torch.as_tensor([1.0]).is_meta, torch.asarray([1.0]).is_meta


def errors_of_constructors() -> list[str]:
    found = []
    for call in (
        lambda: torch.tensor(object()),
        lambda: torch.tensor(),
        lambda: torch.as_tensor("a"),
        lambda: torch.tensor([1], dtyp=1),
    ):
        with pytest.raises((TypeError, ValueError, RuntimeError)) as caught:
            call()  # type: ignore[no-untyped-call]
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    return found


def _scripted(x: Tensor) -> Tensor:
    return x + torch.tensor(2.0) + torch.as_tensor(1)


def told(value: Any) -> Any:
    """``value`` as it compares and prints: classes, dtypes and elements."""
    if isinstance(value, (tuple, list)):
        return [told(item) for item in value]
    if isinstance(value, Tensor):
        plain = value.detach().as_subclass(Tensor)
        return type(value).__name__, str(value.dtype), tuple(plain.shape), value.requires_grad, plain.tolist()
    return str(value)


def results() -> dict[str, Any]:
    found = {}
    for name, behaviour in BEHAVIOURS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found[name] = told(behaviour())
            except Exception as error:  # to compare it, whatever it is
                found[name] = f"{type(error).__name__}: {error}"
    return found


def beside_rows(layout: str) -> None:
    before = results()
    failed = {name: value for name, value in before.items() if isinstance(value, str) and "Error" in value[:40]}
    assert failed.keys() == {"no memory", "memory error"}, failed
    data = pyg_dist.DistributedData(random_graph(20, 60), layout=layout)
    model = pyg_dist.distribute(nn.ModuleList([pyg_dist.conv.DistributedSAGEConv(5, 3)]))[0].double()
    model(data.x, data.edge_index).sum().backward()
    beside = results()
    assert {name: (before[name], beside[name]) for name in before if before[name] != beside[name]} == {}
    del data, model
    gc.collect()
    after = results()
    assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == {}


@pytest.mark.parametrize("layout", ["halo", "grid"])
def test_others_are_as_without(layout: str) -> None:
    pool = Workers(1)  # a process of its own, in which no other test has left rows
    try:
        pool.run(beside_rows, layout)
    finally:
        pool.close()


def first_compiled_beside_rows() -> None:
    """Tables that torch fills at its first use, filled beside rows, serve after them."""
    data = pyg_dist.DistributedData(random_graph(20, 60))
    assert torch.tensor.__module__ == data.x.__module__ or callable(torch.tensor)
    first = told([compiled(fullgraph=True), on_meta(), _scripted_anew()])
    del data
    gc.collect()
    assert isinstance(torch.tensor, type(torch.zeros))  # torch's own again
    assert told([compiled(fullgraph=True), on_meta(), _scripted_anew()]) == first


def _scripted_anew() -> Any:
    return torch.jit.script(_scripted)(ones(2))


def test_tables_filled_beside_rows() -> None:
    pool = Workers(1)
    try:
        pool.run(first_compiled_beside_rows)
    finally:
        pool.close()
