"""The one table: which function of torch does what to a tensor whose rows lie on several ranks.

Each module beside this one registers its functions here, by name, with :func:`handles`. A name stands for every
function that torch exposes under it: ``relu`` is ``torch.relu``, ``Tensor.relu``, ``F.relu`` and ``relu_`` of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Handler = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]

TABLE: dict[Function, Handler] = {}
NAMESPACES = (torch, Tensor, torch.nn.functional, torch.special, torch.linalg, torch._C._nn)


def functions(*names: str) -> Iterator[Function]:
    """Every function of torch with one of ``names``; ``"shape.__get__"`` is a property's getter."""
    for name in names:
        attribute, _, accessor = name.partition(".")
        found = False
        for namespace in NAMESPACES:
            function = getattr(namespace, attribute, None)
            if accessor:
                function = getattr(function, accessor, None)
            if callable(function):
                found = True
                yield function
        if not found:  # a misspelt name would leave a hole in the table
            raise LookupError(f"torch has no function named {name!r}")


def register(handler: Handler, *names: str) -> None:
    """Let ``handler(function, args, kwargs)`` answer for the functions called ``names``."""
    for function in functions(*names):
        TABLE[function] = handler


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Decorator form of :func:`register`."""

    def decorate(handler: Handler) -> Handler:
        register(handler, *names)
        return handler

    return decorate


def public_name(function: Function) -> str:
    """The name by which a user knows ``function``."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):  # a property: its descriptor knows the name
        name = getattr(getattr(function, "__self__", None), "__name__", name)
    for namespace, prefix in ((torch, "torch."), (torch.nn.functional, "F."), (torch.linalg, "torch.linalg.")):
        if getattr(namespace, name, None) is function:
            return prefix + name
    return f"Tensor.{name}"
