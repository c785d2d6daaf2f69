"""Gradients, hooks and copies of row tensors, which are tensors of the autograd graph themselves.

Autograd stores, and the engine passes, this rank's rows; users see and give row tensors, or plain tensors with all
rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from pyg_dist.errors import LayoutMismatchError, UnsupportedError
from pyg_dist.tensor.functions.shapes import metadata
from pyg_dist.tensor.registry import TABLE, Function, bind, implements
from pyg_dist.tensor.row_tensor import KEPT, RowTensor, as_row_tensor_, copy_of, local_tensors, version_of
from pyg_dist.tensor.sharding import RowSharding, living


def as_stored(value: object, rows: RowSharding) -> Any:
    """``value`` as autograd stores it for a tensor with these rows."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, RowTensor):
        return value.redistribute(rows).to_local()
    if value.shape[:1] != (rows.size,):
        raise LayoutMismatchError(f"Expected a gradient or value for {rows} (got shape {list(value.shape)})")
    return rows.slice(value)


@implements("data.__get__")
def data(function: Function, x: RowTensor) -> RowTensor:
    """The rows without history. :func:`version_of` counts changes of them, autograd does not, as in torch."""
    with local_tensors(), torch.inference_mode(False):
        if x.is_inference():
            return as_row_tensor_(function(x), x._sharding)
        if not x._counters:
            x._counters = (x.detach(), function(x))
        out = as_row_tensor_(x._counters[1].detach(), x._sharding)
        out._counters = x._counters
        out._copy_of = copy_of(x)
        return out


@implements("detach")
def detach(function: Function, x: RowTensor) -> RowTensor:
    """The rows without history; what they are a copy of is noted, since torch forgets whose view they are."""
    with local_tensors():
        out = as_row_tensor_(function(x), x._sharding)
    out._copy_of = copy_of(x)
    return out


@implements("data.__set__")
def replace_data(function: Function, x: RowTensor, value: object) -> None:
    """Replace the values, which torch counts as no change."""
    version = version_of(x)
    store(function, x, value)
    x._counters = ()
    if version is not None:
        with local_tensors():
            x._uncounted = version + 1 - x._version


@implements("grad.__get__")
def stored(function: Function, x: RowTensor) -> object:
    """The gradient: distributed like the tensor."""
    with local_tensors():
        return as_row_tensor_(function(x), x._sharding)


@implements("grad.__set__")
def store(function: Function, x: RowTensor, value: object) -> None:
    """Replace the gradient."""
    value = as_stored(value, x._sharding)
    with local_tensors():
        function(x, value)


@implements("grad.__delete__", "retain_grad", "register_post_accumulate_grad_hook")
def unchanged(function: Function, *args: object, **kwargs: object) -> object:
    """A hook after accumulation gets the row tensor itself."""
    with local_tensors():
        return function(*args, **kwargs)


@implements("register_hook")
def register_hook(function: Function, x: RowTensor, hook: Callable[[Tensor], object]) -> object:
    """Hooks see row tensors and may return them."""
    rows = x._sharding

    def distributed_hook(gradient: Tensor) -> Tensor | None:
        # A fresh view: the engine goes on with its own tensor, whose class must not change.
        result = hook(RowTensor.from_local(gradient, rows))
        return None if result is None else as_stored(result, rows)

    with local_tensors():
        return function(x, distributed_hook)


# Torch wraps a module that has backward hooks between two nodes of this function, an identity of all its tensors.
_MODULE_HOOKS = "BackwardHookFunctionBackward"


@implements("grad_fn.__get__")  # after shapes, whose handler it extends
def grad_fn(function: Function, x: RowTensor) -> object:
    """The node of the autograd graph; the one of a module's backward hooks gives these row tensors."""
    node: Any = metadata(function, x)
    if node is None or node.name() != _MODULE_HOOKS:
        return node
    node.metadata.setdefault(_HookedNode, {})[x.output_nr] = x._sharding
    return _HookedNode(node)


class _HookedNode:
    """Stands for a node of :data:`_MODULE_HOOKS`, whose k-th input and output have the same rows."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def register_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        rows_of: dict[int, RowSharding] = self._node.metadata[_HookedNode]

        def seen(gradients: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
            return tuple(
                RowTensor.from_local(g, rows_of[k]) if g is not None and k in rows_of else g
                for k, g in enumerate(gradients)
            )

        def distributed_hook(by_input: tuple[Tensor | None, ...], by_output: tuple[Tensor | None, ...]) -> Any:
            result = hook(seen(by_input), seen(by_output))
            if result is None:
                return None
            return tuple(as_stored(g, rows_of[k]) if k in rows_of else g for k, g in enumerate(result))

        return self._node.register_hook(distributed_hook)  # type: ignore[no-any-return]


def _local_outputs(outputs: object, gradients: Any) -> tuple[list[Any], list[Tensor | None]]:
    """Outputs and their gradients as the engine takes them."""
    outputs = _sequence(outputs)
    gradients = [None] * len(outputs) if gradients is None else _sequence(gradients)
    for k, (output, gradient) in enumerate(zip(outputs, gradients, strict=True)):
        if isinstance(output, RowTensor):
            if gradient is None:
                raise RuntimeError("grad can be implicitly created only for scalar outputs")
            # Code that runs inside a backward pass (reentrant checkpointing) holds gradients as the engine has them,
            # and has grad mode off.
            inside = torch._C._current_graph_task_id() != -1
            plain = inside and not isinstance(gradient, RowTensor)
            gradients[k] = gradient if plain else as_stored(gradient, output._sharding)
            with torch.enable_grad():
                outputs[k] = output.to_local()
    return outputs, gradients


def _sequence(value: Any) -> list[Any]:
    return [value] if isinstance(value, (Tensor, GradientEdge)) else list(value)


def _edge(x: object) -> object:
    """The edge of the graph where x's gradient arrives: torch takes it for x, and calls no ``__torch_function__``."""
    if not isinstance(x, RowTensor):
        return x
    with local_tensors():
        return get_gradient_edge(x)


@implements("backward")
def backward_of_one(function: Function, x: Tensor, gradient: object = None, *args: object, **kwargs: object) -> None:
    """Back-propagate a gradient with this tensor's rows, or a loss to tensors with rows (collective)."""
    backward(torch.autograd.backward, x, gradient, **bind(function, "retain_graph create_graph inputs", args, kwargs))


def backward(function: Function, tensors: object, grad_tensors: object = None, *args: object, **kwargs: object) -> None:
    """``torch.autograd.backward`` with row tensors among outputs and inputs (collective)."""
    bound = bind(function, "retain_graph create_graph grad_variables inputs", args, kwargs)
    outputs, gradients = _local_outputs(tensors, grad_tensors)
    if bound.get("inputs") is not None:
        bound["inputs"] = [_edge(x) for x in _sequence(bound["inputs"])]
    function(outputs, gradients, **bound)


def grad(
    function: Function, outputs: object, inputs: object, grad_outputs: object = None, *args: object,
    is_grads_batched: bool = False, materialize_grads: bool = False, **kwargs: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """``torch.autograd.grad`` with row tensors among outputs and inputs (collective)."""
    if is_grads_batched:
        raise UnsupportedError(
            "torch.autograd.grad with is_grads_batched is not distributed: call it once per gradient"
        )
    bound = bind(function, "retain_graph create_graph only_inputs allow_unused", args, kwargs)
    bound["allow_unused"] = bound.get("allow_unused") or materialize_grads
    outputs, gradients = _local_outputs(outputs, grad_outputs)
    inputs = _sequence(inputs)
    results: list[Any] = list(function(outputs, [_edge(x) for x in inputs], gradients, **bound))
    for k, (x, result) in enumerate(zip(inputs, results, strict=True)):
        if result is None and materialize_grads:
            results[k] = torch.zeros_like(x)
        elif isinstance(x, RowTensor) and result is not None:
            results[k] = RowTensor.from_local(result, x._sharding)
    return tuple(results)


_stock_backward = torch.autograd.backward
TABLE[_stock_backward] = backward
TABLE[torch.autograd.grad] = grad


@wraps(_stock_backward)
def _dispatched_backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
    given = [*_sequence(tensors), *_sequence(kwargs.get("inputs") or ())]
    if any(isinstance(x, RowTensor) for x in given):
        backward(_stock_backward, tensors, *args, **kwargs)
    else:
        _stock_backward(tensors, *args, **kwargs)


if "handle_torch_function" not in _stock_backward.__code__.co_names:  # torch 2.10
    living.watch(
        *(
            partial(setattr, torch.autograd, "backward", function)
            for function in (_dispatched_backward, _stock_backward)
        )
    )


_checks: dict[str, Callable[[Tensor], dict[str, Any]]] = torch.utils.checkpoint._allowed_determinism_checks_to_fns
_stock_check = _checks["default"]


def _check_of_local_rows(x: Tensor) -> dict[str, Any]:
    """Checkpointing compares local shapes: torch's own check sees the global ones in the second forward only."""
    with local_tensors():
        return _stock_check(x)


_checks["default"] = _check_of_local_rows


@implements("__deepcopy__")
def deepcopy(function: Function, x: RowTensor, memo: dict[int, object]) -> object:
    """Copy the values; the distribution is shared (early stopping copies models and data)."""
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        raise RuntimeError(
            "Only tensors created explicitly by the user (graph leaves) support the deepcopy protocol: copy x.detach()"
        )
    twin = x.detach().clone().requires_grad_(x.requires_grad)
    memo[id(x)] = twin
    twin.__dict__.update({k: v for k, v in x.__dict__.items() if k not in KEPT})
    if x.grad is not None and not isinstance(x, nn.Parameter):  # torch copies parameters without
        twin.grad = copy.deepcopy(x.grad, memo)
    return twin
