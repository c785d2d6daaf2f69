"""The function table: the handler of each torch function for tensors whose rows lie on several ranks.

Each module beside this one registers its functions here, by name, with :func:`implements`. A name stands for every
function that torch exposes under it: ``relu`` is ``torch.relu``, ``Tensor.relu`` and ``F.relu``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Handler = Callable[[Function, Args, Kwargs], object]

TABLE: dict[Function, Handler] = {}
ARITHMETIC: set[Function] = set()
"""Functions whose integers are values, such as factors."""
KEEPS_ROWS: set[Handler] = set()
"""Handlers of functions whose values stay in their rows, so that they can write to ``out``."""
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


def register(handler: Handler, *names: str, namespaces: Sequence[object] = NAMESPACES) -> None:
    """Let ``handler(function, args, kwargs)`` answer for the functions called ``names``."""
    for function in functions(*names, namespaces=namespaces):
        TABLE[function] = handler


def implements(*names: str, namespaces: Sequence[object] = NAMESPACES) -> Callable[[Handler], Handler]:
    """Decorator form of :func:`register`."""

    def decorate(handler: Handler) -> Handler:
        register(handler, *names, namespaces=namespaces)
        return handler

    return decorate


_OF_NUMPY = {"axis": "dim", "keepdims": "keepdim"}


def bind(names: str, args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """Arguments by name; torch's C functions have no signature to inspect, and take NumPy's names as well."""
    bound = dict(zip(names.split(), args, strict=False))
    bound.update({_OF_NUMPY.get(name, name): value for name, value in kwargs.items()})
    return bound


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
def assigns_result(function: Function) -> bool:
    """Whether ``function`` is an operator like ``+=``, after which Python assigns: ``x[:3] += 1`` changes ``x``."""
    return public_name(function).rsplit(".", 1)[-1].startswith("__i")


@cache
def public_name(function: Function) -> str:
    """The name by which a user knows ``function``, for messages."""
    name: str = torch.overrides.resolve_name(function) or getattr(function, "__name__", str(function))
    return name.removeprefix("torch.functional.").removesuffix(".__get__")
