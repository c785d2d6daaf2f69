"""Code with other functions behind some of its names: where they are found, and what stays as it is."""

from __future__ import annotations

from functools import wraps
from inspect import signature
from typing import Any

import torch_geometric.utils
import torch_geometric.utils as U

from pyg_dist.conv.function_patching import copy_of_classes, patched

FACTOR = 1


def stock(x: int) -> int:
    return x


def ours(x: int) -> int:
    return 100 * x


def calls_it(x: int) -> int:
    return stock(x) + FACTOR


def calls_itself(x: int) -> int:
    return stock(x) if x < 2 else calls_itself(x - 1)


def direct(x: int, y: int = 1, *, z: int = 0) -> int:
    """Doc."""
    return stock(x) + y + z


def through(x: int) -> int:
    return calls_it(x)


def within(x: int) -> list[int]:
    return [stock(k) for k in range(x)]


def untouched(x: int) -> int:
    return x + FACTOR


def decorated(function: Any) -> Any:
    @wraps(function)
    def twice(*args: Any) -> Any:
        return 2 * function(*args)

    return twice


@decorated
def beneath(x: int) -> int:
    return stock(x)


SUBSTITUTES = {stock: ours}


def test_where_names_are_found() -> None:
    assert patched(direct, SUBSTITUTES)(2) == 201
    assert patched(direct, SUBSTITUTES)(2, 3, z=4) == 207
    assert patched(through, SUBSTITUTES)(2) == 201
    assert patched(within, SUBSTITUTES)(3) == [0, 100, 200]
    assert patched(beneath, SUBSTITUTES)(2) == 400
    assert patched(calls_itself, SUBSTITUTES)(1) == 100
    assert patched(untouched, SUBSTITUTES)(2) == 3


def test_many_that_call_one_another() -> None:
    """One copy of each: by way of every chain of calls there would be more than nine hundred million."""
    calls = " + ".join(f"helper_{k}(n - 1)" for k in range(12))
    names: dict[str, Any] = {"stock": stock, "__name__": __name__}
    for k in range(12):
        exec(f"def helper_{k}(n):\n    return {calls} if n else stock({k})", names)
    expected = 100 * sum(range(12))
    assert patched(names["helper_0"], SUBSTITUTES)(2) == 12 * expected
    assert names["helper_0"](1) == sum(map(stock, range(12)))


def counted(n: int) -> int:
    """Counts its calls, as a script does that prints them."""
    counted.calls += 1  # type: ignore[attr-defined]
    return stock(n)


def counting(function: Any) -> Any:
    """A decorator that counts calls."""

    @wraps(function)
    def outer(*args: Any) -> Any:
        outer.calls += 1  # type: ignore[attr-defined]
        return function(*args)

    outer.calls = 1  # type: ignore[attr-defined]
    return outer


@counting
def decorated(n: int) -> int:
    return stock(n)


def calls_decorated(n: int) -> int:
    return int(decorated(n))


def test_attributes_of_a_function_are_the_scripts() -> None:
    counted.calls = 1  # type: ignore[attr-defined]
    for calling, function in ((counted, counted), (calls_decorated, decorated), (decorated, decorated)):
        before, wrapped = function.calls, getattr(function, "__wrapped__", None)
        twin = patched(calling, SUBSTITUTES)
        assert twin(2) == 200
        assert function.calls == before + 1
        assert function.__wrapped__ is wrapped if wrapped else not hasattr(function, "__wrapped__")
        assert signature(twin) == signature(calling)


def test_the_originals_stay() -> None:
    twin = patched(direct, SUBSTITUTES)
    assert (twin.__name__, twin.__doc__, twin.__module__) == ("direct", "Doc.", __name__)
    assert [direct(2), through(2), beneath(2)] == [3, 3, 4]


def test_globals_are_read_when_they_are_used() -> None:
    global FACTOR
    twin = patched(through, SUBSTITUTES)
    FACTOR = 5
    try:
        assert twin(2) == 205
    finally:
        FACTOR = 1


def assigns(x: int) -> int:
    global FACTOR
    FACTOR = stock(x)
    return FACTOR


def through_one_that_assigns(x: int) -> int:
    return assigns(x) + stock(FACTOR)


def test_what_assigns_globals_stays_as_it_is() -> None:
    """A copy would assign a name of its own, which nothing else reads."""
    global FACTOR
    try:
        assert patched(assigns, SUBSTITUTES)(3) == 3
        assert FACTOR == 3
        assert patched(through_one_that_assigns, SUBSTITUTES)(4) == 404
        assert FACTOR == 4
    finally:
        FACTOR = 1


def test_names_of_the_enclosing_function() -> None:
    inner, factor = stock, 3

    def encloses(x: int) -> int:
        return inner(x) * factor

    def encloses_that(x: int) -> int:
        return encloses(x)

    assert patched(encloses_that, SUBSTITUTES)(2) == 600
    assert encloses_that(2) == 6
    factor = 4
    assert patched(encloses, SUBSTITUTES)(2) == 800


def by_alias(x: Any) -> Any:
    return U.softmax(x, x), U.degree


def by_full_name(x: Any) -> Any:
    return torch_geometric.utils.softmax(x, x), torch_geometric.utils.degree


def test_attributes_of_pygs_modules() -> None:
    substitutes = {U.softmax: lambda x, index: ("ours", x)}
    for function in (by_alias, by_full_name):
        assert patched(function, substitutes)(1) == (("ours", 1), U.degree)
    assert U.softmax is torch_geometric.utils.softmax


class Root:
    def value(self) -> int:
        return 1


class First(Root):
    def value(self) -> int:
        return stock(2) + super().value()

    def named(self) -> str:
        return "first"


class Second(First):
    def value(self) -> int:
        return 10 * super().value()

    def named(self) -> str:
        return "second"


class Kinds(Root):
    @staticmethod
    def static(x: int) -> int:
        return stock(x)

    @classmethod
    def of_class(cls, x: int) -> tuple[type, int]:
        return cls, stock(x)

    @property
    def prop(self) -> int:
        return stock(super().value())


class Plain:
    def scaled(self) -> int:
        return stock(3)


class Scales(Plain):
    def scaled(self) -> int:
        return 10 * super().scaled()


class Mixed(Root, Scales):
    def value(self) -> int:
        return self.scaled() + super().value()


def test_super_leads_from_mixin_to_mixin() -> None:
    """Those named behind the root."""
    code = copy_of_classes(Mixed.__mro__, Root, Root, SUBSTITUTES)
    both: Any = type("Both", (code, Mixed), {})
    assert both().value() == 10 * 300 + 1
    assert Mixed().value() == 10 * stock(3) + 1


def test_static_and_class_methods_and_properties() -> None:
    twin: Any = copy_of_classes(Kinds.__mro__, Root, Root, SUBSTITUTES)
    assert twin.static(2) == twin().static(2) == 200
    assert twin().of_class(2) == (twin, 200)
    assert twin().prop == 100
    assert (Kinds.static(2), Kinds().prop) == (2, 1)


def test_super_leads_from_copy_to_copy() -> None:
    twin: Any = copy_of_classes(Second.__mro__, Root, Root, SUBSTITUTES)()
    assert twin.value() == 10 * (200 + 1)
    assert twin.named() == "second"
    assert Second().value() == 30


def test_super_leads_from_the_last_copy_to_the_root() -> None:
    """Not to the originals, which a class may inherit as well: they would do their part once more."""
    code = copy_of_classes(Second.__mro__, Root, Root, SUBSTITUTES)
    both: Any = type("Both", (code, Second), {})
    assert both().value() == 10 * (200 + 1)
