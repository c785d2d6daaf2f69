"""Functions that need every row: they gather (collective), and the result is plain and equal on every rank.

``repr`` is here as well; it shows the local rows and does not gather.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_dist.tensor.functions.shapes import dims_of, global_shape
from pyg_dist.tensor.registry import Function, bind, implements
from pyg_dist.tensor.row_tensor import RowTensor, local_tensors, on_rows


@implements(
    "tolist", "item", "numpy", "__array__", "__array_wrap__", "__bool__", "__int__", "__float__", "__index__",
    "__contains__", "unique", "unique_consecutive", "bincount", "histc",
    "_convert_indices_from_coo_to_csr",
)  # fmt: skip
def on_full_tensor(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply the function to all rows, in the original order."""
    return function(*map(_full, args), **{name: _full(value) for name, value in kwargs.items()})


def _full(value: Any) -> Any:
    if isinstance(value, RowTensor):
        return value.full_tensor()
    return tuple(map(_full, value)) if type(value) is tuple else value  # x[rows, 0] has a tuple for an index


@implements("median", "nanmedian", "quantile", "nanquantile")
def order_statistic(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Within rows, or of all rows; several quantiles at once put their own dimension first, and are plain."""
    is_quantile = "quantile" in function.__name__
    bound = bind("x q dim keepdim" if is_quantile else "x dim", args, kwargs)
    x, q, dim = args[0], bound.get("q"), bound.get("dim")
    if dim is None or 0 in dims_of(dim, x.dim()) or (isinstance(q, Tensor) and q.dim() > 0):
        return on_full_tensor(function, args, kwargs)
    if is_quantile and x._sharding.num_local == 0:  # torch refuses; a sum has the same shape, and is differentiable too
        return on_rows(torch.sum, x, dim, bound.get("keepdim", False))
    return on_rows(function, *args, **kwargs)


@implements("__repr__", "__format__")
def representation(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Global shape and local values; no communication, so one rank alone may print."""
    x = args[0]
    with local_tensors():
        local = x.as_subclass(Tensor)
        return f"{type(x).__name__}(shape={list(global_shape(x))}, local rows {x._sharding.num_local}: {local!r})"
