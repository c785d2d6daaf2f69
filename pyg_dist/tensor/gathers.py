"""Functions that need every row: they gather (collective), and the result is plain and equal on every rank."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.row_tensor import LOCALLY, RowTensor
from pyg_dist.tensor.shapes import global_shape
from pyg_dist.tensor.table import Function, handles, public_name


@handles(
    "tolist", "item", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__format__",
    "__contains__", "unique", "unique_consecutive", "bincount", "histc", "quantile", "nanquantile", "median", "nanmedian",
)  # fmt: skip
def gathered(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the function to all rows, in the original order. Within rows, ``median`` and ``quantile`` stay local."""
    args = tuple(a.full_tensor() if isinstance(a, RowTensor) else a for a in args)
    kwargs = {k: v.full_tensor() if isinstance(v, RowTensor) else v for k, v in kwargs.items()}
    return function(*args, **kwargs)


@handles("__iter__")
def iterate(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Row by row would be one collective call per row."""
    raise MixedRowsError(
        f"Iterating over the rows of a {type(args[0]).__name__} would talk once a row: use .full_tensor() or .tolist()"
    )


@handles("__repr__")
def representation(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Global shape and local values; talks to nobody."""
    x = args[0]
    with LOCALLY():
        local = x.as_subclass(Tensor)
        return f"{type(x).__name__}(shape={list(global_shape(x))}, local rows {x._rows.num_local}: {local!r})"


def _refuse(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise MixedRowsError(
        f"{public_name(function)} would take one rank's rows of a {type(args[0]).__name__} for the whole: "
        f"use .full_tensor() (all rows, collective) or .to_local() (this rank's) first"
    )


for _name in ("__reduce_ex__", "__dlpack__", "__dlpack_device__", "t", "T.__get__", "mT.__get__", "H.__get__"):
    handles(_name)(_refuse)


def refuse_compilation() -> None:
    """Raise inside ``torch.compile``: what it traces would be the local rows of one rank."""
    if torch.compiler.is_compiling():
        raise MixedRowsError("Row tensors cannot be traced by torch.compile: compile the functions of plain tensors")
