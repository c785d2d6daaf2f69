"""Largest and smallest values, and their positions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.autograd import replicated
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.on_device import on_device
from pyg_dist.tensor.functions.pointwise import pointwise
from pyg_dist.tensor.functions.reductions import Dims, count, reduction
from pyg_dist.tensor.functions.shapes import dims_of
from pyg_dist.tensor.registry import Function, bind, implements
from pyg_dist.tensor.row_tensor import local_tensors, on_rows
from pyg_dist.tensor.sharding import RowSharding


def extreme(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, op: str, nan_ties: bool = True) -> Tensor:
    """Largest ("max") or smallest ("min") of all rows (collective); as in torch, ties share the gradient equally.

    Args:
        x: local rows.
        dims: dimensions to reduce, 0 among them.
        keepdim: keep them, with size one.
        rows: the distribution.
        op: which.
        nan_ties: whether NaN ties with NaN. It does in ``torch.max``, and not in ``torch.amax``, whose gradient is NaN.
    """
    if count(x, dims, rows) == 0:
        raise RuntimeError(f"{op}(): Expected reduction dim to be specified for input.numel() == 0.")
    kept: Tensor = _Extreme.apply(x, dims, rows, op, nan_ties)
    return kept if keepdim else kept.squeeze(dims)


class _Extreme(LocalFunction[Tensor]):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dims: Dims, rows: RowSharding, op: str, nan_ties: bool) -> Tensor:
        if x.shape[0]:
            local = x.amax(dims, keepdim=True) if op == "max" else x.amin(dims, keepdim=True)
        else:
            local = x.new_full([1 if d in dims else n for d, n in enumerate(x.shape)], _neutral(x.dtype, op))
        result = _over_ranks(local, rows, op)
        if ctx.needs_input_grad[0]:
            ties = (x == result) | (x.isnan() & result.isnan()) if nan_ties else x == result
            number = rows.group.all_reduce_(ties.sum(dims, keepdim=True))
            ctx.group = rows.group
            ctx.save_for_backward(ties, number)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ties, number = ctx.saved_tensors
        return replicated.copy_to_ranks(grad, ctx.group) * ties / number, None, None, None, None


def _neutral(dtype: torch.dtype, op: str) -> float | int:
    if dtype == torch.bool:
        return op == "min"
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def _over_ranks(local: Tensor, rows: RowSharding, op: str) -> Tensor:
    """The extreme of every rank's; NaN where any rank has NaN, which a collective's comparisons may lose."""
    if not local.is_floating_point():
        return rows.group.all_reduce_(local, op)
    is_nan = local.isnan()
    flag = is_nan.to(local.dtype) if op == "max" else -is_nan.to(local.dtype)
    both = rows.group.all_reduce_(torch.stack([local.masked_fill(is_nan, _neutral(local.dtype, op)), flag]), op)
    return both[0].masked_fill(both[1] != 0, math.nan)


@reduction("amax")
def _amax(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    return extreme(x, dims, keepdim, rows, "max", nan_ties=False)


@reduction("amin")
def _amin(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    return extreme(x, dims, keepdim, rows, "min", nan_ties=False)


@implements("max", "min")
def max_min(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``max(x)``, ``max(x, dim)`` with positions, or the pointwise ``max(x, y)``."""
    op, bound = function.__name__, bind("x dim keepdim", args, kwargs)
    if isinstance(bound.get("dim", bound.get("other")), Tensor):
        return pointwise(function, args, kwargs)
    x = args[0]
    if "dim" not in bound:
        with local_tensors():
            return extreme(x, dims_of(None, x.dim()), False, x._sharding, op)
    if 0 not in dims_of(bound["dim"], x.dim()):
        return on_rows(function, *args, **kwargs)
    result = torch.return_types.max if op == "max" else torch.return_types.min
    with local_tensors():
        return result(_with_position(x, bound.get("keepdim", False), x._sharding, op))


@implements("argmax", "argmin")
def arg_max_min(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Within rows; or global positions."""
    x, bound = args[0], bind("x dim keepdim", args, kwargs)
    dim, keepdim = bound.get("dim"), bound.get("keepdim", False)
    if dim is not None and 0 not in dims_of(dim, x.dim()):
        return on_rows(function, *args, **kwargs)
    op = function.__name__.removeprefix("arg")
    with local_tensors():
        x, rows = x.detach(), args[0]._sharding
        if dim is not None:
            return _with_position(x, keepdim, rows, op)[1]
        per_row = math.prod(x.shape[1:])
        values, position = _with_position(x.reshape(x.shape[0], per_row), False, rows, op)
        best = values.max() if op == "max" else values.min()
        flat = position * per_row + torch.arange(per_row, device=x.device)
        first = flat[(values == best) | (values.isnan() & best.isnan())].min()
        return first.view([1] * x.dim()) if keepdim else first


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
def _logsumexp(x: Tensor, dims: Dims, keepdim: bool, rows: RowSharding, bound: dict[str, Any]) -> Tensor:
    x = x if x.is_floating_point() else x.to(torch.get_default_dtype())
    if count(x, dims, rows) == 0:
        return rows.reduce_from_ranks(x.exp().sum(dims, keepdim)).log()
    shift = extreme(x.detach(), dims, True, rows, "max")
    shift = torch.where(shift.isfinite(), shift, 0)
    total = rows.reduce_from_ranks((x - shift).exp().sum(dims, keepdim)).log()
    return total + (shift if keepdim else shift.squeeze(dims))
