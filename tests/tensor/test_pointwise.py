"""Every element-wise function under every name that torch has for it, with operands of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_torch import LAYOUTS, WORLD_SIZES, Expression, Operands, check, works_in_torch
from workers import Workers

from pyg_dist.tensor import pointwise
from pyg_dist.tensor.table import TABLE, Function

Form = Callable[[Function, Operands], Any]

BINARY: list[Form] = [
    lambda f, t: f(t.x, t.y),
    lambda f, t: f(t.x, 2.0),
    lambda f, t: f(2.0, t.x),
    lambda f, t: f(t.x, t.vector),
    lambda f, t: f(t.vector, t.x),
    lambda f, t: f(t.x, t.row),
    lambda f, t: f(t.x, t.full),
    lambda f, t: f(t.full, t.x),
    lambda f, t: f(t.x, t.scalar),
    lambda f, t: f(t.x, t.column),
    lambda f, t: f(t.v, t.u),
    lambda f, t: f(t.v, t.full_v),
    lambda f, t: f(t.c, t.c.flip(-1)),
    lambda f, t: f(t.x, other=t.y),
]
INTEGER: list[Form] = [
    lambda f, t: f(t.i, t.j),
    lambda f, t: f(t.i, 2),
    lambda f, t: f(2, t.i),
    lambda f, t: f(t.i, t.full_i),
    lambda f, t: f(t.full_i, t.j),
]
LOGICAL: list[Form] = [lambda f, t: f(t.m, t.n), lambda f, t: f(t.m, t.mask.view(-1, 1))]
POSITIVE: list[Form] = [lambda f, t: f(t.p)]

FORMS: dict[str, list[Form]] = {
    **dict.fromkeys("log log2 log10 log1p sqrt rsqrt asin acos atanh arcsin arccos arctanh logit erfinv".split(), POSITIVE),
    **dict.fromkeys("lgamma digamma reciprocal".split(), POSITIVE),
    **dict.fromkeys(("acosh", "arccosh"), [lambda f, t: f(t.p + 1)]),
    **dict.fromkeys("pow float_power xlogy __pow__ __rpow__".split(), [
        lambda f, t: f(t.p, t.y), lambda f, t: f(t.p, 3), lambda f, t: f(2.0, t.x), lambda f, t: f(t.p, t.vector),
        lambda f, t: f(t.p, t.full), lambda f, t: f(t.class_weight, t.x),
    ]),
    **dict.fromkeys("bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __rand__ __ror__ __rxor__".split(),
                    INTEGER + LOGICAL),
    **dict.fromkeys("bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __rlshift__ __rrshift__".split(),
                    INTEGER),
    **dict.fromkeys("logical_and logical_or logical_xor".split(), LOGICAL + BINARY),
    **dict.fromkeys("bitwise_not __invert__ logical_not".split(), [lambda f, t: f(t.m), lambda f, t: f(t.i)]),
    "ldexp": [lambda f, t: f(t.x, t.i), lambda f, t: f(t.x, t.full_i)],
    "threshold": [lambda f, t: f(t.x, 0.1, 2.0)],
    "full_like": [lambda f, t: f(t.x, 2.5), lambda f, t: f(t.v, 2, dtype=torch.int64)],
    "empty_like": [lambda f, t: f(t.x).shape],
    "fill": [lambda f, t: f(t.x, 2.0), lambda f, t: f(t.x, t.scalar)],
    "leaky_relu": [lambda f, t: f(t.x), lambda f, t: f(t.x, negative_slope=0.2)],
    "gelu": [lambda f, t: f(t.x), lambda f, t: f(t.x, approximate="tanh")],
    "softplus": [lambda f, t: f(t.x), lambda f, t: f(t.x, 2.0, 0.5)],
    "nan_to_num": [lambda f, t: f(t.holes), lambda f, t: f(t.holes / 0, nan=1.0, posinf=2.0, neginf=-2.0)],
    "isnan": [lambda f, t: f(t.holes)],
    "type": [lambda f, t: f(t.x, torch.float32), lambda f, t: f(t.i, torch.float64)],
    "clone": [lambda f, t: f(t.x), lambda f, t: f(t.c, memory_format=torch.contiguous_format)],
    **dict.fromkeys(("clamp", "clip"), [
        lambda f, t: f(t.x, -0.5, 0.5), lambda f, t: f(t.x, min=t.y), lambda f, t: f(t.x, max=t.vector),
        lambda f, t: f(t.x, t.full, t.row + 1),
    ]),
    **dict.fromkeys(("clamp_min", "clamp_max"), [lambda f, t: f(t.x, 0.1), lambda f, t: f(t.x, t.y)]),
    "lerp": [
        lambda f, t: f(t.x, t.y, 0.3), lambda f, t: f(t.x, t.y, t.p), lambda f, t: f(t.x, t.full, t.scalar),
        lambda f, t: f(t.full, t.y, weight=0.3),
    ],
    **dict.fromkeys(("addcmul", "addcdiv"), [
        lambda f, t: f(t.x, t.y, t.p), lambda f, t: f(t.x, t.full, t.p, value=0.5), lambda f, t: f(t.full, t.vector, t.p),
    ]),
    "masked_fill": [
        lambda f, t: f(t.x, t.m, 2.0), lambda f, t: f(t.x, t.mask.view(-1, 1), t.scalar), lambda f, t: f(t.full, t.m, 1.0),
        lambda f, t: f(t.v, t.mask, -1.0),
    ],
    "requires_grad_": [lambda f, t: f(t.x.detach()).requires_grad, lambda f, t: f(t.x.detach(), False)],
    "copy_": [lambda f, t: f(t.x, t.y), lambda f, t: f(t.x, t.full), lambda f, t: f(t.x, t.vector), lambda f, t: f(t.x, t.i)],
    "detach_": [lambda f, t: f(t.x * 1)],
    "zeta": [],
}  # fmt: skip
BINARY_NAMES = {*pointwise._BROADCASTING.split(), *(f"__{n}__" for n in pointwise._DUNDER.split())}
BINARY_NAMES |= {f"__r{n}__" for n in pointwise._DUNDER.split()}
NEEDS_GPU = {torch.Tensor.cuda}  # moving to a GPU has no reference here


def base_name(name: str) -> tuple[str, bool]:
    """The name without the mark of an in-place form, and whether there was one."""
    if name.startswith("__i") and name not in ("__invert__", "__int__"):
        return f"__{name[3:]}", True
    return (name[:-1], True) if name.endswith("_") and not name.endswith("__") and name not in FORMS else (name, False)


def forms_of(function: Function) -> list[Expression]:
    """The calls of one function that torch itself takes."""
    base, in_place = base_name(name_of(function))
    forms = FORMS.get(base) or (BINARY if base in BINARY_NAMES else [lambda f, t: f(t.x), lambda f, t: f(t.c)])

    def call(form: Form) -> Expression:
        if in_place or function in (torch.Tensor.copy_, torch.Tensor.zero_):
            return lambda t: form(lambda first, *rest, **named: function(first.clone(), *rest, **named), t)
        return lambda t: form(function, t)

    return [call(form) for form in forms]


def name_of(function: Function) -> str:
    names = [n for n in dir(torch.Tensor) if getattr(torch.Tensor, n, None) is function]
    return min(names, key=len) if names else function.__name__.removeprefix("special_")


FUNCTIONS: dict[str, list[Function]] = {}
for _function, _handler in TABLE.items():
    if _handler in (pointwise.pointwise, pointwise.pointwise_) and _function not in NEEDS_GPU:
        FUNCTIONS.setdefault(name_of(_function), []).append(_function)


def agree(name: str) -> None:
    for function in FUNCTIONS[name]:
        for layout in LAYOUTS:
            valid = [form for form in forms_of(function) if works_in_torch(form, layout)]
            assert valid, f"no form of {function} works in torch"
            for k, form in enumerate(valid):
                check(form, layout, f"{name}, form {k}")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_pointwise(workers: Callable[[int], Workers], world_size: int, name: str) -> None:
    workers(world_size).run(agree, name)
