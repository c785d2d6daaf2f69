"""Values as JSON and back, without a pickle: for what peers and files say.

Dicts with any keys, lists, tuples, counters, strings, numbers and ``None`` come back as they were. What JSON has no
form for is an object with one key that begins with ``$``; of what else there is, such as tensors, the caller says how.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import numpy as np
import torch

T = TypeVar("T")
_SCALARS = (bool, int, float, str)


def encode(value: object, foreign: Callable[[str, object], object], name: str = "") -> Any:
    """The JSON of a value. Not collective.

    ``foreign`` is called with the name and the value of anything else; it returns its JSON, or raises. What is in a
    value is called ``name.key``.
    """
    if value is None or type(value) in _SCALARS:
        return value
    for scalar in _SCALARS:
        if isinstance(value, scalar):  # a number of NumPy's may be one
            return scalar(value)
    if isinstance(value, (list, tuple)):
        items = [encode(item, foreign, f"{name}.{k}") for k, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, dict):
        if type(value) is dict and all(type(key) is str and key[:1] != "$" for key in value):
            return {key: encode(item, foreign, f"{name}.{key}") for key, item in value.items()}
        items = [[encode(k, foreign, f"{name}, a key"), encode(v, foreign, f"{name}.{k}")] for k, v in value.items()]
        if isinstance(value, Counter):
            return {"$counter": items}
        if all(isinstance(key, str) and key[:1] != "$" for key in value):  # of a subclass
            return dict(items)
        return {"$dict": items}
    return foreign(name, value)


def decode(content: object, foreign: Callable[[str, Any], object]) -> Any:
    """The value of which this is the JSON. Not collective.

    ``foreign`` is called with the key and the content of an object that ``encode``'s has made.
    """
    if isinstance(content, list):
        return [decode(item, foreign) for item in content]
    if not isinstance(content, dict):
        return content
    if not any(key[:1] == "$" for key in content):
        return {key: decode(value, foreign) for key, value in content.items()}
    ((kind, value),) = content.items()
    if kind == "$tuple":
        return tuple(decode(item, foreign) for item in value)
    if kind in ("$dict", "$counter"):
        items = {decode(key, foreign): decode(item, foreign) for key, item in value}
        return Counter(items) if kind == "$counter" else items
    return foreign(kind, value)


def typed(kind: type[T], content: object, name: str = "it") -> T:
    """The value of plain JSON, called ``name``: a dataclass, dict, list, tuple, literal or number. Not collective.

    Raises:
        ValueError: It has another form: other fields, or what is not of a field's type.
    """
    return cast(T, _typed(kind, content, name))


def _typed(kind: Any, content: Any, name: str) -> object:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType) and inner[1:] == (NoneType,):
        return None if content is None else _typed(inner[0], content, name)
    if is_dataclass(kind):
        hints, needed = _fields_of(cast(Any, kind))
        if isinstance(content, dict) and needed <= content.keys() <= hints.keys():
            return cast(Any, kind)(**{n: _typed(hints[n], value, f"{name}.{n}") for n, value in content.items()})
    elif origin is dict and isinstance(content, dict):
        return {key: _typed(inner[1], value, f"{name}.{key}") for key, value in content.items()}
    elif origin is list and isinstance(content, list):
        if all(type(value) is inner[0] for value in content):  # most are long lists of numbers
            return content
        return [_typed(inner[0], value, f"{name}.*") for value in content]
    elif origin is tuple and isinstance(content, list):
        kinds = inner[:1] * len(content) if inner[-1] is ... else inner
        if len(kinds) == len(content):
            return tuple(_typed(one, value, f"{name}.*") for one, value in zip(kinds, content, strict=True))
    elif kind is float and type(content) is int:
        return float(content)
    elif kind is object or type(content) in (kind, *inner) or (origin is Literal and content in inner):
        return content
    raise ValueError(f"{str(content)[:60]!r} as {name}")


@cache
def _fields_of(kind: Any) -> tuple[dict[str, Any], set[str]]:
    """The types of a dataclass's fields by name, and which have no default."""
    hints, found = get_type_hints(kind), fields(kind)
    needed = {field.name for field in found if field.default is field.default_factory is MISSING}
    return {field.name: hints[field.name] for field in found}, needed


def to_bytes(value: object) -> bytes:
    """A value, which may hold arrays and dtypes, as a message; all else in it as its ``repr``. Not collective."""
    return json.dumps(encode(value, _array)).encode()


def from_bytes(content: bytes) -> Any:
    """The reverse of :func:`to_bytes`. Not collective."""
    return decode(json.loads(content), _of_array)


def _array(name: str, value: object) -> dict[str, object]:
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return {"$array": [value.dtype.str, list(value.shape), value.tobytes().hex()]}
    return {"$repr": repr(value)}


def _of_array(kind: str, content: Any) -> object:
    if kind == "$repr":
        return str(content)
    if kind == "$dtype" and isinstance(found := getattr(torch, content), torch.dtype):
        return found
    if kind == "$array":
        dtype, shape, values = content
        return np.frombuffer(bytes.fromhex(values), np.dtype(dtype)).reshape(shape).copy()
    raise ValueError(f"{kind!r} is no kind of plain value")
