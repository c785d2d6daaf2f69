"""Functions that work element by element: on the local rows; only all pairs of rows, ``x[:, None] - y``, gather y's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend.dense import large_tensors
from pyg_dist.errors import LayoutMismatchError, MixedRowsError
from pyg_dist.tensor.functions.full_tensor import on_full_tensor
from pyg_dist.tensor.operands import like_rows
from pyg_dist.tensor.registry import (
    ARITHMETIC,
    KEEPS_ROWS,
    NAMESPACES,
    Args,
    Function,
    Kwargs,
    functions,
    implements,
    public_name,
)
from pyg_dist.tensor.row_tensor import DerivedOperand, RowTensor, as_row_tensor_, local_tensors
from pyg_dist.tensor.sharding import RowSharding


def as_operand(function: Function, operand: object, rows: RowSharding, num_dims: int, broadcasts: bool = True) -> Any:
    """An operand beside local rows: sliced if it has rows, else entered (`copy_to_ranks`); sequences item by item.

    Operands align at the right with row tensors of ``num_dims`` dimensions. ``broadcasts``: whether the function takes
    a tensor without rows for one with rows.
    """
    if isinstance(operand, np.ndarray):  # torch takes it in operators
        operand = torch.from_numpy(operand)
    if not isinstance(operand, Tensor):
        if isinstance(operand, (list, tuple)):
            return type(operand)(as_operand(function, item, rows, num_dims, broadcasts) for item in operand)
        return operand
    if isinstance(operand, RowTensor):
        if operand.dim() != num_dims:
            raise MixedRowsError(
                f"{public_name(function)} would align the rows of a {operand.dim()}-dimensional operand with the "
                f"columns of a {num_dims}-dimensional one: give it a trailing dimension, .view(-1, 1), or for all "
                f"pairs of rows a leading one, [None]"
            )
        return operand
    if operand.dim() > num_dims:
        raise MixedRowsError(
            f"{public_name(function)} with a plain operand of shape {list(operand.shape)} would move the rows of a "
            f"{num_dims}-dimensional row tensor out of dimension 0: reshape it"
        )
    if operand.dim() == num_dims and operand.shape[0] == rows.size:
        return rows.slice(operand)
    if broadcasts and (operand.dim() < num_dims or operand.shape[0] == 1):
        return rows.copy_to_ranks(operand)
    raise LayoutMismatchError(
        f"{public_name(function)} expected a plain operand with {'1 or ' if broadcasts else ''}{rows.size} rows "
        f"(got shape {list(operand.shape)}): local rows come back through NodeTensor.from_local"
    )


def aligned(
    function: Function, args: Args, kwargs: Kwargs, broadcasts: bool = True
) -> tuple[tuple[Any, ...], dict[str, Any], RowSharding]:
    """The arguments with every operand as :func:`as_operand` has it, and their rows; under :data:`local_tensors`."""
    operands, rows = like_rows(function, *args, *kwargs.values())
    num_dims = max(operand.dim() for operand in operands if isinstance(operand, RowTensor))
    operands = tuple(as_operand(function, operand, rows, num_dims, broadcasts) for operand in operands)
    return operands[: len(args)], dict(zip(kwargs, operands[len(args) :], strict=True)), rows


_OF_LARGE: dict[Function, Function] = {
    getattr(namespace, name): function
    for function, names in (
        (large_tensors.add, ("add",)),
        (large_tensors.subtract, ("sub", "subtract")),
        (large_tensors.multiply, ("mul", "multiply")),
        (large_tensors.divide, ("div", "divide", "true_divide")),
    )
    for name in names
    for namespace in (torch, Tensor)
}
"""Functions whose large outputs lie in reused memory."""

_EQUALITY: dict[Function, Function] = {Tensor.__eq__: torch.eq, Tensor.__ne__: torch.ne}
"""Operators for which torch asks the class of the first operand alone."""


def pointwise(function: Function, *args: object, **kwargs: object) -> Tensor:
    """Broadcasting functions of any number of operands: the result has the operands' rows.

    Dimensions align at the right, as torch's do: of ``[N, 1]`` and ``[N]`` come all pairs of rows (collective).
    """
    if function in _EQUALITY and isinstance(args[-1], DerivedOperand):
        return _EQUALITY[function](*args)  # type: ignore[no-any-return]
    with local_tensors():
        rows: RowSharding | None = None
        num_dims = -1
        simple = True  # nothing but numbers and like row tensors, the case that has to be fast
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(arg, RowTensor):
                if rows is None:
                    rows, num_dims = arg._sharding, arg.dim()
                elif arg._sharding is not rows or arg.dim() != num_dims:
                    simple = False
            elif isinstance(arg, (Tensor, np.ndarray)):
                simple = False
        given = () if simple else (*args, *kwargs.values())
        num_dims = max((arg.dim() for arg in given if isinstance(arg, Tensor)), default=num_dims)
        aligns = all(not isinstance(arg, RowTensor) or arg.dim() == num_dims for arg in given)
        if not simple and aligns:
            out = kwargs.get("out")
            args, kwargs, rows = aligned(function, args, kwargs)
            if kwargs.get("out") is not out:
                raise MixedRowsError(
                    f"{public_name(function)} expected 'out' to lie as its operands do: assign the result"
                )
        elif simple and function in _OF_LARGE and len(args) == 2 and (not kwargs or "alpha" in kwargs):
            function = _OF_LARGE[function]
        if aligns:
            return as_row_tensor_(function(*args, **kwargs), rows)  # type: ignore[arg-type]
    given = (*(a[(None,) * (num_dims - a.dim())] if isinstance(a, RowTensor) else a for a in given),)
    return function(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))  # type: ignore[no-any-return]


KEEPS_ROWS.add(pointwise)


def pointwise_(function: Function, *args: object, **kwargs: object) -> object:
    """In-place forms; a plain tensor that is written to stays plain, and takes all rows (collective)."""
    if not isinstance(args[0], RowTensor):
        return on_full_tensor(function, *args, **kwargs)
    with local_tensors():
        num_dims = args[0].dim()
        others = [a.dim() for a in (*args[1:], *kwargs.values()) if isinstance(a, Tensor)]
    if max(others, default=0) > num_dims:
        raise MixedRowsError(
            f"{public_name(function)} expected operands of at most {num_dims} dimensions, those of the row tensor that "
            f"it writes to (got one of {max(others)}): assign the result"
        )
    return pointwise(function, *args, **kwargs)


@implements("to", "type_as")
def cast(function: Function, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Dtype and device; of another tensor, if one is given, whatever its rows."""
    with local_tensors():
        out: Tensor = function(x, *args, **kwargs)
    return as_row_tensor_(out, x._sharding) if isinstance(x, RowTensor) else out


@implements("where")
def where(function: Function, condition: Tensor, *args: object, **kwargs: object) -> object:
    """``where(condition, a, b)`` is pointwise; ``where(condition)`` lists ids as ``nonzero(as_tuple=True)`` does."""
    if not args and not kwargs:
        return condition.nonzero(as_tuple=True)
    return pointwise(function, condition, *args, **kwargs)


@implements("new_zeros", "new_ones", "new_full", "new_empty")
def new(function: Function, *args: object, **kwargs: object) -> object:
    """A plain tensor of the given shape, like ``torch.zeros``; only dtype and device are the row tensor's."""
    with local_tensors():
        return function(*args, **kwargs)


UNARY = """
abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos
atan sinh cosh tanh asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh sigmoid logit erf erfc erfinv lgamma
digamma floor ceil round trunc fix frac reciprocal relu relu6 silu gelu elu celu selu leaky_relu softplus softsign
softshrink hardshrink hardtanh hardsigmoid hardswish mish logsigmoid tanhshrink threshold isnan isinf isfinite isneginf
isposinf isreal signbit logical_not bitwise_not nan_to_num deg2rad rad2deg sinc i0 i0e i1 i1e expit clone to_dense
contiguous type float double half bfloat16 int long short char byte bool cpu cuda fill
zeros_like ones_like empty_like full_like entr erfcx gammaln psi polygamma ndtr ndtri log_ndtr bessel_j0 bessel_j1
"""

BROADCASTING = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2 arctan2 maximum
minimum fmax fmin eq ne lt le gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_xor
bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift lerp addcmul addcdiv hypot logaddexp
logaddexp2 xlogy xlog1py copysign nextafter isclose heaviside clamp clip clamp_min clamp_max masked_fill rsub ldexp gcd
lcm _standard_gamma_grad _dirichlet_grad
"""

OPERATORS = "add sub mul truediv floordiv mod pow and or xor eq ne lt le gt ge lshift rshift div"


def _register_all() -> None:
    names = {*UNARY.split(), *BROADCASTING.split()}
    implements(*names, "__invert__", "__neg__", "__pos__", "__abs__")(pointwise)
    implements("broadcast_tensors", namespaces=(torch,))(pointwise)
    ARITHMETIC.update(functions(*names, "dropout"))
    known = {name for namespace in NAMESPACES for name in dir(namespace)}
    in_place = {n + "_" for n in names if n + "_" in known}
    ARITHMETIC.update(functions(*in_place))
    implements(*in_place, "zero_", "copy_", "requires_grad_", "detach_")(pointwise_)
    for name in OPERATORS.split():
        for form, handler in (("__{}__", pointwise), ("__r{}__", pointwise), ("__i{}__", pointwise_)):
            if hasattr(Tensor, form.format(name)):
                implements(form.format(name))(handler)
                ARITHMETIC.update(functions(form.format(name)))


_register_all()
