"""Reductions: along columns on the local rows; over rows to a plain tensor, equal on every rank and differentiable.

*dims* are the reduced dimensions. Each function here reduces the local rows with torch, then over ranks (collective).
Sums come first, then extremes and their positions, then norms and moments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.autograd import replicated
from pyg_dist.backend.autograd.replicated import copy_to_ranks
from pyg_dist.backend.local_function import Context, LocalFunction
from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import UnsupportedError
from pyg_dist.tensor.functions.along import along
from pyg_dist.tensor.operands import on_rows
from pyg_dist.tensor.registry import Function, bind, dims_of, implements, public_name, refuse
from pyg_dist.tensor.row_tensor import RowTensor, local_tensors
from pyg_dist.tensor.sharding import RowSharding

Dims = tuple[int, ...]
Reduce = Callable[..., Tensor]


def reduction(*names: str, parameters: str = "dim keepdim") -> Callable[[Reduce], Reduce]:
    """Register ``reduce(local, dims, keepdim, rows, ...)`` for calls of torch's ``names`` that reduce rows."""

    def decorate(reduce: Reduce) -> Reduce:
        @along(*names, parameters=parameters)
        def over_rows(function: Function, x: RowTensor, *args: object, **kwargs: object) -> object:
            rows = x._sharding
            with local_tensors():
                if rows.is_on_one_rank:
                    return function(x, *args, **kwargs)
                bound = bind(function, parameters, args, kwargs)
                dims, keepdim = dims_of(bound.pop("dim", None), x.dim()), bool(bound.pop("keepdim", False))
                return reduce(x, dims, keepdim, rows, **bound)

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


@reduction("sum", parameters="dim keepdim dtype")
def _sum(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or (x.dtype if x.is_floating_point() else torch.int64)
    return rows.reduce_from_ranks(x.sum(dims, keepdim, dtype=accumulation_dtype(dtype))).to(dtype)


@reduction("nansum", parameters="dim keepdim dtype")
def _nansum(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, dtype: torch.dtype | None = None) -> Tensor:
    return _sum(x.masked_fill(x.isnan(), 0), dims, keepdim, rows, dtype)


@reduction("mean", parameters="dim keepdim dtype")
def _mean(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, dtype: torch.dtype | None = None) -> Tensor:
    dtype = dtype or x.dtype
    if not dtype.is_floating_point:
        raise RuntimeError(f"mean(): expected a floating point dtype (got {dtype}): cast first, x.float().mean()")
    total = rows.reduce_from_ranks(x.sum(dims, keepdim, dtype=accumulation_dtype(dtype)))
    return (total / count(x, dims, rows)).to(dtype)


@reduction("nanmean", parameters="dim keepdim dtype")
def _nanmean(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, dtype: torch.dtype | None = None) -> Tensor:
    return _nansum(x, dims, keepdim, rows, dtype) / _sum(~x.isnan(), dims, keepdim, rows)


@reduction("count_nonzero", parameters="dim")
def _count_nonzero(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding) -> Tensor:
    return rows.reduce_from_ranks((x != 0).sum(dims))


reduction("any")(lambda x, dims, keepdim, rows: rows.group.all_reduce_(torch.any(x, dims, keepdim), "max"))
reduction("all")(lambda x, dims, keepdim, rows: rows.group.all_reduce_(torch.all(x, dims, keepdim), "min"))
reduction("amax")(lambda x, dims, keepdim, rows: extreme(x, dims, keepdim, rows, "max", nan_ties=False))
reduction("amin")(lambda x, dims, keepdim, rows: extreme(x, dims, keepdim, rows, "min", nan_ties=False))


@implements("_is_all_true", "_is_any_true")
def is_true(function: Function, x: Tensor) -> Tensor:
    """``all`` and ``any`` as ``torch.distributions`` calls them (collective)."""
    return (Tensor.all if "all" in function.__name__ else Tensor.any)(x)


@reduction("prod", parameters="dim keepdim dtype")
def _prod(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, dtype: torch.dtype | None = None) -> Tensor:
    local = x.prod(0, keepdim, dtype=dtype) if dims == (0,) else x.prod(dtype=dtype)  # of one dimension, or of all
    return by_rank(local, rows).prod(0)


@along("softmax", "log_softmax")
def softmax(
    function: Function,
    x: RowTensor,
    dim: int | None = None,
    *rest: object,
    dtype: torch.dtype | None = None,
    _stacklevel: int = 3,
) -> Tensor:
    """Over the rows of each column (collective)."""
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), dtype)
    if dim is None:
        raise UnsupportedError(f"{public_name(function)} expects dim for a {type(x).__name__} (got None): pass dim=-1")
    x = x if dtype is None else x.to(dtype)  # type: ignore[assignment]
    if x.shape[0] == 0:
        return on_rows(function, x, dim)
    # Differences from the largest: a logarithm of the sum itself would be rounded where the values of x are.
    shifted = (x - x.detach().amax(dim, keepdim=True)).to(accumulation_dtype(x.dtype))
    if "log" in function.__name__:
        return (shifted - shifted.exp().sum(dim, keepdim=True).log()).to(x.dtype)
    shares = shifted.exp()
    return (shares / shares.sum(dim, keepdim=True)).to(x.dtype)


@implements("allclose")
def allclose(function: Function, *args: Any, **kwargs: Any) -> bool:
    """Whether two tensors are close everywhere, on every rank (collective)."""
    return bool(torch.isclose(*args, **kwargs).all())


@implements("equal")
def equal(function: Function, x: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal everywhere, on every rank (collective)."""
    return x.shape == other.shape and bool((x == other).all())


def extreme(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, op: str, nan_ties: bool = True) -> Tensor:
    """Largest ("max") or smallest ("min") of all rows (collective); as in torch, ties share the gradient equally.

    NaN ties with NaN in ``torch.max``, and not in ``torch.amax``, whose gradient is NaN: ``nan_ties``.
    """
    if count(x, dims, rows) == 0:
        raise RuntimeError(f"{op}(): Expected reduction dim to be specified for input.numel() == 0.")
    kept: Tensor = _Extreme.apply(x, dims, rows, op, nan_ties)
    return kept if keepdim else kept.squeeze(dims)


class _Extreme(LocalFunction[Tensor]):
    @staticmethod
    def forward(ctx: Context, x: Tensor, dims: Dims, rows: RowSharding, op: str, nan_ties: bool) -> Tensor:
        if x.shape[0]:
            local = x.amax(dims, keepdim=True) if op == "max" else x.amin(dims, keepdim=True)
        else:
            local = x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], neutral(x.dtype, op))
        result = over_ranks(local, rows, op)
        if ctx.needs_input_grad[0]:
            ties = (x == result) | (x.isnan() & result.isnan()) if nan_ties else x == result
            number = rows.group.all_reduce_(ties.sum(dims, keepdim=True))
            ctx.group = rows.group
            ctx.save_for_backward(ties, number)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        ties, number = ctx.saved_tensors
        return replicated.copy_to_ranks(grad, ctx.group) * ties / number, None, None, None, None


def neutral(dtype: torch.dtype, op: str) -> float | int:
    """The neutral element of ``op``, "max" or "min"."""
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def over_ranks(local: Tensor, rows: RowSharding, op: str) -> Tensor:
    """The extreme of every rank's; NaN where any rank has NaN, which a collective's comparisons may lose."""
    if not local.is_floating_point():
        return rows.group.all_reduce_(local, op)
    is_nan = local.isnan()
    flag = is_nan.to(local.dtype) if op == "max" else -is_nan.to(local.dtype)
    both = rows.group.all_reduce_(torch.stack([local.masked_fill(is_nan, neutral(local.dtype, op)), flag]), op)
    return both[0].masked_fill(both[1] != 0, math.nan)


@along("max", "min", parameters="dim keepdim")
def max_min(function: Function, x: RowTensor, dim: int | None = None, keepdim: bool = False) -> object:
    """``max(x)``, or ``max(x, dim)`` with positions, over rows (collective)."""
    op, rows = function.__name__, x._sharding
    with local_tensors():
        if dim is None:
            return extreme(x, dims_of(None, x.dim()), False, rows, op)
        result = torch.return_types.max if op == "max" else torch.return_types.min
        return result(_with_position(x, keepdim, rows, op))


@along("argmax", "argmin", parameters="dim keepdim")
def arg_max_min(function: Function, x: RowTensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Global positions (collective)."""
    op, rows = function.__name__.removeprefix("arg"), x._sharding
    with local_tensors():
        local = x.detach()
        if dim is not None:
            return _with_position(local, keepdim, rows, op)[1]
        per_row = math.prod(local.shape[1:])
        values, position = _with_position(local.reshape(local.shape[0], per_row), False, rows, op)
        best = values.max() if op == "max" else values.min()
        flat = position * per_row + torch.arange(per_row, device=local.device)
        first = flat[(values == best) | (values.isnan() & best.isnan())].min()
        return first.view([1] * local.dim()) if keepdim else first


def _with_position(x: Tensor, keepdim: bool, rows: RowSharding, op: str) -> tuple[Tensor, Tensor]:
    """Values and global positions of each column's extremes, the first of equals; NaN counts as extreme."""
    values = extreme(x.detach(), (0,), True, rows, op)
    hit = (x == values) | (x.isnan() & values.isnan())
    position = on_device(rows.position, x.device).view(-1, *[1] * (x.dim() - 1))
    candidates = torch.where(hit, position, rows.size)
    none = torch.full_like(values, rows.size, dtype=torch.int64)  # for ranks without rows
    first = rows.group.all_reduce_(torch.cat([candidates, none]).amin(0), "min")
    # The gradient goes to the one row that was picked.
    picked = rows.reduce_from_ranks(torch.where(hit & (position == first), x, 0).sum(0).to(x.dtype))
    return (picked.unsqueeze(0), first.unsqueeze(0)) if keepdim else (picked, first)


@reduction("logsumexp")
def _logsumexp(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding) -> Tensor:
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    if count(x, dims, rows) == 0:
        return rows.reduce_from_ranks(x.exp().sum(dims, keepdim)).log()
    shift = extreme(x.detach(), dims, True, rows, "max")
    shift = torch.where(shift.isfinite(), shift, 0)
    total = rows.reduce_from_ranks((x - shift).exp().sum(dims, keepdim)).log()
    return total + (shift if keepdim else shift.squeeze(dims))


@reduction("vector_norm", parameters="ord dim keepdim")
def _vector_norm(
    x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, ord: float = 2, dtype: torch.dtype | None = None
) -> Tensor:
    x = x.to(dtype or x.dtype)
    if ord in (math.inf, -math.inf):
        return extreme(x.abs(), dims, keepdim, rows, "max" if ord > 0 else "min")
    if ord == 0:  # a count
        return rows.reduce_from_ranks((x != 0).sum(dims, keepdim).to(x.dtype))
    if ord < 0 and x.shape[0] == 0:  # torch has no neutral element for it; by the sum all ranks have a graph
        local = x.abs().sum(dims, keepdim) + math.inf
    else:
        local = torch.linalg.vector_norm(x, ord, dims, keepdim)
    # A norm of norms, and not a power of a sum of powers, whose derivative at zero is infinite.
    total: Tensor = torch.linalg.vector_norm(by_rank(local, rows), ord, 0)
    return total


@along("norm", parameters="p dim keepdim")
def norm(
    function: Function, x: Tensor, p: object = None, dim: object = None, keepdim: bool = False, *rest: object,
    ord: object = None, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """``torch.norm`` of vectors; ``torch.linalg.norm``, a matrix norm where there are two dimensions and an order."""
    dtype = next((value for value in rest if isinstance(value, torch.dtype)), dtype)
    name, order = ("ord", p if ord is None else ord) if function is torch.linalg.norm else ("p", p)
    if order == "nuc" or (name == "ord" and order is not None and len(dims_of(dim, x.dim())) > 1):
        raise refuse(function, f"with {name}={order!r} is a matrix norm")
    order = 2 if order in ("fro", None) else order
    return torch.linalg.vector_norm(x, order, dim, keepdim, dtype=dtype)  # type: ignore[no-any-return]


@along("std", "var", "std_mean", "var_mean", parameters="dim unbiased keepdim")
def std_var(
    function: Function, x: RowTensor, dim: Any = None, unbiased: bool = True, keepdim: bool = False, *,
    correction: float | None = None,
) -> object:  # fmt: skip
    """Two passes: the global mean, then the deviations from it."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    correction = int(unbiased) if correction is None else correction
    rows = x._sharding
    with local_tensors():
        if rows.is_on_one_rank:
            return function(x, dim, correction=correction, keepdim=keepdim)
        dims = dims_of(dim, x.dim())
        number = count(x, dims, rows)
        mean = _mean(x, dims, True, rows)
        deviation = x - copy_to_ranks(mean, rows.group)
        freedom = max(number - correction, 0)
        if "std" in function.__name__:  # a norm is differentiable where it is zero, as torch's std is
            spread = _vector_norm(deviation, dims, keepdim, rows) / math.sqrt(freedom)
        else:
            square = deviation.square()
            spread = (
                rows.reduce_from_ranks(square.sum(dims, keepdim, dtype=accumulation_dtype(square.dtype))) / freedom
            ).to(square.dtype)
        if "mean" in function.__name__:
            return spread, mean if keepdim else mean.squeeze(dims)
        return spread
