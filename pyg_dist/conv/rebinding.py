"""PyG's own code with other functions behind some of its names.

A conv's forward, message and update run as PyG wrote them, but ``softmax`` in them has to be the distributed one. So
the functions of a class are copied with globals in which the name leads there. PyG's modules stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import update_wrapper
from types import CellType, CodeType, FunctionType
from typing import Any

Functions = Mapping[Callable[..., Any], Callable[..., Any]]


def copy_of_classes(classes: tuple[type, ...], base: type, substitutes: Functions) -> type:
    """A class with the methods of ``classes``, subclasses first as in an MRO, above ``base``.

    Each has its own copy in the chain, so that ``super()`` in a method leads from copy to copy.
    """
    for original in reversed(classes):
        own_class = CellType()
        methods = {
            name: rebound(function, substitutes, own_class)
            for name, function in vars(original).items()
            if isinstance(function, FunctionType)
        }
        base = type(original.__name__, (base,), {**methods, "__module__": original.__module__})
        own_class.cell_contents = base
    return base


def rebound(function: FunctionType, substitutes: Functions, own_class: CellType | None = None) -> FunctionType:
    """A copy whose globals have ``substitutes``, also in the functions that it calls, and whose class is another."""
    names = _names(function.__code__)
    changed = {name: other for name in names if (other := _other(function, name, substitutes, frozenset())) is not None}
    closure = None
    if function.__closure__ is not None:
        decorated = getattr(function, "__wrapped__", None)  # under torch.no_grad(), for instance
        closure = list(function.__closure__)
        for k, name in enumerate(function.__code__.co_freevars):
            if name == "__class__" and own_class is not None:
                closure[k] = own_class
            elif isinstance(decorated, FunctionType) and closure[k].cell_contents is decorated:
                closure[k] = CellType(rebound(decorated, substitutes, own_class))
    return _copy(function, changed, closure)


def _other(
    function: FunctionType, name: str, substitutes: Functions, callers: frozenset[FunctionType]
) -> Callable[..., Any] | None:
    """What the global ``name`` of ``function`` has to lead to, or None if to what it does."""
    called = function.__globals__.get(name)
    if not isinstance(called, FunctionType) or called in callers:
        return None
    if called in substitutes:
        return substitutes[called]
    if not (called.__module__.startswith("torch_geometric.") or called.__module__ == function.__module__):
        return None
    further = {n: _other(called, n, substitutes, callers | {function}) for n in _names(called.__code__)}
    changed = {n: other for n, other in further.items() if other is not None}
    return _copy(called, changed) if changed else None


class _Globals(dict[str, Any]):
    """Some names, and a module's own for all others: what the module assigns later is seen, too."""

    def __init__(self, changed: dict[str, Any], module: dict[str, Any]) -> None:
        super().__init__(changed)
        self._module = module

    def __missing__(self, name: str) -> Any:
        return self._module[name]


def _copy(function: FunctionType, changed: dict[str, Any], closure: list[CellType] | None = None) -> FunctionType:
    names = _Globals(changed, function.__globals__) if changed else function.__globals__
    cells = function.__closure__ if closure is None else tuple(closure)
    twin = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(twin, function)
    del twin.__dict__["__wrapped__"]  # it stands for the function, and does not call it
    return twin


def _names(code: CodeType) -> set[str]:
    """The global names that ``code`` may read, inner functions included."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)
