"""Reductions: along columns on the local rows; over rows to a plain tensor, equal on every rank and differentiable.

Legend: *dims* are the reduced dimensions. Each handler reduces the local rows with torch, then the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import adjoint
from pyg_dist.errors import UnsupportedError
from pyg_dist.tensor.pointwise import pointwise
from pyg_dist.tensor.row_tensor import LOCALLY, RowTensor, rows_of, wrap
from pyg_dist.tensor.rows import Rows
from pyg_dist.tensor.table import Function, handles, public_name

Dims = tuple[int, ...]


def _bind(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; torch's C functions have no signature to ask, and take ``axis`` for ``dim``."""
    bound = dict(zip(names.split(), args, strict=False))
    bound.update({"dim" if k == "axis" else k: v for k, v in kwargs.items() if k not in ("out", "input", "self")})
    return bound


def _dims(x: Tensor, dim: Any) -> Dims:
    """``dim`` as a tuple of non-negative dimensions; ``None`` and ``()`` stand for all."""
    if dim is None or dim == () or dim == []:
        return tuple(range(x.dim()))
    return tuple(d % x.dim() for d in (dim if isinstance(dim, (tuple, list)) else [dim]))


Reduce = Callable[[Tensor, Dims, bool, Rows, dict[str, Any]], Tensor]


def _reduction(name: str, parameters: str = "dim keepdim") -> Callable[[Reduce], Reduce]:
    """Register ``reduce(local, dims, keepdim, rows, bound)`` for calls of torch's ``name`` that reduce rows."""

    def decorate(reduce: Reduce) -> Reduce:
        @handles(name)
        def handler(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x = args[0] if args else kwargs["input"]
            bound = _bind(parameters, args[1:], kwargs)
            with LOCALLY():
                rows = rows_of(function, x)
                dims = _dims(x, bound.get("dim"))
                if 0 not in dims:
                    return wrap(function(*args, **kwargs), rows)
                return reduce(x.as_subclass(Tensor), dims, bool(bound.get("keepdim", False)), rows, bound)

        return reduce

    return decorate


def count(x: Tensor, dims: Dims, rows: Rows) -> int:
    """How many elements of the global tensor one result reduces."""
    return rows.size * math.prod(x.shape[d] for d in dims if d)


def by_rank(local: Tensor, rows: Rows) -> Tensor:
    """Each rank's tensor, stacked by rank, on every rank; differentiable. Shapes: ``[...] -> [P, ...]``."""
    if rows.axis.size == 1:
        return local.unsqueeze(0)
    zero = torch.zeros_like(local)
    return rows.leave(torch.stack([local if r == rows.axis.rank else zero for r in range(rows.axis.size)]))


@_reduction("sum", "dim keepdim dtype")
def _sum(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    return rows.leave(x.sum(dims, keepdim, dtype=bound.get("dtype")))


@_reduction("nansum", "dim keepdim dtype")
def _nansum(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    return rows.leave(x.nansum(dims, keepdim, dtype=bound.get("dtype")))


@_reduction("mean", "dim keepdim dtype")
def _mean(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    dtype = bound.get("dtype") or x.dtype
    if not dtype.is_floating_point:
        raise RuntimeError(f"mean(): expected a floating point dtype (got {dtype}): cast first, x.float().mean()")
    # An empty tensor's mean is NaN in torch, too.
    return rows.leave(x.sum(dims, keepdim, dtype=dtype)) / (count(x, dims, rows) or math.nan)


@_reduction("nanmean", "dim keepdim dtype")
def _nanmean(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    number = rows.leave((~x.isnan()).sum(dims, keepdim).to(x.dtype))
    return rows.leave(x.nansum(dims, keepdim, dtype=bound.get("dtype"))) / number


@_reduction("count_nonzero", "dim")
def _count_nonzero(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    return rows.leave((x != 0).sum(dims))


@_reduction("any")
def _any(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    return rows.axis.reduce_(torch.any(x, dims, keepdim), "max")


@_reduction("all")
def _all(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    return rows.axis.reduce_(torch.all(x, dims, keepdim), "min")


@_reduction("logsumexp")
def _logsumexp(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    return by_rank(x.logsumexp(dims, keepdim), rows).logsumexp(0)


def softmax_over_rows(x: RowTensor, dtype: torch.dtype | None) -> Any:
    """``log_softmax`` along dimension 0: a normaliser per column (collective)."""
    x = x if dtype is None else x.to(dtype)
    return x - torch.logsumexp(x, 0, keepdim=True)


@handles("softmax", "log_softmax")
def softmax(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Within rows, or over the rows of each column (collective)."""
    bound = _bind("dim _stacklevel" if function.__module__ == "torch.nn.functional" else "dim dtype", args[1:], kwargs)
    x, dim = args[0] if args else kwargs["input"], bound.get("dim")
    if dim is None:
        raise UnsupportedError(f"{public_name(function)} expects dim for a {type(x).__name__} (got None): pass dim=-1")
    if dim % x.dim() != 0:
        with LOCALLY():
            return wrap(function(*args, **kwargs), x._rows)
    logs = softmax_over_rows(x, bound.get("dtype"))
    return logs.exp() if "log" not in function.__name__ else logs


class _Extreme(torch.autograd.Function):
    """Largest or smallest values over rows; like ``torch.amax``, ties share the gradient equally, across ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: Dims, keepdim: bool, rows: Rows, op: str) -> Tensor:
        kept = list(x.shape)
        for d in dims:
            kept[d] = 1
        if x.numel():
            extreme = x.amax(dims, keepdim=True) if op == "max" else x.amin(dims, keepdim=True)
        else:
            extreme = x.new_full(kept, _neutral(x.dtype, op))
        extreme = rows.axis.reduce_(extreme, op)
        ctx.axis, ctx.dims, ctx.keepdim = rows.axis, dims, keepdim
        if ctx.needs_input_grad[0]:
            ties = x == extreme
            number = rows.axis.reduce_(ties.sum(dims, keepdim=True))
            ctx.save_for_backward(ties / number)
        return extreme if keepdim else extreme.squeeze(dims)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (share,) = ctx.saved_tensors
        grad = adjoint.enter(grad, ctx.axis)
        if not ctx.keepdim:
            for d in sorted(ctx.dims):
                grad = grad.unsqueeze(d)
        return grad * share.to(grad.dtype), None, None, None, None


def _neutral(dtype: torch.dtype, op: str) -> float | int:
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def _extreme(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, op: str) -> Tensor:
    if count(x, dims, rows) == 0:
        raise RuntimeError(f"{op}(): Expected reduction dim to be specified for input.numel() == 0.")
    if rows.axis.size == 1:
        return x.amax(dims, keepdim) if op == "max" else x.amin(dims, keepdim)
    return _Extreme.apply(x, dims, keepdim, rows, op)  # type: ignore[no-any-return, no-untyped-call]


@_reduction("amax")
def _amax(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    return _extreme(x, dims, keepdim, rows, "max")


@_reduction("amin")
def _amin(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    return _extreme(x, dims, keepdim, rows, "min")


def _arg_extreme(x: Tensor, keepdim: bool, rows: Rows, op: str) -> tuple[Tensor, Tensor]:
    """Values and global positions of the extremes of each column; the first of equals. Reduces dimension 0."""
    values = _extreme(x.detach(), (0,), True, rows, op)
    hit = (x == values) | (x.isnan() & values.isnan())
    position = rows.position.view(-1, *[1] * (x.dim() - 1)).to(x.device)
    first = torch.where(hit, position, rows.size)
    first = first.amin(0) if x.shape[0] else first.new_full(x.shape[1:], rows.size)
    first = rows.axis.reduce_(first, "min")
    mine = (hit & (position == first)).to(x.dtype) if x.dtype != torch.bool else hit & (position == first)
    chosen = rows.leave((torch.where(mine.bool(), x, 0)).sum(0).to(x.dtype))
    return (chosen.unsqueeze(0), first.unsqueeze(0)) if keepdim else (chosen, first)


@handles("max", "min")
def max_min(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``max(x)``, ``max(x, dim)`` with positions, or the pointwise ``max(x, y)``."""
    op = function.__name__
    x, bound = args[0] if args else kwargs["input"], _bind("dim keepdim", args[1:], kwargs)
    if isinstance(bound.get("dim", bound.get("other")), Tensor):
        return pointwise(function, args, kwargs)
    with LOCALLY():
        rows = rows_of(function, x)
        if "dim" not in bound:
            return _extreme(x.as_subclass(Tensor), _dims(x, None), False, rows, op)
        if bound["dim"] % x.dim() != 0:
            return wrap(function(*args, **kwargs), rows)
        result = torch.return_types.max if op == "max" else torch.return_types.min  # type: ignore[attr-defined]
        return result(_arg_extreme(x.as_subclass(Tensor), bound.get("keepdim", False), rows, op))


@handles("argmax", "argmin")
def arg_max_min(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Within rows; or global positions."""
    op = function.__name__[3:]
    x, bound = args[0] if args else kwargs["input"], _bind("dim keepdim", args[1:], kwargs)
    dim = bound.get("dim")
    with LOCALLY():
        rows = rows_of(function, x)
        if dim is not None and dim % x.dim() != 0:
            return wrap(function(*args, **kwargs), rows)
        plain = x.as_subclass(Tensor).detach()
        if dim is not None:
            return _arg_extreme(plain, bound.get("keepdim", False), rows, op)[1]
        per_row = math.prod(plain.shape[1:])
        values, position = _arg_extreme(plain.reshape(plain.shape[0], per_row), False, rows, op)
        best = values == (values.max() if op == "max" else values.min())
        return torch.where(best, position * per_row + torch.arange(per_row), rows.size * per_row).min()


@_reduction("norm", "p dim keepdim dtype")
def _norm(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    p = bound.get("p", "fro")
    return _vector_norm(x, dims, keepdim, rows, {"ord": 2 if p in ("fro", None) else p, "dtype": bound.get("dtype")})


@_reduction("vector_norm", "ord dim keepdim")
def _vector_norm(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    order, dtype = bound.get("ord", 2), bound.get("dtype")
    if x.shape[0] == 0 and order in (math.inf, -math.inf):
        local = x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], 0.0 if order > 0 else math.inf)
        local = local if keepdim else local.squeeze(dims)
    else:
        local = torch.linalg.vector_norm(x, order, dims, keepdim, dtype=dtype)
    if order == 0:  # a count
        return rows.leave(local)
    return torch.linalg.vector_norm(by_rank(local, rows), order, 0)


@_reduction("prod", "dim keepdim dtype")
def _prod(x: Tensor, dims: Dims, keepdim: bool, rows: Rows, bound: dict[str, Any]) -> Tensor:
    dtype = bound.get("dtype")
    if len(dims) == 1:
        return by_rank(x.prod(0, keepdim=keepdim, dtype=dtype), rows).prod(0)
    return by_rank(x.prod(dtype=dtype), rows).prod(0)


def _moments(x: Tensor, dims: Dims, rows: Rows) -> tuple[Tensor, Tensor]:
    """Mean (dimensions kept) and deviations from it."""
    mean = rows.leave(x.sum(dims, keepdim=True)) / count(x, dims, rows)
    return mean, x - rows.enter(mean)


@handles("std", "var", "std_mean", "var_mean")
def std_var(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Two passes: the global mean, then the deviations from it."""
    x, rest = args[0] if args else kwargs["input"], args[1:]
    names = "unbiased" if rest and isinstance(rest[0], bool) else "dim unbiased keepdim"
    bound = _bind(names, rest, kwargs)
    correction = bound.get("correction", 1 if bound.get("unbiased", True) else 0)
    correction = 1 if correction is None else correction
    with LOCALLY():
        rows = rows_of(function, x)
        dims, keepdim = _dims(x, bound.get("dim")), bound.get("keepdim", False)
        if 0 not in dims:
            return wrap(function(*args, **kwargs), rows)
        plain = x.as_subclass(Tensor)
        mean, deviation = _moments(plain, dims, rows)
        freedom = max(count(plain, dims, rows) - correction, 0) or math.nan
        # The norm is differentiable where all deviations are zero; a square root of the sum of squares is not.
        norm = _vector_norm(deviation, dims, keepdim, rows, {})
        spread = norm / math.sqrt(freedom) if "std" in function.__name__ else norm.square() / freedom
        if "mean" in function.__name__:
            return spread, mean if keepdim else mean.squeeze(dims)
        return spread


@handles("allclose", "equal")
def all_alike(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether two tensors are alike everywhere, on every rank (collective)."""
    x, other = args[:2]
    lead = x if isinstance(x, RowTensor) else other
    if tuple(x.shape) != tuple(other.shape):
        return False
    pair = [t.to_local() if isinstance(t, RowTensor) else lead._rows.slice(t) for t in (x, other)]
    return lead._rows.axis.every(function(*pair, *args[2:], **kwargs))
