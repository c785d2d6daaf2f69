"""PyG's own code with other functions behind some of its names.

A conv's forward, message and update run as PyG wrote them, but ``softmax`` in them has to be the distributed one. So
each function that needs it is copied with globals in which the name leads there. PyG's modules stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from types import CodeType, FunctionType
from typing import Any

Functions = Mapping[Callable[..., Any], Callable[..., Any]]


def rebound(function: FunctionType, substitutes: Functions) -> FunctionType:
    """``function``, or a copy whose globals have ``substitutes``, also in the functions of PyG that it calls."""
    return _rebound(function, substitutes, frozenset())


def _rebound(function: FunctionType, substitutes: Functions, callers: frozenset[FunctionType]) -> FunctionType:
    changed: dict[str, Any] = {}
    for name in _names(function.__code__):
        called = function.__globals__.get(name)
        if not isinstance(called, FunctionType) or called in callers:
            continue
        if called in substitutes:
            changed[name] = substitutes[called]
        elif called.__module__.startswith("torch_geometric.") or called.__module__ == function.__module__:
            copy = _rebound(called, substitutes, callers | {function})
            if copy is not called:
                changed[name] = copy
    if not changed:
        return function
    twin = FunctionType(
        function.__code__, {**function.__globals__, **changed}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    twin.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(twin, function)
    del twin.__dict__["__wrapped__"]  # it stands for the function, and does not call it
    return twin


def _names(code: CodeType) -> set[str]:
    """The global names that ``code`` may read, inner functions included."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)
