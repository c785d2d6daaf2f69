"""A script's own ``torch.autograd.Function`` on row tensors: its forward and its backward see the global tensors.

The engine passes this rank's rows, but a backward may reduce over rows: ``g / g.norm()``, ``g.sum(0)`` for a parameter.
So where a row tensor is among the arguments of ``apply``, functions of ours call the script's methods: gradients and
saved tensors are row tensors there. What the backward returns for a row tensor is redistributed as this one's rows.
What it returns for a plain tensor is the gradient over all rows, and is not summed again.

The methods are replaced where torch looks for them, while there are distributed rows, and not ``apply``: scripts keep
it by another name (``exp = Exp.apply``), and since 2.14 torch's is native code that calls no other ``apply``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx, FunctionMeta, _is_setup_context_defined

from pyg_dist.backend.local_function import local_gradient
from pyg_dist.errors import UnsupportedError
from pyg_dist.tensor.functions.autograd import as_stored
from pyg_dist.tensor.row_tensor import RowTensor
from pyg_dist.tensor.sharding import RowSharding, living

_OURS = ("torch.", "torch_geometric.", "pyg_dist.")
"""Functions of these move rows forward and backward, or run the forward again."""

_Node: Any = torch._C._FunctionBase
"""Of the engine's graph, one for each call of ``apply``."""

Rows = RowSharding | None
"""Of a tensor: ``None`` of a plain one."""


def _rows_of(value: object) -> Rows:
    return value._sharding if isinstance(value, RowTensor) else None


def _as_rows(local: object, rows: Rows) -> object:
    """``local``, as the engine has it, as the script sees it."""
    if rows is None or not isinstance(local, Tensor) or isinstance(local, RowTensor):
        return local
    return RowTensor.from_local(local, rows)  # a view: the engine's own tensor must not change its class


class _Records:
    """Of one call: which of its arguments, outputs and saved tensors have rows. The engine's node keeps it."""

    def __init__(self, arguments: Sequence[object]) -> None:
        self.inputs = [_rows_of(value) for value in arguments]
        self.shapes = [tuple(value.shape) if isinstance(value, Tensor) else None for value in arguments]
        self.saved: list[Rows] = []
        self.outputs: list[Rows] = []


class _Context(FunctionCtx):
    """The ``ctx`` of a script's function, over the engine's node, whose attributes it has: its tensors are row tensors.

    A method has one of its own, since a node that knew it would be a cycle, with all that the script keeps there.
    """

    _node: Any
    _records: _Records

    def __init__(self, node: Any, records: _Records) -> None:
        vars(self).update(_node=node, _records=records)

    def __getattr__(self, name: str) -> object:
        return getattr(self._node, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._node, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._node, name)

    def save_for_backward(self, *tensors: object) -> None:
        self._records.saved = [_rows_of(tensor) for tensor in tensors]
        self._node.save_for_backward(*tensors)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        """As torch's: outputs and what hooks have packed come back as plain tensors, of which it makes row tensors."""
        return tuple(map(_as_rows, self._node.saved_tensors, self._records.saved))


def _context(node: Any, args: Sequence[object]) -> Any:
    """What the forward of a script's function gets for ``node``."""
    if not _has_rows(args):
        return node
    node.row_records = records = _Records(args)
    return _Context(node, records)


def _forward_of_rows(script: Any, forward: Any) -> Any:
    if _is_setup_context_defined(script.setup_context):
        return forward  # its context comes later

    @wraps(forward)
    def forward_of_rows(node: Any, *args: Any) -> object:
        if not isinstance(node, _Node):  # called by another function's forward
            return forward(node, *args)
        context = _context(node, args)
        out = forward(context, *args)
        _note_outputs(script, context, out)
        return out

    return forward_of_rows


def _setup_context_of_rows(script: Any, setup_context: Any) -> Any:
    @wraps(setup_context)
    def setup_context_of_rows(node: Any, inputs: tuple[Any, ...], output: object) -> None:
        if not isinstance(node, _Node):
            setup_context(node, inputs, output)
            return
        context = _context(node, inputs)
        setup_context(context, inputs, output)
        _note_outputs(script, context, output)

    return setup_context_of_rows


def _backward_of_rows(script: Any, backward: Any) -> Any:
    @wraps(backward)
    def backward_of_rows(node: Any, *gradients: Any) -> object:
        records: _Records | None = getattr(node, "row_records", None) if isinstance(node, _Node) else None
        if records is None:
            return backward(node, *gradients)
        context, is_boxed = _Context(node, records), getattr(script, "boxed_grads_call", False)
        local = map(local_gradient, gradients[0] if is_boxed else gradients)
        seen: Any = list(map(_as_rows, local, records.outputs))
        out = backward(context, seen) if is_boxed else backward(context, *seen)
        out = out if isinstance(out, tuple) else (out,)
        if len(out) < len(records.inputs):  # torch says so
            return out
        wanted = node.needs_input_grad
        return tuple(
            _gradient(value, records.inputs[k], records.shapes[k]) if k < len(wanted) and wanted[k] else value
            for k, value in enumerate(out)
        )

    return backward_of_rows


def _note_outputs(script: Any, context: Any, out: object) -> None:
    outputs = out if isinstance(out, tuple) else (out,)
    if isinstance(context, _Context):
        context._records.outputs = [_rows_of(value) for value in outputs]
    elif _has_rows(outputs) and context.next_functions:
        constant = [id(x) for x in context.non_differentiable or ()]
        if any(isinstance(x, RowTensor) and x.is_floating_point() and id(x) not in constant for x in outputs):
            raise UnsupportedError(
                f"{script.__name__}.apply expected the distributed tensors that its forward reads as arguments "
                f"(got none, and its backward would get this rank's rows): pass them to apply, each as an argument of "
                f"its own"
            )


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


def _has_rows(values: Sequence[object]) -> bool:
    return any(type(value) is not Tensor and isinstance(value, RowTensor) for value in values)


def _is_ours(cls: object) -> bool:
    """Whether the package handles this function itself; those of ``torch.distributions`` run on rows, as a script's."""
    module: str = cls.__module__
    return module.startswith(_OURS) and not module.startswith("torch.distributions.")


_OF_ROWS = {
    "forward": _forward_of_rows,
    "setup_context": _setup_context_of_rows,
    "backward": _backward_of_rows,
    "vjp": _backward_of_rows,
}


def _own(cls: type, name: str) -> Any:
    """The attribute of a class as it is without :class:`_Method`."""
    method = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
    return method.__get__(None, cls) if hasattr(method, "__get__") else method


@lru_cache(maxsize=1024)
def _method(cls: Any, name: str) -> Any:
    own = _own(cls, name)
    if _is_ours(cls) or own is _own(Function, name):  # torch asks which methods a class has not defined
        return own
    return _OF_ROWS[name](cls, own)


class _Method:
    """In the metaclass of functions, a method's name: what a class has by that name, for row tensors as well.

    Torch takes a function's methods from its class whenever it calls them. A metaclass' descriptor that can be set goes
    before what the class has.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, cls: Any, metaclass: object = None) -> Any:
        return self if cls is None else _method(cls, self._name)

    def __set__(self, cls: type, value: object) -> None:
        _remove()
        try:
            setattr(cls, self._name, value)
        finally:
            _add()

    def __delete__(self, cls: type) -> None:
        _remove()
        try:
            delattr(cls, self._name)
        finally:
            _add()


def _add() -> None:
    for name in _OF_ROWS:
        setattr(FunctionMeta, name, _Method(name))


def _remove() -> None:
    _method.cache_clear()
    for name in _OF_ROWS:
        delattr(FunctionMeta, name)


living.watch(_add, _remove)
