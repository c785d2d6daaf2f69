"""The function table: the handler of each torch function for tensors whose rows lie on several ranks.

Each module beside this one registers its functions here, by name, with :data:`implements`. A name stands for every
function that torch exposes under it: ``relu`` is ``torch.relu``, ``Tensor.relu`` and ``F.relu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cache
from operator import is_
from types import FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor

from pyg_dist.errors import MixedRowsError

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[..., object]
"""``handler(function, *args, **kwargs)``: its parameters are those of the function, so that Python binds them."""
H = TypeVar("H", bound=Handler)

ARITHMETIC: set[Function] = set()
"""Functions whose integers are values, such as factors."""
KEEPS_ROWS: set[Handler] = set()
"""Handlers of functions whose values stay in their rows, so that they can write to ``out``."""
TAKES_OUT: set[Handler] = set()
"""Handlers that look at ``out`` themselves."""
# PyG replaces torch.index_select and torch.select by wrappers: these namespaces hold the originals.
_BELOW = (torch._C._VariableFunctions, torch._C._nn)
NAMESPACES = (torch, Tensor, torch.nn.functional, torch.special, torch.linalg, *_BELOW)


def functions(*names: str, namespaces: Sequence[object] = NAMESPACES) -> Iterator[Function]:
    """Every function with one of ``names`` in ``namespaces``; ``"shape.__get__"`` is a property's getter."""
    for name in names:
        attribute, _, accessor = name.partition(".")
        found = False
        # Modules have methods like __eq__ too.
        for namespace in (Tensor,) if attribute.startswith("__") else namespaces:
            function = getattr(namespace, attribute, None)
            if accessor:
                function = getattr(function, accessor, None)
            if callable(function):
                found = True
                yield function
        if not found:  # a misspelt name
            raise LookupError(f"torch has no function named {name!r}")


class Table(dict[Function, Handler]):
    """The handlers of a kind of tensors by function."""

    def implements(self, *names: str, namespaces: Sequence[object] = NAMESPACES) -> Callable[[H], H]:
        """Decorator: the handler answers for every function called one of ``names``."""

        def decorate(handler: H) -> H:
            self.update(dict.fromkeys(functions(*names, namespaces=namespaces), handler))
            return handler

        return decorate


TABLE = Table()
"""The functions of row tensors."""
implements = TABLE.implements

_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}
_RENAMED = {*_OF_NUMPY, "out"}


def as_torch_names(kwargs: Kwargs) -> Kwargs:
    """``kwargs`` with torch's names for those of NumPy's that it takes as well, and without an ``out`` of ``None``."""
    if _RENAMED.isdisjoint(kwargs):
        return kwargs
    return {_OF_NUMPY.get(name, name): v for name, v in kwargs.items() if name != "out" or v is not None}


def bind(function: Function, parameters: str, args: Args, kwargs: Kwargs) -> Kwargs:
    """The arguments behind the tensor by name; torch's functions in C have no signature to inspect."""
    names = parameters.split()
    if len(args) > len(names):
        raise TypeError(f"{public_name(function)} of rows expects arguments behind {names} by name (got {len(args)})")
    return dict(zip(names, args, strict=False)) | kwargs


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """``change`` of ``value``, or of what is in tuples, lists and dictionaries: copies, where any of it changes."""
    if not isinstance(value, (dict, tuple, list)):
        return change(value)
    items = value.values() if isinstance(value, dict) else value
    changed = [mapped(item, change) for item in items]
    if all(map(is_, changed, items)):
        return value
    if isinstance(value, dict):
        out = copy(value)
        out.update(zip(value, changed, strict=True))
        return out
    return like(value, changed)


def like(value: tuple[Any, ...] | list[Any], items: list[Any]) -> Any:
    """A tuple, named or not, or a list, of other items."""
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


def dims_of(dim: object, num_dims: int) -> tuple[int, ...]:
    """``dim`` as non-negative dimensions; ``None`` and ``()`` stand for all, as in torch."""
    if dim is None or dim == () or dim == []:
        return tuple(range(num_dims))
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    for d in dims:
        if not -num_dims <= d < num_dims:
            raise IndexError(f"Dimension out of range (expected to be in [{-num_dims}, {num_dims - 1}], but got {d})")
    return tuple(d % num_dims for d in dims)


def refuse(function: Function, what: str) -> MixedRowsError:
    """The error for a call that would take rows out of dimension 0."""
    return MixedRowsError(
        f"{public_name(function)} {what}: rows are distributed and stay in dimension 0; use .full_tensor() first"
    )


_ASKS_TABLE = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@cache
def _steps_of(function: Any) -> FunctionType:
    named = {**function.__globals__, **dict.fromkeys(_ASKS_TABLE, lambda *_: False)}
    return FunctionType(function.__code__, named, function.__name__, function.__defaults__)


def by_steps(function: Function, *args: object, **kwargs: object) -> object:
    """Run a function that torch writes in Python: what it calls is found in the table."""
    return _steps_of(function)(*args, **kwargs)


_OPERATORS = {f"__{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}


@cache
def writes(function: Function) -> bool:
    """Whether ``function`` changes its first argument."""
    name = public_name(function).rsplit(".", 1)[-1]
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and f"__{name[3:]}" in _OPERATORS)


@cache
def changes_values(function: Function) -> bool:
    """Whether ``function``, which :func:`writes`, changes values."""
    return public_name(function).rsplit(".", 1)[-1] not in ("requires_grad_", "detach_", "share_memory_", "rename_")


@cache
def public_name(function: Function) -> str:
    """The name by which a user knows ``function``, for messages."""
    name: str = torch.overrides.resolve_name(function) or getattr(function, "__name__", str(function))
    return name.removeprefix("torch.functional.").removesuffix(".__get__")
