"""Norms, and the moments that follow from them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.autograd.replicated import copy_to_ranks
from pyg_dist.tensor.functions.extremes import extreme
from pyg_dist.tensor.functions.reductions import Dims, accumulation_dtype, by_rank, count, reduction
from pyg_dist.tensor.functions.shapes import dims_of, refuse
from pyg_dist.tensor.registry import Function, bind, implements
from pyg_dist.tensor.row_tensor import local_tensors, on_rows
from pyg_dist.tensor.sharding import RowSharding


@reduction("vector_norm", "ord dim keepdim")
def _vector_norm(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    order = bound.get("ord", 2)
    x = x.to(bound.get("dtype") or x.dtype)
    if order in (math.inf, -math.inf):
        return extreme(x.abs(), dims, keepdim, rows, "max" if order > 0 else "min")
    if order == 0:  # a count
        return rows.reduce_from_ranks((x != 0).sum(dims, keepdim).to(x.dtype))
    if order < 0 and x.shape[0] == 0:  # torch has no neutral element for it; the sum keeps the graph alike on all ranks
        local = x.abs().sum(dims, keepdim) + math.inf
    else:
        local = torch.linalg.vector_norm(x, order, dims, keepdim)
    # A norm of norms, and not a power of a sum of powers, whose derivative at zero is infinite.
    total: Tensor = torch.linalg.vector_norm(by_rank(local, rows), order, 0)
    return total


@implements("norm")
def norm(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.norm``: of vectors, whatever the number of dimensions."""
    bound = bind("x p dim keepdim _ dtype", args, kwargs)
    order = bound.get("p", "fro")
    if order == "nuc":
        raise refuse(function, "with p='nuc' is a matrix norm")
    order = 2 if order in ("fro", None) else order
    return torch.linalg.vector_norm(
        args[0], order, bound.get("dim"), bound.get("keepdim", False), dtype=bound.get("dtype")
    )


@implements("norm", namespaces=(torch.linalg,))
def linalg_norm(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.linalg.norm``: a matrix norm where there are two dimensions and an order."""
    x, bound = args[0], bind("x ord dim keepdim", args, kwargs)
    order, dim = bound.get("ord"), bound.get("dim")
    if order is not None and len(dims_of(dim, x.dim())) > 1:
        raise refuse(function, f"with ord={order!r} is a matrix norm")
    order = 2 if order is None else order
    return torch.linalg.vector_norm(x, order, dim, bound.get("keepdim", False), dtype=bound.get("dtype"))


@implements("std", "var", "std_mean", "var_mean")
def std_var(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Two passes: the global mean, then the deviations from it."""
    x = args[0]
    has_no_dim = len(args) > 1 and isinstance(args[1], bool)
    bound = bind("x unbiased" if has_no_dim else "x dim unbiased keepdim", args, kwargs)
    correction, keepdim = bound.get("correction"), bound.get("keepdim", False)
    if correction is None:
        correction = int(bound.get("unbiased", True))
    with local_tensors():
        rows, dims = x._sharding, dims_of(bound.get("dim"), x.dim())
    if 0 not in dims:
        return on_rows(function, *args, **kwargs)
    with local_tensors():
        if rows.group.size == 1:
            return function(*args, **kwargs)
        number = count(x, dims, rows)
        mean = (rows.reduce_from_ranks(x.sum(dims, keepdim=True, dtype=accumulation_dtype(x.dtype))) / number).to(
            x.dtype
        )
        deviation = x - copy_to_ranks(mean, rows.group)
        freedom = max(number - correction, 0)
        if "std" in function.__name__:  # a norm is differentiable where it is zero, as torch's std is
            spread = _vector_norm(deviation, dims, keepdim, rows, {}) / math.sqrt(freedom)
        else:
            square = deviation.square()
            spread = (
                rows.reduce_from_ranks(square.sum(dims, keepdim, dtype=accumulation_dtype(square.dtype))) / freedom
            ).to(square.dtype)
        if "mean" in function.__name__:
            return spread, mean if keepdim else mean.squeeze(dims)
        return spread
