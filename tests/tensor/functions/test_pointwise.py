"""Every element-wise function under every name that torch has for it, with operands of every kind."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from against_torch import LAYOUTS, Form, agree, check, each, is_in_place, names_in_table
from workers import on_ranks

from pyg_dist.tensor.functions import autograd, pointwise

UNARY: list[Form] = [lambda f, t: f(t.x), lambda f, t: f(t.c)]
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
    lambda f, t: f(2.0, t.v),
    lambda f, t: f(t.v, t.full_v),
    lambda f, t: f(t.c, t.d),
    lambda f, t: f(t.x, other=t.y),
    lambda f, t: f(t.i, t.x.detach()),
]
INTEGER: list[Form] = [
    lambda f, t: f(t.i, t.j),
    lambda f, t: f(t.i, 2),
    lambda f, t: f(2, t.i),
    lambda f, t: f(t.i, t.full_i),
    lambda f, t: f(t.full_i, t.j),
    lambda f, t: f(t.i.int(), t.j.short()),
]
LOGICAL: list[Form] = [lambda f, t: f(t.m, t.n), lambda f, t: f(t.m, t.mask.view(-1, 1))]
POSITIVE: list[Form] = [lambda f, t: f(t.p)]
POWERS: list[Form] = [
    lambda f, t: f(t.p, t.y),
    lambda f, t: f(t.p, 3),
    lambda f, t: f(2.0, t.x),
    lambda f, t: f(t.p, t.vector),
    lambda f, t: f(t.p, t.full),
    lambda f, t: f(t.class_weight, t.x),
]


FORMS: dict[str, Sequence[Form]] = {
    **each("log log2 log10 log1p sqrt rsqrt asin acos atanh arcsin arccos arctanh logit erfinv", POSITIVE),
    **each("lgamma digamma reciprocal ndtri gammaln psi", POSITIVE),
    **each("acosh arccosh", [lambda f, t: f(t.p + 1)]),
    **each("pow float_power xlogy xlog1py __pow__ __rpow__ __ipow__", POWERS),
    **each("bitwise_and bitwise_or bitwise_xor __and__ __or__ __xor__ __rand__ __ror__ __rxor__", INTEGER + LOGICAL),
    **each("bitwise_left_shift bitwise_right_shift __lshift__ __rshift__ __rlshift__ __rrshift__", INTEGER),
    **each("gcd lcm", [lambda f, t: f(t.i, t.j), lambda f, t: f(t.i, t.full_i), lambda f, t: f(t.full_i, t.j)]),
    **each("logical_and logical_or logical_xor", LOGICAL + BINARY[:1]),
    **each("bitwise_not __invert__ logical_not", [lambda f, t: f(t.m), lambda f, t: f(t.i)]),
    "ldexp": [lambda f, t: f(t.x, t.i), lambda f, t: f(t.x, t.full_i)],
    "threshold": [lambda f, t: f(t.x, 0.1, 2.0)],
    "polygamma": [lambda f, t: f(2, t.p), lambda f, t: t.p.polygamma(2)],
    "polygamma_": [lambda f, t: f(t.p, 2)],
    "full_like": [lambda f, t: f(t.x, 2.5), lambda f, t: f(t.v, 2, dtype=torch.int64)],
    "empty_like": [lambda f, t: f(t.x).shape],
    "fill": [lambda f, t: f(t.x, 2.0), lambda f, t: f(t.x, t.scalar)],
    "leaky_relu": [lambda f, t: f(t.x), lambda f, t: f(t.x, negative_slope=0.2)],
    "gelu": [lambda f, t: f(t.x), lambda f, t: f(t.x, approximate="tanh")],
    "softplus": [lambda f, t: f(t.x), lambda f, t: f(t.x, 2.0, 0.5)],
    "nan_to_num": [lambda f, t: f(t.holes), lambda f, t: f(t.holes / 0, nan=1.0, posinf=2.0, neginf=-2.0)],
    "isnan": [lambda f, t: f(t.holes), lambda f, t: f(t.i)],
    "type": [lambda f, t: f(t.x, torch.float32), lambda f, t: f(t.i, torch.float64), lambda f, t: f(t.x)],
    **each("to", [
        lambda f, t: f(t.x, torch.float32), lambda f, t: f(t.i, torch.float64), lambda f, t: f(t.x, "cpu"),
        lambda f, t: f(t.x, t.v.detach().float()), lambda f, t: f(t.x, device="cpu", dtype=torch.float32, copy=True),
        lambda f, t: f(t.vector, t.v.float()), lambda f, t: f(t.x, t.vector),
    ]),
    "type_as": [lambda f, t: f(t.i, t.v), lambda f, t: f(t.i, t.vector), lambda f, t: f(t.full_i, t.v)],
    "to_dense": [lambda f, t: f(t.x)],
    "clone": [lambda f, t: f(t.x), lambda f, t: f(t.c, memory_format=torch.contiguous_format)],
    **each("clamp clip", [
        lambda f, t: f(t.x, -0.5, 0.5), lambda f, t: f(t.x, min=t.y), lambda f, t: f(t.x, max=t.vector),
        lambda f, t: f(t.x, t.full, t.row + 1),
    ]),
    **each("clamp_min clamp_max", [lambda f, t: f(t.x, 0.1), lambda f, t: f(t.x, t.y)]),
    "lerp": [
        lambda f, t: f(t.x, t.y, 0.3), lambda f, t: f(t.x, t.y, t.p), lambda f, t: f(t.x, t.full, t.scalar),
        lambda f, t: f(t.full, t.y, weight=0.3),
    ],
    **each("addcmul addcdiv", [
        lambda f, t: f(t.x, t.y, t.p), lambda f, t: f(t.x, t.full, t.p, value=0.5),
        lambda f, t: f(t.full, t.vector, t.p),
    ]),
    "masked_fill": [
        lambda f, t: f(t.x, t.m, 2.0), lambda f, t: f(t.x, t.mask.view(-1, 1), t.scalar),
        lambda f, t: f(t.full, t.m, 1.0),
        lambda f, t: f(t.v, t.mask, -1.0),
    ],
    "where": [
        lambda f, t: f(t.m, t.x, t.y), lambda f, t: f(t.m, t.x, 0.0), lambda f, t: f(t.m, t.vector, t.x),
        lambda f, t: f(t.mask.view(-1, 1), t.x, t.full), lambda f, t: f(t.x > 0, t.scalar, t.x),
        lambda f, t: f(t.full > 0, t.x, t.row), lambda f, t: t.x.where(t.m, t.y),
        lambda f, t: torch.where(condition=t.m, input=t.x, other=t.y),
    ],
    "broadcast_tensors": [lambda f, t: f(t.x, t.row)[0], lambda f, t: f(t.x, t.column)],
    **each("new_zeros new_ones", [lambda f, t: f(t.x, (3, 2)), lambda f, t: f(t.x, t.N, dtype=torch.int64)]),
    "new_full": [lambda f, t: f(t.x, (2,), 1.5)],
    "new_empty": [lambda f, t: f(t.x, (2, 3)).shape],
    "requires_grad_": [lambda f, t: f(t.x.detach()).requires_grad, lambda f, t: f(t.x.detach(), False)],
    "copy_": [
        lambda f, t: f(t.x, t.y), lambda f, t: f(t.x, t.full), lambda f, t: f(t.x, t.vector), lambda f, t: f(t.x, t.i),
    ],
}  # fmt: skip
BINARY_NAMES = {*pointwise.BROADCASTING.split(), *(f"__{n}__" for n in pointwise.OPERATORS.split())}
BINARY_NAMES |= {f"__r{n}__" for n in pointwise.OPERATORS.split()}
NEEDS_GPU = {"cuda"}  # moving to a GPU has no reference here


def forms_of(name: str) -> list[Form]:
    """The forms of a name; an in-place one has those of the name that it is derived from."""
    if name in FORMS:
        return FORMS[name]
    base = name
    if name.startswith("__i") and f"__{name[3:]}" in BINARY_NAMES:
        base = f"__{name[3:]}"
    elif name.endswith("_") and not name.startswith("__"):
        base = name[:-1]
    return FORMS.get(base) or (BINARY if base in BINARY_NAMES else UNARY)


HANDLERS = (pointwise.pointwise, pointwise.pointwise_, pointwise.cast, pointwise.where, pointwise.new, autograd.detach)
NAMES = [name for name in names_in_table(*HANDLERS) if name not in NEEDS_GPU]


INITIALS = sorted({name.strip("_")[0].lower() for name in NAMES})


@on_ranks(2)
@pytest.mark.parametrize("initial", INITIALS)
def test_pointwise(initial: str) -> None:
    """They do not talk: two ranks are enough, one layout for each name, and one further dtype."""
    for k, name in enumerate(NAMES):
        if name.strip("_")[0].lower() == initial:
            # Forms that several names share do not fit each of them.
            every_form = name in FORMS and not is_in_place(name) and not name.startswith("__")
            layouts = (list(LAYOUTS)[k % 2],)
            agree(name, forms_of(name), every_form=every_form, layouts=layouts, other_dtypes=(torch.bfloat16,))


@on_ranks(2)
def test_numpy_operands() -> None:
    """An array with a value for each row is cut as a plain tensor is; torch takes arrays in operators alone."""
    for layout in LAYOUTS:
        for f in (lambda v, a: v == a, lambda v, a: a == v, lambda v, a: a / v, lambda v, a: v - a):
            check(lambda t, f=f: f(t.v.detach(), np.linspace(0.5, 1.5, t.N)), layout)
        check(lambda t: t.x.detach() * np.ones(t.x.shape, dtype=np.float32), layout)
