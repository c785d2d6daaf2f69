"""Copies of PyG's functions with other functions behind some of their global names.

A conv's forward, message and update run as PyG wrote them, but ``softmax`` in them has to be the distributed one. So
the functions of a class are copied with globals in which the name leads there. PyG's modules stay as they are.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Mapping
from functools import update_wrapper
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from pyg_dist.tensor.calling_code import INSTALLED

Functions = Mapping[Callable[..., object], Callable[..., object]]

_METHODS = (FunctionType, staticmethod, classmethod, property)


def copy_of_classes(mro: tuple[type, ...], root: type, base: type, substitutes: Functions) -> type:
    """Copies of the classes of ``mro`` before ``root``: a chain of subclasses of ``base``, ``root`` or an extension.

    Each class has a copy of its own, so that ``super()`` in a method leads from copy to copy, and from the last one to
    ``base`` or ``root``: also in a class that inherits the originals beside the copies.
    """
    classes, beyond = _below(root, mro), mro[mro.index(root) :]
    names = {name for original in classes for name, member in vars(original).items() if isinstance(member, _METHODS)}
    names -= {name for class_ in _below(root, base.__mro__) for name in vars(class_)}
    found = ((name, next((vars(class_)[name] for class_ in beyond if name in vars(class_)), None)) for name in names)
    inherited = {name: member for name, member in found if member is not None}
    for mixin in reversed([class_ for class_ in beyond if class_ not in root.__mro__]):  # named behind `root`
        own = {name: member for name, member in vars(mixin).items() if not hasattr(root, name)}
        twins = {name: _method(member, substitutes, None) for name, member in own.items()}
        inherited |= {name: twin for name, twin in twins.items() if twin is not None}
    base = type(base.__name__, (base,), {**inherited, "__module__": base.__module__})
    for original in reversed(classes):
        own_class = CellType()
        methods = {
            name: twin
            for name, member in vars(original).items()
            if (twin := _method(member, substitutes, own_class)) is not None
        }
        base = type(original.__name__, (base,), {**methods, "__module__": original.__module__})
        own_class.cell_contents = base
    return base


def _below(root: type, mro: tuple[type, ...]) -> tuple[type, ...]:
    return mro[: mro.index(root)]


def _method(member: object, substitutes: Functions, own_class: CellType | None) -> Any:
    """A copy of a class's method, static and class methods and properties included; ``None`` of anything else."""
    if isinstance(member, FunctionType):
        return patched(member, substitutes, own_class)
    if isinstance(member, (staticmethod, classmethod)) and isinstance(member.__func__, FunctionType):
        return type(member)(patched(member.__func__, substitutes, own_class))
    if isinstance(member, property):
        parts = (member.fget, member.fset, member.fdel)
        return property(*(None if part is None else _method(part, substitutes, own_class) for part in parts))
    return None


def patched(function: FunctionType, substitutes: Functions, own_class: CellType | None = None) -> FunctionType:
    """A copy, of another class, that has ``substitutes`` in place of what it calls.

    They are looked for behind its globals, the attributes of PyG's modules and the names of its enclosing function, and
    in the functions that it calls.
    """
    twin = _patched_copy(function, substitutes, frozenset(), own_class)
    return _copy(function, {}) if twin is None else twin


def _patched_copy(
    function: FunctionType, substitutes: Functions, callers: frozenset[object], own_class: CellType | None = None
) -> FunctionType | None:
    """A copy of ``function`` in which something is another, or ``None`` if nothing would be.

    What assigns global names has none: it would assign the copy's.
    """
    if _assigns_globals(function.__code__):
        return None
    names, seen = _names(function.__code__), callers | {function}
    others = {name: _other(function.__globals__.get(name), names, function, substitutes, seen) for name in names}
    changed = {name: other for name, other in others.items() if other is not None}
    closure = list(function.__closure__ or ())
    decorated = getattr(function, "__wrapped__", None)  # under torch.no_grad(), for instance
    for k, name in enumerate(function.__code__.co_freevars):
        if name == "__class__" and own_class is not None:
            closure[k] = own_class
            continue
        value = _contents(closure[k])
        if isinstance(decorated, FunctionType) and value is decorated:
            other: object = patched(decorated, substitutes, own_class)
        else:
            other = _other(value, names, function, substitutes, seen)
        if other is not None:
            closure[k] = CellType(other)
    if not changed and all(a is b for a, b in zip(closure, function.__closure__ or (), strict=True)):
        return None
    return _copy(function, changed, closure)


def _other(
    value: object, names: set[str], caller: FunctionType, substitutes: Functions, callers: frozenset[object]
) -> object:
    """What replaces ``value`` in the copy of ``caller``, which reads it; ``None``: nothing does."""
    if isinstance(value, ModuleType) and value not in callers and _is_looked_into(value.__name__, caller):
        inner = {n: _other(vars(value).get(n), names, caller, substitutes, callers | {value}) for n in names}
        changed = {n: other for n, other in inner.items() if other is not None}
        return _Module(value, changed) if changed else None
    if not isinstance(value, FunctionType) or value in callers:
        return None
    if value in substitutes:
        return substitutes[value]
    return _patched_copy(value, substitutes, callers) if _is_looked_into(value.__module__, caller) else None


def _is_looked_into(module: str | None, caller: FunctionType) -> bool:
    """Whether ``module`` is PyG's, of the package of ``caller``, or a script's own."""
    package = str(module).partition(".")[0]
    file = str(getattr(sys.modules.get(str(module)), "__file__", ""))
    is_own = package != "pyg_dist" and file.endswith(".py") and not file.startswith(INSTALLED)
    return is_own or package in ("torch_geometric", str(caller.__module__).partition(".")[0])


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet assigned
        return None


class _Module:
    """A module in which some names lead elsewhere."""

    def __init__(self, module: ModuleType, changed: dict[str, object]) -> None:
        self.__dict__.update(changed)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


class _Globals(dict[str, object]):
    """Some names, and a module's own for all others: what the module assigns later is seen, too."""

    def __init__(self, changed: dict[str, object], module: dict[str, object]) -> None:
        super().__init__(changed)
        self._module = module

    def __missing__(self, name: str) -> object:
        return self._module[name]


def _copy(function: FunctionType, changed: dict[str, object], closure: list[CellType] | None = None) -> FunctionType:
    names = _Globals(changed, function.__globals__) if changed else function.__globals__
    cells = function.__closure__ if closure is None else tuple(closure)
    twin = FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    twin.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(twin, function)
    del twin.__dict__["__wrapped__"]  # it stands for the function, and does not call it
    return twin


_ASSIGNS = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}


def _assigns_globals(code: CodeType) -> bool:
    """Whether ``code`` assigns global names, inner functions included."""
    inner = any(_assigns_globals(c) for c in code.co_consts if isinstance(c, CodeType))
    return inner or not _ASSIGNS.isdisjoint(code.co_code[::2])


def _names(code: CodeType) -> set[str]:
    """The global names that ``code`` may read, inner functions included."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)
