"""Reductions: along columns on the local rows; over rows to a plain tensor, equal on every rank and differentiable.

Legend: *dims* are the reduced dimensions. Each function here reduces the local rows with torch, and then the ranks
(collective). Extremes and norms have modules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_dist.errors import UnsupportedError
from pyg_dist.tensor.functions.shapes import dims_of
from pyg_dist.tensor.registry import Function, bind, implements, public_name
from pyg_dist.tensor.row_tensor import as_row_tensor_, local_tensors, on_rows
from pyg_dist.tensor.sharding import RowSharding

Dims = tuple[int, ...]
Reduce = Callable[[Tensor, Dims, bool, RowSharding, dict[str, Any]], Tensor]


def reduction(name: str, parameters: str = "dim keepdim") -> Callable[[Reduce], Reduce]:
    """Register ``reduce(local, dims, keepdim, rows, bound)`` for calls of torch's ``name`` that reduce rows."""

    def decorate(reduce: Reduce) -> Reduce:
        @implements(name)
        def handler(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, bound = args[0], bind(f"x {parameters}", args, kwargs)
            rows = x._sharding
            with local_tensors():
                dims = dims_of(bound.get("dim"), x.dim())
                if 0 not in dims:
                    return as_row_tensor_(function(*args, **kwargs), rows)
                if rows.group.size == 1:
                    return function(*args, **kwargs)
                return reduce(x, dims, bool(bound.get("keepdim", False)), rows, bound)

        return reduce

    return decorate


def count(x: Tensor, dims: Dims, rows: RowSharding) -> int:
    """How many elements of the global tensor one result reduces."""
    return rows.size * math.prod(x.shape[d] for d in dims if d)


def by_rank(local: Tensor, rows: RowSharding) -> Tensor:
    """Each rank's tensor, stacked by rank, on every rank; differentiable. Shapes: ``[...] -> [P, ...]``."""
    zero = torch.zeros_like(local)
    return rows.reduce_from_ranks(
        torch.stack([local if r == rows.group.rank else zero for r in range(rows.group.size)])
    )


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which partial sums of ``dtype`` travel, as torch's own kernels accumulate."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@reduction("sum", "dim keepdim dtype")
def _sum(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    dtype = bound.get("dtype") or (x.dtype if x.is_floating_point() else torch.int64)
    return rows.reduce_from_ranks(x.sum(dims, keepdim, dtype=accumulation_dtype(dtype))).to(dtype)


@reduction("nansum", "dim keepdim dtype")
def _nansum(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    return _sum(x.masked_fill(x.isnan(), 0), dims, keepdim, rows, bound)


@reduction("mean", "dim keepdim dtype")
def _mean(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    dtype = bound.get("dtype") or x.dtype
    if not dtype.is_floating_point:
        raise RuntimeError(f"mean(): expected a floating point dtype (got {dtype}): cast first, x.float().mean()")
    return (rows.reduce_from_ranks(x.sum(dims, keepdim, dtype=accumulation_dtype(dtype))) / count(x, dims, rows)).to(
        dtype
    )


@reduction("nanmean", "dim keepdim dtype")
def _nanmean(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    return _nansum(x, dims, keepdim, rows, bound) / _sum(~x.isnan(), dims, keepdim, rows, {})


@reduction("count_nonzero", "dim")
def _count_nonzero(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    return rows.reduce_from_ranks((x != 0).sum(dims))


@reduction("any")
def _any(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    return rows.group.all_reduce_(torch.any(x, dims, keepdim), "max")


@reduction("all")
def _all(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    return rows.group.all_reduce_(torch.all(x, dims, keepdim), "min")


@implements("_is_all_true", "_is_any_true")
def is_true(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``all`` and ``any`` as ``torch.distributions`` calls them (collective)."""
    return (Tensor.all if "all" in function.__name__ else Tensor.any)(args[0])


@reduction("prod", "dim keepdim dtype")
def _prod(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    dtype = bound.get("dtype")
    local = x.prod(dtype=dtype) if bound.get("dim") is None else x.prod(0, keepdim, dtype=dtype)
    return by_rank(local, rows).prod(0)


@implements("softmax", "log_softmax")
def softmax(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Within rows, or over the rows of each column (collective)."""
    names = "x dim _stacklevel dtype" if getattr(function, "__module__", "") == "torch.nn.functional" else "x dim dtype"
    x, bound = args[0], bind(names, args, kwargs)
    dim, dtype = bound.get("dim"), bound.get("dtype")
    if dim is None:
        raise UnsupportedError(f"{public_name(function)} expects dim for a {type(x).__name__} (got None): pass dim=-1")
    if 0 not in dims_of(dim, x.dim()):
        return on_rows(function, *args, **kwargs)
    x = x if dtype is None else x.to(dtype)
    if x.shape[0] == 0:
        return on_rows(function, x, dim)
    # Differences from the largest: a logarithm of the sum itself would be rounded where the values of x are.
    shifted = (x - x.detach().amax(dim, keepdim=True)).to(accumulation_dtype(x.dtype))
    if "log" in function.__name__:
        return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(x.dtype)
    shares = shifted.exp()
    return (shares / shares.sum(dim, keepdim=True)).to(x.dtype)


@implements("allclose")
def allclose(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are close everywhere, on every rank (collective)."""
    return bool(torch.isclose(*args, **kwargs).all())


@implements("equal")
def equal(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are equal everywhere, on every rank (collective)."""
    x, other = (*args, *kwargs.values())
    return x.shape == other.shape and bool((x == other).all())
