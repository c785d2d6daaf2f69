"""Reductions of rows by an index (``scatter``, ``index_add``, ``index_reduce``): by each rank's rows, then over ranks.

A plain tensor that is written into stays plain and equal on every rank. Sums, means and extremes send as many elements
as it has; products, and what overwrites, gather all rows. Sums by an end of edges stay distributed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.autograd.replicated import copy_to_ranks
from pyg_dist.backend.local_function import Context, LocalFunction
from pyg_dist.errors import DataError
from pyg_dist.tensor.functions.full_tensor import on_full_tensor
from pyg_dist.tensor.functions.moved_rows import MOVED, MovedRows, moved_in, refuse_moved, rows_first
from pyg_dist.tensor.functions.pointwise import aligned, as_operand
from pyg_dist.tensor.functions.reductions import accumulation_dtype, neutral, over_ranks
from pyg_dist.tensor.operands import like_rows
from pyg_dist.tensor.registry import Function, bind, dims_of, implements, public_name, refuse
from pyg_dist.tensor.row_index import RowIndex
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor, as_row_tensor_, local_tensors
from pyg_dist.tensor.sharding import RowSharding

_REDUCED_BY_RANKS = ("sum", "add", "mean", "amax", "amin")


_NAMES = (
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_",
    "index_add", "index_add_", "index_reduce", "index_reduce_",
)  # fmt: skip


@implements(*_NAMES)
def scatter(function: Function, x: Tensor, *args: object, **kwargs: object) -> object:
    """Into a plain tensor, or along the rows of a row tensor (collective); or within rows."""
    name = function.__name__.removesuffix("_")
    source = "source" if name.startswith("index") else "src"
    bound = bind(function, f"dim index {source} reduce", args, kwargs)
    index, src = bound["index"], bound.get(source)
    reduce = "sum" if name.endswith("_add") else bound.get("reduce")
    if dims_of(bound["dim"], x.dim()) != (0,):
        return _in_columns(function, x, *args, **kwargs)
    is_exact = reduce != "mean" or x.is_floating_point()
    if reduce not in _REDUCED_BY_RANKS or not isinstance(src, Tensor) or not is_exact:
        if not isinstance(x, RowTensor):
            return on_full_tensor(function, x, *args, **kwargs)
        written: Any = on_full_tensor(getattr(Tensor, name), x, *args, **kwargs)
        out: Tensor = RowTensor.from_local(x._sharding.slice(written), x._sharding)
        return x.copy_(out) if function.__name__.endswith("_") else out
    if src.dtype != x.dtype or (source == "source" and src.shape[1:] != x.shape[1:]):
        raise DataError(
            f"{public_name(function)} expected a {source} of rows {list(x.shape[1:])} in {x.dtype}, as it writes into "
            f"(got {list(src.shape[1:])} in {src.dtype}): reshape or convert one of them"
        )
    is_sum = reduce in ("sum", "add") and bound.get("include_self", True)
    if not isinstance(x, RowTensor):
        src = src if bound.get("alpha", 1) == 1 else src * bound["alpha"]
        out = _into_plain(function, x, index, src, reduce, bound.get("include_self", True))
    elif is_sum and isinstance(index, RowIndex) and isinstance(x, NodeTensor) and isinstance(src, EdgeTensor):
        out = torch.add(x, index.add_up(src), alpha=bound.get("alpha", 1))
    else:
        base = torch.zeros(x.shape, dtype=x.dtype, device=x.device) if is_sum else x.full_tensor()
        whole: Tensor = getattr(Tensor, name)(base, *args, **kwargs)
        out = x + whole if is_sum else RowTensor.from_local(x._sharding.slice(whole), x._sharding)
    return x.copy_(out) if function.__name__.endswith("_") else out


@MOVED.implements(*_NAMES)
def _of_moved(function: Function, x: Tensor, *args: object, **kwargs: object) -> object:
    """Scatter rows in another dimension, along it, into a plain tensor (collective)."""
    first = moved_in((x, *args, *kwargs.values()))[0]
    source = "source" if function.__name__.startswith("index") else "src"
    bound = bind(function, f"dim index {source} reduce", args, kwargs)
    dim, index = bound.pop("dim"), bound.pop("index")
    if type(x) is MovedRows or dims_of(dim, x.dim()) != (first.place,):
        raise refuse_moved(function, first)
    rest = {name: rows_first(value, first, function) for name, value in bound.items()}
    index = index if index.dim() == 1 else rows_first(index, first, function)
    called = getattr(Tensor, function.__name__.removesuffix("_"))
    out = called(x.movedim(first.place, 0), 0, index=index, **rest).movedim(0, first.place)
    return x.copy_(out) if function.__name__.endswith("_") else out


def _in_columns(function: Function, x: Tensor, *args: object, **kwargs: object) -> object:
    """Within rows; of a plain tensor, with all rows (collective)."""
    if not isinstance(x, RowTensor):
        return on_full_tensor(function, x, *args, **kwargs)
    with local_tensors():
        if function.__name__.startswith("scatter"):
            args, kwargs, rows = aligned(function, (x, *args), kwargs, broadcasts=False)
            return as_row_tensor_(function(*args, **kwargs), rows)
        bound = bind(function, "dim index source reduce", args, kwargs)
        if isinstance(bound["index"], RowTensor):
            raise refuse(function, "of columns by a distributed index would mix rows")
        (x, source), _, rows = aligned(function, (x, bound.pop("source")), {}, broadcasts=False)
        rows.note(bound["index"])
        return as_row_tensor_(function(x, **bound | {"source": source}), rows)


def _into_plain(function: Function, x: Tensor, index: Tensor, src: Tensor, reduce: str, includes_self: bool) -> Tensor:
    """A new plain tensor, of rows that are reduced on their ranks (collective)."""
    with local_tensors():
        if index.dim() == src.dim():
            (index, src), _, rows = aligned(function, (index, src), {}, broadcasts=False)
        else:
            (index, src), rows = like_rows(function, index, src)
            index, src = (as_operand(function, t, rows, t.dim(), broadcasts=False) for t in (index, src))
            index = index.view(-1, *[1] * (src.dim() - 1)).expand(src.shape)
        rows.note(x)
        index, src = index.as_subclass(Tensor).long(), src.as_subclass(Tensor)  # torch gathers by int32 wrongly
        if reduce in ("amax", "amin"):
            return _Extremes.apply(x, index, src, rows, reduce, includes_self)

        def total(values: Tensor) -> Tensor:
            zeros = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
            return rows.reduce_from_ranks(zeros.scatter_add(0, index, values.to(zeros.dtype)))

        sums = total(src)
        if reduce == "mean" or not includes_self:
            number = total(torch.ones_like(src))
            if includes_self:
                return ((x + sums) / (number + 1)).to(x.dtype)
            of_any = sums / number.clamp(min=1) if reduce == "mean" else sums
            return torch.where(number > 0, of_any.to(x.dtype), x)
        return x + sums.to(x.dtype)


class _Extremes(LocalFunction[Tensor]):
    """``x.scatter_reduce(0, index, src, "amax" or "amin")`` of a plain ``x``, and rows of which each rank has some.

    As in torch, equals share the gradient, and ``x`` is among them also where it is not included.
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, index: Tensor, src: Tensor, rows: RowSharding, reduce: str, includes_self: bool
    ) -> Tensor:
        op = reduce.removeprefix("a")
        local = torch.full_like(x, neutral(x.dtype, op)).scatter_reduce(0, index, src, reduce)
        best, is_reached = over_ranks(local, rows, op), None
        if includes_self:
            result = torch.maximum(x, best) if op == "max" else torch.minimum(x, best)
        else:
            is_reached = torch.zeros_like(x, dtype=torch.bool).scatter(0, index, True)
            is_reached = rows.group.all_reduce_(is_reached, "max")
            result = torch.where(is_reached, best, x)
        if any(ctx.needs_input_grad):
            is_best, is_own = src == result.gather(0, index), x == result
            number = torch.zeros_like(x).scatter_add(0, index, is_best.to(x.dtype))
            number = rows.group.all_reduce_(number) + is_own
            ctx.group = rows.group
            ctx.save_for_backward(index, is_best, is_own if is_reached is None else is_own & ~is_reached, number)
        return result

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        index, is_best, is_own, number = ctx.saved_tensors
        of_each = grad / number
        of_rows = copy_to_ranks(of_each, ctx.group).gather(0, index) * is_best
        return of_each * is_own, None, of_rows, None, None, None
