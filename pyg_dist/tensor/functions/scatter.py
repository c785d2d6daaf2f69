"""Sums of distributed rows by an index, such as class centroids, and other writes into plain tensors.

A plain tensor that is written into stays plain and equal on every rank: sums are made of each rank's own rows, what
overwrites needs all rows. Into rows go sums only; those by an end of edges, the messages of a script, stay distributed.
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
from pyg_dist.tensor.registry import Function, bind, implements, public_name
from pyg_dist.tensor.row_index import RowIndex
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, RowTensor, as_row_tensor_, like_rows, local_tensors


def write(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``scatter`` and its kin, in place or not, of a plain first operand (collective)."""
    name = function.__name__
    bound = bind("x dim index src reduce", args, kwargs)
    x = bound["x"]
    is_sum = _is_sum(name, bound)
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


def _is_sum(name: str, bound: dict[str, Any]) -> bool:
    """Whether a function named ``scatter...`` adds to what is there."""
    is_sum = name.startswith("scatter_add") or bound.get("reduce") in ("sum", "add")
    return is_sum and bound.get("include_self", True) and isinstance(bound.get("src"), Tensor)


def add_to_rows(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> RowTensor:
    """``scatter_add`` and its kin along the rows of a row tensor, in place or not (collective).

    Raises:
        MixedRowsError: What overwrites, or reduces otherwise.
    """
    bound = bind("x dim index src reduce", args, kwargs)
    if not _is_sum(function.__name__, bound):
        raise refuse(function, "along dimension 0 would mix rows, sums apart")
    x, index, source = bound["x"], bound["index"], bound["src"]
    return _added_to_rows(function, x, torch.scatter_add(_zeros_of_all(x), 0, index, source))


def _zeros_of_all(x: RowTensor) -> Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


def _added_to_rows(function: Function, x: RowTensor, sums: Tensor) -> RowTensor:
    """``x + sums``, which are plain, or rows."""
    return x.add_(sums) if function.__name__.endswith("_") else x + sums  # type: ignore[return-value]


@implements("index_add", "index_add_")
def index_add(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums of rows by an index into a plain tensor or rows (collective), or of columns within rows."""
    bound = bind("x dim index source", args, kwargs)
    x, index, source, alpha = bound["x"], bound["index"], bound["source"], bound.get("alpha", 1)
    (dim,) = dims_of(bound["dim"], x.dim())
    if isinstance(x, RowTensor) and dim == 0:
        if isinstance(index, RowIndex) and isinstance(x, NodeTensor) and isinstance(source, EdgeTensor):
            if (source.dtype, source.shape[1:]) != (x.dtype, x.shape[1:]):
                raise DataError(
                    f"{public_name(function)} expected a source of rows {list(x.shape[1:])} in {x.dtype}, as it writes "
                    f"into (got {list(source.shape[1:])} in {source.dtype}): reshape or convert one of them"
                )
            sums = index.add_up(source)
            return _added_to_rows(function, x, sums if alpha == 1 else alpha * sums)
        return _added_to_rows(function, x, torch.index_add(_zeros_of_all(x), 0, index, source, alpha=alpha))
    with local_tensors():
        if isinstance(x, RowTensor):
            if isinstance(index, RowTensor):
                raise refuse(function, "of columns by a distributed index would mix rows")
            (x, source), _, rows = aligned(function, (x, source), {}, broadcasts=False)
            rows.meet(index)
            return as_row_tensor_(function(x, dim, index, source, alpha=alpha), rows)
        if dim != 0:
            raise refuse(function, "of a plain tensor along another dimension than 0 would mix rows")
        (index, source), rows = like_rows(function, index, source)
        index, source = (as_operand(function, t, rows, t.dim(), broadcasts=False) for t in (index, source))
        rows.meet(x)
        zeros = torch.zeros_like(x, dtype=accumulation_dtype(x.dtype))
        total = zeros.index_add(0, index.as_subclass(Tensor), source.as_subclass(Tensor).to(zeros.dtype), alpha=alpha)
        return _added(x, rows.reduce_from_ranks(total), in_place=function.__name__.endswith("_"))


def _added(x: Tensor, sums: Tensor, in_place: bool) -> Tensor:
    return x.add_(sums.to(x.dtype)) if in_place else x + sums.to(x.dtype)
