"""Distributed rows written into a plain tensor, which stays plain and equal on every rank.

Sums by an index, class centroids for instance, are made of each rank's own rows. What overwrites needs all rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyg_dist.errors import DataError
from pyg_dist.tensor.functions.full_tensor import on_full_tensor
from pyg_dist.tensor.functions.pointwise import aligned, as_operand
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.functions.shapes import dims_of, refuse
from pyg_dist.tensor.registry import Function, bind, implements
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, like_rows, local_tensors


def write(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``scatter`` and its kin, in place or not, of a plain first operand (collective)."""
    name = function.__name__
    bound = bind("x dim index src reduce", args, kwargs)
    x = bound["x"]
    is_sum = name.startswith("scatter_add") or bound.get("reduce") in ("sum", "add")
    is_sum = is_sum and bound.get("include_self", True) and isinstance(bound.get("src"), Tensor)
    if is_sum and bound["src"].dtype != x.dtype:
        raise DataError(
            f"{name} expected 'src' in the dtype of what it writes into, {x.dtype} (got {bound['src'].dtype}): convert "
            f"one of them"
        )
    if not is_sum or dims_of(bound["dim"], x.dim()) != (0,):
        return on_full_tensor(function, args, kwargs)  # type: ignore[no-any-return]
    with local_tensors():
        (index, src), _, rows = aligned(function, (bound["index"], bound["src"]), {}, broadcasts=False)
        rows.meet(x)
        sums = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)).scatter_add(
            0, index, src.to(accumulation_dtype(x.dtype))
        )
        return _added(x, rows.reduce_from_ranks(sums), in_place=name.endswith("_"))


@implements("index_add", "index_add_")
def index_add(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums of rows by an index into a plain tensor (collective), or of columns within rows."""
    bound = bind("x dim index source", args, kwargs)
    x, index, source, alpha = bound["x"], bound["index"], bound["source"], bound.get("alpha", 1)
    (dim,) = dims_of(bound["dim"], x.dim())
    with local_tensors():
        if isinstance(x, RowTensor):
            if dim == 0 or isinstance(index, RowTensor):
                raise refuse(function, "along dimension 0 would mix rows")
            (x, source), _, rows = aligned(function, (x, source), {}, broadcasts=False)
            rows.meet(index)
            return as_row_tensor_(function(x, dim, index, source, alpha=alpha), rows)
        if dim != 0:
            raise refuse(function, "of a plain tensor along another dimension than 0 would mix rows")
        (index, source), rows = like_rows(function, index, source)
        index, source = (as_operand(function, t, rows, t.dim(), broadcasts=False) for t in (index, source))
        rows.meet(x)
        zeros = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
        sums = zeros.index_add(0, index.as_subclass(Tensor), source.as_subclass(Tensor).to(zeros.dtype), alpha=alpha)
        return _added(x, rows.reduce_from_ranks(sums), in_place=function.__name__.endswith("_"))


def _added(x: Tensor, sums: Tensor, in_place: bool) -> Tensor:
    return x.add_(sums.to(x.dtype)) if in_place else x + sums.to(x.dtype)
