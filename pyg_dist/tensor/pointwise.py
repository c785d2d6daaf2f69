"""Functions that work row by row: on the local rows, with no communication."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_dist.errors import LayoutMismatchError, MixedRowsError
from pyg_dist.tensor.row_tensor import LOCALLY, RowTensor, rows_of, wrap
from pyg_dist.tensor.rows import Rows
from pyg_dist.tensor.table import NAMESPACES, Function, handles, public_name, register


def as_operand(function: Function, operand: Any, rows: Rows, num_dims: int) -> Any:
    """An operand of a broadcasting function as it meets local rows: sliced if it has rows, entered if it has none.

    ``num_dims`` is the number of dimensions of the row tensors: an operand aligns with them at the right.
    """
    if isinstance(operand, (list, tuple)):
        return type(operand)(as_operand(function, item, rows, num_dims) for item in operand)
    if not isinstance(operand, Tensor):
        return operand
    if isinstance(operand, RowTensor):
        if operand.dim() != num_dims:
            raise MixedRowsError(
                f"{public_name(function)} would align the rows of a {operand.dim()}-dimensional operand with the "
                f"columns of a {num_dims}-dimensional one: give it a trailing dimension, .view(-1, 1)"
            )
        return operand
    if operand.dim() > num_dims:
        raise MixedRowsError(
            f"{public_name(function)} with a plain operand of shape {list(operand.shape)} would move the rows of a "
            f"{num_dims}-dimensional row tensor out of dimension 0: reshape it"
        )
    if operand.dim() == num_dims and operand.shape[0] != 1:
        if operand.shape[0] != rows.size:
            raise LayoutMismatchError(
                f"{public_name(function)} expected a plain operand with 1 or {rows.size} rows "
                f"(got shape {list(operand.shape)}; local rows come back through NodeTensor.from_local)"
            )
        return rows.slice(operand)
    return rows.enter(operand)


def pointwise(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Broadcasting functions of any number of operands: the result has the operands' rows."""
    with LOCALLY():
        rows: Rows | None = None
        num_dims = -1
        simple = not kwargs
        for arg in args:
            if isinstance(arg, RowTensor):
                if rows is None:
                    rows, num_dims = arg._rows, arg.dim()
                elif arg._rows is not rows or arg.dim() != num_dims:
                    simple = False
            elif isinstance(arg, (Tensor, tuple, list)):
                simple = False
        if not simple:
            args, kwargs, rows = aligned(function, args, kwargs)
        out = function(*args, **kwargs)
    return wrap(out, rows)  # type: ignore[arg-type]


def aligned(
    function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], Rows]:
    """The arguments of a broadcasting function with every operand as :func:`as_operand` has it."""
    if kwargs.get("out") is not None:
        raise MixedRowsError(f"{public_name(function)} does not take 'out' for row tensors: assign the result instead")
    operands = [*args, *kwargs.values()]
    operands += [item for group in operands if isinstance(group, (list, tuple)) for item in group]
    rows = rows_of(function, *operands)
    num_dims = max(o.dim() for o in operands if isinstance(o, RowTensor))
    args = tuple(as_operand(function, a, rows, num_dims) for a in args)
    return args, {k: as_operand(function, v, rows, num_dims) for k, v in kwargs.items()}, rows


def pointwise_(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In-place forms: what is written to must be the row tensor."""
    if not isinstance(args[0], RowTensor):
        raise MixedRowsError(
            f"{public_name(function)} would write distributed rows into a plain tensor: use the form that returns"
        )
    return pointwise(function, args, kwargs)


def with_parameters(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions of rows and of row-free parameters (``linear(x, weight)``): parameters enter, none is sliced."""
    with LOCALLY():
        rows = rows_of(function, *args, *kwargs.values())
        args = tuple(_parameter(a, rows) for a in args)
        kwargs = {k: _parameter(v, rows) for k, v in kwargs.items()}
        out = function(*args, **kwargs)
    return wrap(out, rows)


def _parameter(operand: Any, rows: Rows) -> Any:
    if isinstance(operand, Tensor) and not isinstance(operand, RowTensor):
        return rows.enter(operand)
    return operand


_UNARY = """
abs absolute neg negative positive sign sgn exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square sin cos tan asin acos
atan sinh cosh tanh asinh acosh atanh arcsin arccos arctan arcsinh arccosh arctanh sigmoid logit erf erfc erfinv lgamma
digamma floor ceil round trunc fix frac reciprocal relu relu6 silu gelu elu celu selu leaky_relu softplus softsign
softshrink hardshrink hardtanh hardsigmoid hardswish mish logsigmoid tanhshrink threshold isnan isinf isfinite isneginf
isposinf isreal signbit logical_not bitwise_not nan_to_num deg2rad rad2deg sinc i0 expit clone detach contiguous to type
float double half bfloat16 int long short char byte bool cpu cuda zero_ fill fill_ requires_grad_ conj resolve_conj
resolve_neg zeros_like ones_like empty_like full_like alias_copy
"""

_BROADCASTING = """
add sub subtract mul multiply div divide true_divide floor_divide remainder fmod pow float_power atan2 arctan2 maximum
minimum fmax fmin eq ne lt le gt ge not_equal less less_equal greater greater_equal logical_and logical_or logical_xor
bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift lerp addcmul addcdiv hypot logaddexp
logaddexp2 xlogy copysign nextafter isclose heaviside clamp clip clamp_min clamp_max masked_fill rsub ldexp type_as
"""

_DUNDER = """
add sub mul truediv floordiv mod pow and or xor eq ne lt le gt ge lshift rshift div
"""


def _register_all() -> None:
    names = {*_UNARY.split(), *_BROADCASTING.split()}
    register(pointwise, *(n for n in names if not n.endswith("_")))
    known = {name for namespace in NAMESPACES for name in dir(namespace)}
    in_place = {n for n in names if n.endswith("_")} | {n + "_" for n in names if n + "_" in known}
    register(pointwise_, *in_place, "copy_", "detach_")
    for name in _DUNDER.split():
        for form, handler in (("__{}__", pointwise), ("__r{}__", pointwise), ("__i{}__", pointwise_)):
            if hasattr(Tensor, form.format(name)):
                register(handler, form.format(name))
    register(pointwise, "__invert__", "__neg__", "__pos__", "__abs__")
    register(with_parameters, "linear", "layer_norm", "rms_norm", "group_norm", "prelu", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


_register_all()


@handles("where")
def where(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``where(condition, a, b)`` is pointwise; ``where(condition)`` lists ids as ``nonzero(as_tuple=True)`` does."""
    if len(args) + len(kwargs) == 1:
        return args[0].nonzero(as_tuple=True)
    return pointwise(function, args, kwargs)


@handles("matmul", "mm", "mv", "__matmul__", "__rmatmul__")
def matmul(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``rows @ plain`` is row-wise; every other product would sum over or spread rows."""
    x, other = (*args, *kwargs.values())
    name = public_name(function)
    left = not (name.endswith("__rmatmul__") or not isinstance(x, RowTensor) or isinstance(other, RowTensor))
    if not left or other.dim() > 2 or x.dim() < 2:
        raise MixedRowsError(
            f"{name} of row tensors is row-wise only as rows @ plain matrix: for a product over rows use "
            f"(a.unsqueeze(-1) * b.unsqueeze(-2)).sum(0), or .full_tensor()"
        )
    return with_parameters(torch.matmul, (x, other), {})


@handles("embedding")
def embedding(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Row-wise for distributed indices into a plain table."""
    table = args[1] if len(args) > 1 else kwargs["weight"]
    if isinstance(table, RowTensor):
        raise MixedRowsError("F.embedding of a table with distributed rows would mix them: index it, table[ids]")
    return with_parameters(function, args, kwargs)
