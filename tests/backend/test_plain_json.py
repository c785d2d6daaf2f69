"""Plain values there and back, with what a caller has for all else, and as peers get them."""

from __future__ import annotations

import json
import re
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch

from pyg_dist.backend.plain_json import decode, encode, from_bytes, to_bytes, typed


def there_and_back(value: Any) -> Any:
    """With whatever is no plain value kept aside."""
    aside: list[Any] = []

    def keep(name: str, thing: Any) -> dict[str, Any]:
        aside.append((name, thing))
        return {"$aside": len(aside) - 1}

    def take(kind: str, place: int) -> Any:
        if kind != "$aside":
            raise ValueError(kind)
        return aside[place][1]

    return decode(json.loads(json.dumps(encode(value, keep, "x"))), take)


@pytest.mark.parametrize(
    "state",
    [
        None, True, 3, -0.0, 1e-310, 0.1, "a word", [], {}, (), [1, [2.5, None]], (0.9, 0.999), {"a": {"b": (1,)}},
        {0: {"step": 3}, 1: []}, {"$tensor": "no tensor"}, {("a", 1): 2}, Counter({2: 1, 5: 1}), {"": {"$": 1}},
    ],
)  # fmt: skip
def test_values(state: Any) -> None:
    found = there_and_back(state)
    assert found == state
    assert type(found) is type(state)
    assert repr(found) == repr(state)


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_what_json_has_no_number_for(value: float) -> None:
    assert repr(there_and_back(value)) == repr(value)


def test_numbers_of_numpy_and_ordered_dicts_become_plain() -> None:
    assert there_and_back(OrderedDict(a=np.float64(0.1))) == {"a": 0.1}


def test_all_else_is_for_the_caller_by_name() -> None:
    names: list[str] = []

    def note(name: str, thing: Any) -> dict[str, Any]:
        names.append(f"{name} {type(thing).__name__}")
        return {}

    encode({"state": {0: [torch.ones(1), 2]}, "other": ({1, 2}, b"")}, note, "x")
    assert names == ["x.state.0.0 Tensor", "x.other.0 set", "x.other.1 bytes"]
    thing = object()
    assert there_and_back({"there": [thing]})["there"][0] is thing


@pytest.mark.parametrize("content", [{"$pickle": "x"}, {"$tuple": [1], "$dict": []}, {"$counter": 3}])
def test_what_is_no_value(content: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        from_bytes(json.dumps(content).encode())


@pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "bool", "complex128", "uint16"])
def test_arrays_for_peers(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    found = from_bytes(to_bytes((torch.bfloat16, torch.Size([2, 3]), array, np.float64("nan"))))
    assert found[:2] == (torch.bfloat16, (2, 3))
    assert found[2].dtype == array.dtype
    assert np.array_equal(found[2], array)
    found[2][0] = 1  # it can be written to


@pytest.mark.parametrize(
    "content", [{"$array": ["|O", [1], "00" * 8]}, {"$dtype": "load"}, {"$array": ["<f8", [3], ""]}]
)
def test_what_a_peer_must_not_say(content: Any) -> None:
    with pytest.raises(ValueError, match=r"OBJECT|no kind|reshape"):
        from_bytes(json.dumps(content).encode())


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"]
    sizes: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: dict[str, Inner]
    pair: tuple[int, str]
    ids: list[int]
    width: int | None = None
    both: tuple[int, int] | None = None
    anything: object = 0


def test_typed_values() -> None:
    content = {"inner": {"x": {"kind": "b", "sizes": [1, 2.5]}}, "pair": [3, "y"], "ids": [1, 2], "anything": [None]}
    assert typed(Outer, content) == Outer({"x": Inner("b", (1.0, 2.5))}, (3, "y"), [1, 2], None, None, [None])
    assert typed(Outer, content | {"width": 4, "both": [1, 2]}).both == (1, 2)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"inner": {"x": {"kind": "c"}}}, "it.inner.x.kind"), ({"inner": {"x": {}}}, "it.inner.x"),
        ({"inner": {"x": {"kind": "a", "more": 1}}}, "it.inner.x"), ({"inner": []}, "it.inner"),
        ({"inner": {"x": {"kind": "a", "sizes": ["1"]}}}, "sizes"), ({"pair": [3]}, "it.pair"),
        ({"pair": [True, "y"]}, "it.pair"), ({"ids": [1, "2"]}, "it.ids"), ({"ids": [1, True]}, "it.ids"),
        ({"width": 1.5}, "it.width"), ({"both": [1]}, "it.both"), ({"pair": None}, "it.pair"),
    ],
)  # fmt: skip
def test_what_is_of_another_type(change: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=re.escape(place)):
        typed(Outer, {"inner": {}, "pair": [3, "y"], "ids": []} | change)
