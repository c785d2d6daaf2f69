"""Functions that need every row: they gather (collective), and the result is plain and equal on every rank."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.row_tensor import LOCALLY, RowTensor, on_rows
from pyg_dist.tensor.shapes import dims_of, global_shape
from pyg_dist.tensor.table import Function, bind, handles, public_name


@handles(
    "tolist", "item", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__contains__",
    "unique", "unique_consecutive", "bincount", "histc", "quantile", "nanquantile",
)  # fmt: skip
def gathered(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the function to all rows, in the original order."""
    args = tuple(a.full_tensor() if isinstance(a, RowTensor) else a for a in args)
    kwargs = {k: v.full_tensor() if isinstance(v, RowTensor) else v for k, v in kwargs.items()}
    return function(*args, **kwargs)


@handles("median", "nanmedian")
def median(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Within rows, or of all rows."""
    x, dim = args[0], bind("x dim", args, kwargs).get("dim")
    if dim is not None and 0 not in dims_of(dim, x.dim()):
        return on_rows(function, *args, **kwargs)
    return gathered(function, args, kwargs)


@handles("__repr__", "__format__")
def representation(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Global shape and local values; talks to nobody, so that one rank alone may print."""
    x = args[0]
    with LOCALLY():
        local = x.as_subclass(Tensor)
        return f"{type(x).__name__}(shape={list(global_shape(x))}, local rows {x._rows.num_local}: {local!r})"


@handles("__iter__")
def iterate(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Row by row would be one collective call per row."""
    raise MixedRowsError(
        f"Iterating over the rows of a {type(args[0]).__name__} would talk once a row: use .full_tensor() or .tolist()"
    )


@handles("__reduce_ex__")
def pickle(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """A file would hold one rank's rows, and nothing of the others."""
    raise MixedRowsError(
        f"A {type(args[0]).__name__} cannot be pickled or copied by copy.copy: each rank holds some of its rows; "
        f"save .full_tensor(), or use copy.deepcopy"
    )


@handles("_is_view", "_base.__get__")
def compile_(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """The first thing that torch.compile asks a tensor for."""
    raise MixedRowsError(
        f"A {type(args[0]).__name__} has no _base, and torch.compile cannot trace it: what it sees are one rank's "
        f"rows; compile functions of plain tensors"
    )


@handles("__dlpack__", "__dlpack_device__", "t", "T.__get__", "H.__get__")
def refuse(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """What would take one rank's rows for the whole, or move them."""
    raise MixedRowsError(
        f"{public_name(function)} of a {type(args[0]).__name__} would mix rows: "
        f"use .full_tensor() (all rows, collective) or .to_local() (this rank's) first"
    )
