"""Gradients, hooks and copies of row tensors, which are tensors of the autograd graph themselves."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward  # type: ignore[attr-defined]

from pyg_dist.errors import LayoutMismatchError
from pyg_dist.tensor.row_tensor import LOCALLY, RowTensor, wrap
from pyg_dist.tensor.rows import Rows
from pyg_dist.tensor.table import TABLE, Function, handles


def _plain(value: Any, rows: Rows) -> Any:
    """``value`` as autograd stores it for a tensor with these rows."""
    if isinstance(value, RowTensor):
        if value._rows is not rows:
            rows.require_like(value._rows, "A gradient")
        return value.to_local()
    if isinstance(value, Tensor):
        if value.shape[:1] != (rows.size,):
            raise LayoutMismatchError(
                f"Expected a gradient with {rows.size} rows (got shape {list(value.shape)}): use a {rows.kind} tensor"
            )
        return rows.slice(value)
    return value


@handles("grad.__get__")
def grad(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient, distributed like the tensor."""
    with LOCALLY():
        return wrap(function(*args), args[0]._rows)


@handles("grad.__set__")
def set_grad(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Store a gradient."""
    x, value = args
    value = _plain(value, x._rows)
    with LOCALLY():
        function(x, value)


@handles("grad.__delete__")
def delete_grad(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forget the gradient."""
    with LOCALLY():
        function(*args)


@handles("data.__get__")
def data(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same rows without history."""
    with LOCALLY():
        return wrap(function(*args), args[0]._rows)


@handles("data.__set__")
def set_data(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Replace the values."""
    x, value = args
    value = _plain(value, x._rows)
    with LOCALLY():
        function(x, value)


@handles("register_hook")
def register_hook(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hooks see row tensors and may return them."""
    x, hook = (*args, *kwargs.values())
    rows = x._rows

    def distributed_hook(gradient: Tensor) -> Tensor | None:
        # A fresh view: the engine goes on with its own tensor, whose class must not change.
        with LOCALLY():
            view = wrap(gradient.as_subclass(Tensor), rows)
        result = hook(view)
        return None if result is None else _plain(result, rows)

    with LOCALLY():
        return function(x, distributed_hook)


@handles("register_post_accumulate_grad_hook")
def register_post_accumulate_grad_hook(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The hook gets the row tensor itself."""
    with LOCALLY():
        return function(*args, **kwargs)


@handles("backward")
def backward(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Back-propagate a gradient with this tensor's rows (collective)."""
    names = ("gradient", "retain_graph", "create_graph", "inputs")
    bound = dict(zip(names, args[1:], strict=False)) | kwargs
    gradient = _plain(bound.get("gradient"), args[0]._rows)
    retain, create = bound.get("retain_graph"), bound.get("create_graph", False)
    torch.autograd.backward(args[0].to_local(), gradient, retain, create, inputs=bound.get("inputs"))


def autograd_grad(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """``torch.autograd.grad`` with row tensors among outputs and inputs (collective).

    It runs the engine itself: torch's own function would have to run under ``LOCALLY``, and so would every hook
    that the backward pass calls.
    """
    names = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
    bound = dict(zip(names, args, strict=False)) | kwargs
    outputs, inputs = (_sequence(bound[n]) for n in ("outputs", "inputs"))
    given = bound.get("grad_outputs")
    grad_outputs = [None] * len(outputs) if given is None else list(_sequence(given))
    for k, output in enumerate(outputs):
        if isinstance(output, RowTensor):
            grad_outputs[k] = _plain(grad_outputs[k], output._rows)
        if grad_outputs[k] is None:
            if output.numel() != 1:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            grad_outputs[k] = torch.ones_like(output)
    create = bound.get("create_graph", False)
    retain = create if bound.get("retain_graph") is None else bound["retain_graph"]
    allow_unused = bool(bound.get("allow_unused") or bound.get("materialize_grads"))
    results = _engine_run_backward(
        outputs, tuple(grad_outputs), retain, create, inputs, allow_unused, accumulate_grad=False
    )
    distributed = []
    for x, result in zip(inputs, results, strict=True):
        if result is None and bound.get("materialize_grads"):
            distributed.append(torch.zeros_like(x))
        elif isinstance(x, RowTensor) and result is not None:
            with LOCALLY():
                distributed.append(wrap(result.as_subclass(Tensor), x._rows))
        else:
            distributed.append(result)
    return tuple(distributed)


def _sequence(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


TABLE[torch.autograd.grad] = autograd_grad


@handles("__deepcopy__")
def deepcopy(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Copy the values; the distribution is shared (early stopping copies models and data)."""
    x, memo = args
    if id(x) in memo:
        return memo[id(x)]
    with LOCALLY():
        if not x.is_leaf:
            raise RuntimeError(
                "Only tensors created explicitly by the user (graph leaves) support the deepcopy protocol: "
                "copy x.detach()"
            )
        twin = wrap(x.as_subclass(Tensor).detach().clone(), x._rows).requires_grad_(x.requires_grad)
        if x.grad is not None:
            twin.grad = copy.deepcopy(x.grad, memo)
    twin.__dict__.update({k: v for k, v in x.__dict__.items() if k not in ("_selection",)})
    memo[id(x)] = twin
    return twin
