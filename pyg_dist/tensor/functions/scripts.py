"""A script's own ``torch.autograd.Function`` on row tensors: its forward and its backward see the global tensors.

The engine passes this rank's rows, but a backward may reduce over rows: ``g / g.norm()``, ``g.sum(0)`` for a parameter.
So where a row tensor is among the arguments of ``apply``, a function of ours runs in place of the script's and calls
its methods: gradients and saved tensors are row tensors there. What the backward returns for a row tensor is
redistributed as this one's rows. What it returns for a plain tensor is the gradient over all rows, and is not summed
again.

``apply`` is replaced in a base class whose ``apply`` ``Function.apply`` calls, while there are distributed rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, _is_setup_context_defined, _SingleLevelFunction

from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.errors import UnsupportedError
from pyg_dist.tensor.functions.autograd import as_stored
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.sharding import RowSharding, living

_OURS = ("torch.", "torch_geometric.", "pyg_dist.")
"""Functions of these move rows forward and backward, or run the forward again."""

Rows = RowSharding | None
"""Of a tensor: ``None`` of a plain one."""


def _rows_of(value: object) -> Rows:
    return value._sharding if isinstance(value, RowTensor) else None


def _as_rows(local: object, rows: Rows) -> object:
    """``local``, as the engine has it, as the script sees it."""
    if rows is None or not isinstance(local, Tensor) or isinstance(local, RowTensor):
        return local
    return RowTensor.from_local(local, rows)  # a view: the engine's own tensor must not change its class


class _Context(FunctionCtx):
    """The ``ctx`` of a script's function, over the engine's ``node``: saves and returns row tensors."""

    def __init__(self, node: Any, arguments: Sequence[object]) -> None:
        self._node = node
        self._rows_of_saved: list[Rows] = []
        self.input_rows = [_rows_of(value) for value in arguments]
        self.input_shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in arguments]
        self.output_rows: list[Rows] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._node, name)

    mark_dirty = property(attrgetter("_node.mark_dirty"))
    mark_non_differentiable = property(attrgetter("_node.mark_non_differentiable"))
    set_materialize_grads = property(attrgetter("_node.set_materialize_grads"))

    def save_for_backward(self, *tensors: object) -> None:
        self._rows_of_saved = [_rows_of(tensor) for tensor in tensors]
        self._node.save_for_backward(*tensors)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """As torch's: outputs and what hooks have packed come back as plain tensors, of which it makes row tensors."""
        return tuple(map(_as_rows, self._node.saved_tensors, self._rows_of_saved))


@lru_cache(maxsize=256)
def _on_rows(script: Any) -> Any:
    """The ``torch.autograd.Function`` in place of a script's, where arguments are rows; it has the name of that one."""

    def forward(node: Any, *args: Any) -> object:
        node.context = context = _Context(node, args)
        if _is_setup_context_defined(script.setup_context):
            out = script.forward(*args)
            script.setup_context(context, args, out)
        else:
            out = script.forward(context, *args)
        context.output_rows = [_rows_of(value) for value in (out if isinstance(out, tuple) else (out,))]
        return out

    def backward(node: Any, *gradients: object) -> object:
        context: _Context = node.context
        seen: Any = list(map(_as_rows, gradients, context.output_rows))
        run = script.backward if script.vjp is torch.autograd.Function.vjp else script.vjp
        out = run(context, seen) if getattr(script, "boxed_grads_call", False) else run(context, *seen)
        out = out if isinstance(out, tuple) else (out,)
        if len(out) < len(context.input_rows):  # torch says so
            return out
        wanted = node.needs_input_grad
        return tuple(
            _gradient(value, context.input_rows[k], context.input_shapes[k]) if k < len(wanted) and wanted[k] else value
            for k, value in enumerate(out)
        )

    body = {"forward": staticmethod(forward), "backward": staticmethod(backward), "__module__": script.__module__}
    return type(script.__name__, (LocalFunction,), body)


def _gradient(value: object, rows: Rows, shape: Any) -> object:
    """The gradient that a script returned, as the engine takes it for an input with these rows and this global shape.

    As by torch, it is summed over dimensions or columns that the input lacks (collective where it has rows).
    """
    if not isinstance(value, Tensor) or (value.grad_fn is not None and value.grad_fn.name().endswith("::Error")):
        return value  # torch's, of a function that is differentiated once only: it has this rank's rows
    if not isinstance(value, RowTensor) and rows is None:
        return value
    if value.shape != shape:
        value = _summed_to(value, shape)
    if rows is not None:
        return as_stored(value, rows)
    return value.full_tensor() if isinstance(value, RowTensor) else value


def _summed_to(value: Tensor, shape: tuple[int, ...]) -> Tensor:
    for _ in range(value.dim() - len(shape)):
        value = value.sum(0)
    pairs = zip(value.shape, shape, strict=False)
    dims = [k for k, (has, wants) in enumerate(pairs) if wants == 1 != has]
    return value.sum(dims, keepdim=True) if dims else value


def _is_ours(cls: object) -> bool:
    """Those of ``torch.distributions`` are formulas of rows, as a script's."""
    module: str = cls.__module__
    return module.startswith(_OURS) and not module.startswith("torch.distributions.")


def _apply(cls: Any, *args: Any, **kwargs: Any) -> object:
    if _has_rows(args) and not _is_ours(cls):
        return _on_rows(cls).apply(*args, **kwargs)
    out = super(_SingleLevelFunction, cls).apply(*args, **kwargs)
    if type(out) is not Tensor and not _is_ours(cls):
        outputs = out if isinstance(out, tuple) else (out,)
        if _has_rows(outputs) and any(isinstance(value, Tensor) and value.requires_grad for value in outputs):
            raise UnsupportedError(
                f"{cls.__name__}.apply expected the distributed tensors that its forward reads as arguments (got none, "
                f"and its backward would get this rank's rows): pass them to apply, each as an argument of its own"
            )
    return out


def _has_rows(values: Sequence[object]) -> bool:
    return any(type(value) is not Tensor and isinstance(value, RowTensor) for value in values)


_base: Any = _SingleLevelFunction


def _add() -> None:
    _base.apply = classmethod(_apply)


def _remove() -> None:
    del _base.apply


living.watch(_add, _remove)
