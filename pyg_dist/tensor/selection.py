"""Indexing: masks and lists of rows select, other indices work within rows. Assignment likewise."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.errors import DataError, MixedRowsError
from pyg_dist.tensor.row_tensor import LOCALLY, RowTensor, wrap
from pyg_dist.tensor.rows import Rows, Selection, local_mask
from pyg_dist.tensor.shapes import refuse
from pyg_dist.tensor.table import Function, handles

_ALL = slice(None)


def _is_all(index: Any) -> bool:
    return isinstance(index, slice) and index == _ALL


def select_rows(rows: Rows, index: Any) -> Selection:
    """The selection that ``index`` (mask, ids, slice, list, array or range) makes (may be collective)."""
    if isinstance(index, slice):
        return rows.by_index(torch.arange(rows.size)[index])
    if isinstance(index, RowTensor):
        if index.dtype == torch.bool and index.dim() == 1:
            return _by_row_mask(rows, index)
        raise MixedRowsError(
            f"Indexing rows with a {type(index).__name__} of dtype {index.dtype} and {index.dim()} dimensions would "
            f"mix rows: use a one-dimensional bool mask, or index.full_tensor()"
        )
    if not isinstance(index, Tensor):
        index = torch.as_tensor(np.asarray(index))
        index = index.long() if index.numel() == 0 and index.dtype != torch.bool else index
    if index.dim() != 1 or index.dtype.is_floating_point:
        raise DataError(
            f"Expected rows to be indexed by a one-dimensional mask or list of ids (got shape {list(index.shape)}, "
            f"{index.dtype}): flatten it, index.view(-1)"
        )
    if index.dtype == torch.bool:
        return rows.by_mask(local_mask(index, rows))
    return rows.by_index(index if index.dtype == torch.int64 else index.long())


def _by_row_mask(rows: Rows, mask: RowTensor) -> Selection:
    rows.require_like(mask._rows, "Indexing with a mask")
    with LOCALLY():
        version = -1 if mask.is_inference() else mask._version
        known = getattr(mask, "_selection", None)
        if known is None or known[0] != version or version < 0 or known[1] is not rows:
            # Counting is collective; a mask is used for outputs and labels alike, every epoch.
            known = mask._selection = (version, rows, rows.by_mask(mask))  # type: ignore[attr-defined]
    return known[2]  # type: ignore[no-any-return]


def _split(x: RowTensor, index: Any) -> tuple[Any, tuple[Any, ...]]:
    """``x[index]`` as (index of rows, index within rows)."""
    first, *rest = index if isinstance(index, tuple) else (index,)
    if first is Ellipsis:
        missing = x.dim() - sum(i is not None for i in rest)
        first, rest = _ALL, [*[_ALL] * (missing - 1), *rest]
        if missing < 1:
            raise refuse(Tensor.__getitem__, "with these indices leaves no dimension for the rows")
    if first is None:
        raise refuse(Tensor.__getitem__, "with None first would move rows out of dimension 0")
    if any(isinstance(i, RowTensor) for i in rest):
        raise refuse(Tensor.__getitem__, "within rows by a distributed index is .gather(1, index)")
    if not _is_all(first) and any(isinstance(i, (Tensor, list, np.ndarray)) for i in rest):
        raise refuse(Tensor.__getitem__, "with two lists would pair rows with columns: select in two steps")
    return first, tuple(rest)


@handles("__getitem__")
def getitem(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Select rows, then index within them."""
    x, index = args
    if not isinstance(x, RowTensor):
        raise MixedRowsError(
            f"Indexing a plain tensor of shape {list(x.shape)} with a {type(index).__name__}: make the indexed "
            f"tensor an attribute of the DistributedData, or use index.full_tensor()"
        )
    first, rest = _split(x, index)
    if isinstance(first, (int, np.integer)) and not isinstance(first, bool):
        return _one_row(x, int(first))[rest] if rest else _one_row(x, int(first))
    with LOCALLY():
        rows, local = x._rows, x.as_subclass(Tensor)
        if not _is_all(first):
            selection = select_rows(rows, first)
            rows, local = selection.rows, local.index_select(0, selection.local_index)
        if rest:
            local = local[(_ALL, *rest)]
        return wrap(local, rows)


def _one_row(x: RowTensor, position: int) -> Tensor:
    """Row ``position``, a plain tensor equal on every rank; differentiable (collective)."""
    selection = x._rows.by_index(torch.tensor([position]))
    with LOCALLY():
        mine = x.as_subclass(Tensor).index_select(0, selection.local_index)
        return selection.rows.leave(mine.sum(0, dtype=x.dtype))


@handles("__setitem__")
def setitem(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Assign to selected rows: a number, a row-free tensor, one row per selected row, or a like selection."""
    x, index, value = args
    if not isinstance(x, RowTensor):
        raise MixedRowsError("Assigning distributed rows into a plain tensor would mix rows: use .full_tensor()")
    first, rest = _split(x, index)
    if isinstance(first, (int, np.integer)):
        first = [int(first)]
        value = value.unsqueeze(0) if isinstance(value, Tensor) and value.dim() == x.dim() - 1 else value
    selection = None if _is_all(first) else select_rows(x._rows, first)
    rows = x._rows if selection is None else selection.rows
    num_dims = x.dim() - sum(isinstance(i, int) for i in rest)
    if isinstance(value, RowTensor):
        rows.require_like(value._rows, "Assignment")
    elif isinstance(value, Tensor):
        sliced = value.dim() == num_dims and value.shape[0] == rows.size and value.shape[0] != 1
        value = rows.slice(value) if sliced else rows.enter(value)
    with LOCALLY():
        x[(_ALL if selection is None else selection.local_index, *rest)] = value


@handles("index_select")
def index_select(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Rows by list (dimension 0), or columns."""
    x, dim, index = (*args, *kwargs.values())
    if isinstance(index, RowTensor):
        raise refuse(function, "by a distributed index would mix rows")
    return x[index] if dim % x.dim() == 0 else x[(*[_ALL] * (dim % x.dim()), index)]


@handles("select")
def select(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One row (dimension 0), or one column."""
    x, dim, index = (*args, *kwargs.values())
    return x[(*[_ALL] * (dim % x.dim()), index)]


@handles("masked_select")
def masked_select(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One-dimensional selections."""
    x, mask = (*args, *kwargs.values())
    if not isinstance(x, RowTensor) or x.dim() != 1 or mask.dim() != 1:
        raise refuse(function, "of more than one dimension would lose the rows")
    return x[mask]


@handles("nonzero")
def nonzero(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Global ids of what is not zero, in ascending order, a plain tensor equal on every rank (collective)."""
    x = args[0]
    with LOCALLY():
        index = x.as_subclass(Tensor).nonzero()
        index[:, 0] = x._rows.position[index[:, 0]]
    everyone = x._rows.axis.gather_rows(index, x._rows.axis.gather_counts(index.shape[0]))
    # One row's entries come from one rank and in order, so a stable sort by row orders them all.
    everyone = everyone[everyone[:, 0].argsort(stable=True)]
    return everyone.unbind(1) if kwargs.get("as_tuple", False) else everyone
