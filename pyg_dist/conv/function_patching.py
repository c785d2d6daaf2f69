"""Copies of PyG's functions that call substitutes, such as the distributed ``softmax``.

A conv's forward, message and update run as PyG wrote them, with globals in which some names are bound to substitutes.
PyG's modules are not changed.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import update_wrapper
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from pyg_dist.tensor.calling_code import INSTALLED

Functions = Mapping[Callable[..., object], Callable[..., object]]

_METHODS = (FunctionType, staticmethod, classmethod, property)


def copy_of_classes(mro: tuple[type, ...], root: type, base: type, substitutes: Functions) -> type:
    """Copies of the classes of ``mro`` before ``root``: a chain of subclasses of ``base``, ``root`` or an extension.

    Each class is copied, so that ``super()`` in a method leads from copy to copy, and from the last one to ``base`` or
    ``root``, also in a class that inherits from the originals, too.
    """
    classes, beyond = _below(root, mro), mro[mro.index(root) :]
    names = {name for original in classes for name, member in vars(original).items() if isinstance(member, _METHODS)}
    names -= {name for class_ in _below(root, base.__mro__) for name in vars(class_)}
    found = ((name, next((vars(class_)[name] for class_ in beyond if name in vars(class_)), None)) for name in names)
    inherited = {name: member for name, member in found if member is not None}
    base = type(base.__name__, (base,), {**inherited, "__module__": base.__module__})
    mixins = [class_ for class_ in beyond if class_ not in root.__mro__]  # named behind `root`
    for original in (*reversed(mixins), *reversed(classes)):
        own_class = CellType()
        methods = {
            name: twin
            for name, member in vars(original).items()
            if (original in classes or not hasattr(root, name))
            and (twin := _method(member, substitutes, own_class)) is not None
        }
        base = type(original.__name__, (base,), {**methods, "__module__": original.__module__})
        own_class.cell_contents = base
    return base


def _below(root: type, mro: tuple[type, ...]) -> tuple[type, ...]:
    return mro[: mro.index(root)]


def _method(member: object, substitutes: Functions, own_class: CellType | None) -> Any:
    """A copy of a method, static method, class method or property; ``None`` for any other member."""
    if isinstance(member, FunctionType):
        return patched(member, substitutes, own_class)
    if isinstance(member, (staticmethod, classmethod)) and isinstance(member.__func__, FunctionType):
        return type(member)(patched(member.__func__, substitutes, own_class))
    if isinstance(member, property):
        parts = (member.fget, member.fset, member.fdel)
        return property(*(None if part is None else _method(part, substitutes, own_class) for part in parts))
    return None


def patched(function: FunctionType, substitutes: Functions, own_class: CellType | None = None) -> FunctionType:
    """A copy of a function that calls ``substitutes``; ``own_class``: the cell of ``__class__`` for a copied method.

    They replace globals, attributes of PyG's modules and names of the enclosing function. A function that is called and
    leads to a substitute is copied, too, once.
    """
    own = [function]
    while isinstance(decorated := getattr(own[-1], "__wrapped__", None), FunctionType):  # such as by torch.no_grad()
        own.append(decorated)
    calls = _calls_below(function, substitutes)
    changed = {f for f, called in calls.items() if not substitutes.keys().isdisjoint(called)}
    while more := {f for f, called in calls.items() if f not in changed and not changed.isdisjoint(called)}:
        changed |= more
    changed |= {f for f in own if f in calls}
    leads = {f: not calls[f].isdisjoint({*changed, *substitutes}) for f in changed}
    twins = {f: _copy(f, own_class if f in own else None, leads[f]) for f in changed}

    def other(value: object, names: set[str], caller: FunctionType, modules: frozenset[ModuleType]) -> object:
        if isinstance(value, FunctionType):
            return substitutes[value] if value in substitutes else twins.get(value) if value in calls[caller] else None
        if not isinstance(value, ModuleType) or value in modules or not _is_looked_into(value.__name__, caller):
            return None
        inner = {name: other(vars(value).get(name), names, caller, modules | {value}) for name in names}
        found = {name: twin for name, twin in inner.items() if twin is not None}
        return _Module(value, found) if found else None

    for original, twin in twins.items():
        names = _names(original.__code__) if leads[original] else set[str]()
        for name in names:
            replaced = other(original.__globals__.get(name), names, original, frozenset())
            if replaced is not None:
                twin.__globals__[name] = replaced
        for cell in (twin.__closure__ or ()) if leads[original] else ():
            replaced = other(_contents(cell), names, original, frozenset())
            if replaced is not None:
                cell.cell_contents = replaced
    return twins[function]


def _calls_below(function: FunctionType, substitutes: Functions) -> dict[FunctionType, set[FunctionType]]:
    """The functions that a function may call, directly or not, and what each of these may call: substitutes, and
    functions to look into.

    Calls of functions that assign global names are left out: a copy would assign its own.
    """
    calls, waiting = dict[FunctionType, set[FunctionType]](), [function]
    while waiting:
        caller = waiting.pop()
        if caller in calls:
            continue
        calls[caller] = set()
        if not _assigns_globals(caller.__code__):
            names = _names(caller.__code__)
            cells = (_contents(cell) for cell in caller.__closure__ or ())
            for value in (*(caller.__globals__.get(name) for name in names), *cells):
                calls[caller].update(_functions_in(value, names, caller, substitutes, frozenset()))
            waiting += [called for called in calls[caller] if called not in substitutes]
    return calls


def _functions_in(
    value: object, names: set[str], caller: FunctionType, substitutes: Functions, modules: frozenset[ModuleType]
) -> Iterator[FunctionType]:
    """The substitutes and functions to look into: ``value``, or a module's attributes that ``caller`` reads."""
    if isinstance(value, FunctionType):
        if value in substitutes or _is_looked_into(value.__module__, caller):
            yield value
    elif isinstance(value, ModuleType) and value not in modules and _is_looked_into(value.__name__, caller):
        for name in names:
            yield from _functions_in(vars(value).get(name), names, caller, substitutes, modules | {value})


def _is_looked_into(module: str | None, caller: FunctionType) -> bool:
    """Whether a module is PyG's, a script's own, or of the package of ``caller``."""
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
    """A module with other values for some names."""

    def __init__(self, module: ModuleType, changed: dict[str, object]) -> None:
        self.__dict__.update(changed)
        self._module = module

    def __getattr__(self, name: str) -> object:
        return getattr(self._module, name)


class _Globals(dict[str, object]):
    """Some names, and a module's globals for all others, also those that it assigns later."""

    def __init__(self, module: dict[str, object]) -> None:
        super().__init__()
        self._module = module

    def __missing__(self, name: str) -> object:
        return self._module[name]


def _copy(function: FunctionType, own_class: CellType | None, has_others: bool) -> FunctionType:
    """A copy of a function, with globals and cells of its own if it ``has_others`` to call."""
    names: dict[str, Any] = _Globals(function.__globals__) if has_others else function.__globals__
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    closure = tuple(
        own_class if name == "__class__" and own_class is not None else _own_cell(cell) if has_others else cell
        for name, cell in cells
    )
    twin = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    twin.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(twin, function, updated=())
    twin.__dict__ = vars(function)  # shared: a script may read what a helper stores there
    return twin


def _own_cell(cell: CellType) -> CellType:
    """A copy of a cell with a function or a module in it; cells of other variables, which may change, are shared."""
    value = _contents(cell)
    return CellType(value) if isinstance(value, (FunctionType, ModuleType)) else cell


_ASSIGNS = {dis.opmap["STORE_GLOBAL"], dis.opmap["DELETE_GLOBAL"]}


def _assigns_globals(code: CodeType) -> bool:
    """Whether ``code`` assigns global names, inner functions included."""
    inner = any(_assigns_globals(c) for c in code.co_consts if isinstance(c, CodeType))
    return inner or not _ASSIGNS.isdisjoint(code.co_code[::2])


def _names(code: CodeType) -> set[str]:
    """The global names that ``code`` may read, inner functions included."""
    inner = (_names(c) for c in code.co_consts if isinstance(c, CodeType))
    return set(code.co_names).union(*inner)
