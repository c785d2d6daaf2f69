"""x[mask] and other indexing: masks and lists of rows select, other indices work within rows; so do assignments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.dense import indexed_rows
from pyg_dist.backend.on_device import on_device
from pyg_dist.errors import DataError
from pyg_dist.tensor.functions.full_tensor import on_full_tensor
from pyg_dist.tensor.functions.layers import of_each_row
from pyg_dist.tensor.functions.moved_rows import MovedRows
from pyg_dist.tensor.functions.pointwise import as_operand
from pyg_dist.tensor.operands import by_row_mask, moved_to
from pyg_dist.tensor.registry import TAKES_OUT, Function, dims_of, implements, refuse
from pyg_dist.tensor.row_index import PickedRows, RowIndex
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor, as_row_tensor_, copied_slice, local_tensors
from pyg_dist.tensor.selection import Selection, elements_of, rows_by_index, rows_by_mask
from pyg_dist.tensor.sharding import RowSharding

_ALL = slice(None)
_VALUES = "Expected values to assign"


def select_rows(rows: RowSharding, index: object) -> Selection:
    """The selection that ``index`` (mask, ids, slice, list, array or range) makes (may be collective)."""
    if isinstance(index, slice):
        return rows_by_index(rows, host.arange(rows.size)[index])
    if isinstance(index, RowTensor):
        if index.dtype == torch.bool and index.dim() == 1:
            return by_row_mask(rows, index)
        if isinstance(index, PickedRows) and index.source is rows:
            return Selection(index._sharding, index.place)
        index = index.full_tensor()  # ids, such as some of edge_index[0]
    if not isinstance(index, Tensor):
        index = host.as_tensor(np.asarray(index))
        index = index.long() if index.numel() == 0 else index
    if index.dim() != 1 or index.dtype in (torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise DataError(
            f"Expected rows to be indexed by a one-dimensional bool mask or list of ids (got {index.dtype} of shape "
            f"{list(index.shape)}): use .bool() or .long(), and .view(-1)"
        )
    if index.dtype != torch.bool:
        return rows_by_index(rows, index.long())
    if index.shape[0] != rows.size:
        raise DataError(
            f"Expected a mask over {rows} (got {index.shape[0]} entries): use a mask of this graph, "
            f"or .to_local() rows with a local mask"
        )
    return rows_by_mask(rows, rows.slice_alike(index))


def _split(x: RowTensor, index: object) -> tuple[object, tuple[Any, ...]]:
    """``x[index]`` as (index of rows, index within rows); the former is ``_ALL``, an int, or for `select_rows`."""
    index = index if isinstance(index, tuple) else (index,)
    if not index or index[0] is Ellipsis:
        missing = x.dim() - sum(_num_dims_used(i) for i in index[1:])
        if missing < 1:
            raise refuse(Tensor.__getitem__, "with these indices leaves no dimension for the rows")
        index = (*[_ALL] * missing, *index[1:])
    if any(map(_is_flag, index)):
        raise refuse(Tensor.__getitem__, "with one bool would add a dimension before the rows")
    first, *rest = index
    if isinstance(first, slice) and first.indices(x._sharding.size) == (0, x._sharding.size, 1):
        first = _ALL
    elif _is_one(first, (int, np.integer), (torch.int64, torch.int32, np.int64, np.int32)) and not _is_flag(first):
        first = int(first)
    if first is None:
        raise refuse(Tensor.__getitem__, "with None first would move rows")
    rest = [_chosen_columns(i) if isinstance(i, RowTensor) and i.dtype == torch.bool else i for i in rest]
    if any(isinstance(i, RowTensor) for i in rest):
        raise refuse(Tensor.__getitem__, "within rows by a distributed index is .gather(1, index)")
    lists = _lists(rest)
    if len(lists) > 1 and first is not _ALL and not isinstance(first, int):
        raise refuse(
            Tensor.__getitem__,
            "with a list of rows and several of places within them is x.flatten(1, 2)[rows, i * x.shape[2] + j]",
        )
    if lists and first is not _ALL and not isinstance(first, int):
        raise refuse(Tensor.__getitem__, "with two lists would pair rows with columns (x[rows][:, columns] does not)")
    if lists and lists[-1] - lists[0] >= len(lists):
        raise refuse(Tensor.__getitem__, "with lists that are not neighbours would put their dimension first")
    return first, tuple(rest)


def _chosen_columns(mask: RowTensor) -> Tensor:
    """The columns that a mask of nodes chooses in a matrix of all pairs (collective)."""
    whole = mask.full_tensor()
    return whole.nonzero().view(-1) if whole.dim() == 1 else whole


def _note_columns(x: RowTensor, index: Sequence[object]) -> None:
    """Note lists of columns, equal on every rank. Check their range, which torch does not where there are no rows."""
    dim: int | None = 1
    for item in index:
        if isinstance(item, Tensor):
            x._sharding.note(item)
        if item is Ellipsis or dim is None:
            dim = None  # counted from the end: torch checks these
            continue
        size = x.shape[dim] if dim < x.dim() else 0
        if isinstance(item, (list, np.ndarray)) or (isinstance(item, Tensor) and item.is_cpu):
            place = host.as_tensor(item)
            if place.dtype != torch.bool and place.numel() and not place.is_floating_point():
                low, high = int(place.min()), int(place.max())
                if low < -size or high >= size:
                    raise IndexError(
                        f"index {low if low < -size else high} is out of bounds for dimension {dim} with size {size}"
                    )
        dim += _num_dims_used(item)


def _is_one(index: object, kinds: tuple[type, ...], dtypes: tuple[object, ...]) -> bool:
    """Whether ``index`` is one value of these kinds, or a tensor of one in these dtypes."""
    if isinstance(index, (Tensor, np.ndarray)):
        return not isinstance(index, RowTensor) and index.ndim == 0 and index.dtype in dtypes
    return isinstance(index, kinds)


def _is_flag(index: object) -> bool:
    return _is_one(index, (bool, np.bool_), (torch.bool, np.bool_))


def _lists(index: Sequence[object]) -> list[int]:
    """Where an index holds lists of positions, and not a position or a slice."""
    return [k for k, item in enumerate(index) if isinstance(item, (Tensor, list, np.ndarray))]


def _num_dims_used(index: object) -> int:
    """How many dimensions one item of an index stands for."""
    if index is None or index is Ellipsis:
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype == torch.bool else 1


@implements("__getitem__")
def getitem(function: Function, x: Tensor, index: object) -> object:
    """Select rows, then index within them; or look up one for each edge, or rows of a plain table."""
    if not isinstance(x, RowTensor):
        return _look_up(x, index)
    if isinstance(x, RowIndex) and isinstance(index, RowTensor) and index.dtype == torch.bool:
        return x.selected(index)
    if isinstance(index, RowTensor) and index._selection is not None:
        with local_tensors():
            if index.dim() == 1 and index.dtype == torch.bool:
                return _selected(x, by_row_mask(x._sharding, index))
    if isinstance(index, PickedRows) or (isinstance(index, RowIndex) and isinstance(x, NodeTensor)):
        return index.fetch(x)  # type: ignore[arg-type]
    if isinstance(index, tuple) and index and isinstance(index[0], RowIndex) and not _lists(index[1:]):
        within = (_ALL, *index[1:])
        return x[index[0]][within]
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 1:
        return _elements(x, index)
    if isinstance(index, Tensor) and not isinstance(index, RowTensor) and index.dim() > 1 and index.numel() > 0:
        return _tables(x, index)
    paired = _paired_dim(x, index)
    if paired:
        return _pairs(x, cast(tuple[Any, ...], index), paired)
    if index is None or (isinstance(index, tuple) and index and index[0] is None):
        return x[index[1:] if index and index[1:] else _ALL].unsqueeze(0)
    first, rest = _split(x, index)
    _note_columns(x, rest)
    if isinstance(first, int):
        row = _one_row(x, first)
        return row[rest] if rest else row
    with local_tensors():
        rows, local = x._sharding, x.as_subclass(Tensor)
        if first is not _ALL:
            rows, local_index = select_rows(rows, first)
            local = indexed_rows.select(local, on_device(local_index, local.device))
        out = as_row_tensor_(local[tuple([_ALL, *rest])] if rest else local, rows)
        return copied_slice(out) if isinstance(first, slice) and first is not _ALL else out


def _selected(x: Tensor, chosen: Selection) -> RowTensor:
    """Some rows of x; to be called under :data:`local_tensors`."""
    local_index = on_device(chosen.local_index, x.device)
    return as_row_tensor_(indexed_rows.select(x, local_index), chosen.rows)


def _paired_dim(x: Tensor, index: object) -> int:
    """The dimension whose positions ``index`` pairs with rows, by a list of each and nothing else; 0: it does not."""
    if not isinstance(index, tuple) or not 2 <= len(index) <= x.dim():
        return 0
    lists = [
        k
        for k, i in enumerate(index)
        if isinstance(i, (list, range)) or (isinstance(i, (Tensor, np.ndarray)) and i.ndim == 1)
    ]
    others = [i for k, i in enumerate(index) if k not in lists]
    is_pair = len(lists) == 2 and lists[0] == 0 and all(isinstance(i, slice) and i == _ALL for i in others)
    return lists[1] if is_pair else 0


def _tables(x: RowTensor, index: Tensor) -> Tensor:
    """Rows for each entry of ``[K, 2]`` or ``[2, K]``: they lie along the longer of the first two dimensions."""
    if index.shape[0] < index.shape[1]:
        return MovedRows.make(_tables(x, index.transpose(0, 1)), 1)
    width = index[0].numel()
    entries = x[index.reshape(-1)]
    with local_tensors():
        rows = select_rows(x._sharding, index.reshape(len(index), -1)[:, 0]).rows
        local: Tensor = moved_to(elements_of(rows, width), entries, "Expected entries")
        return as_row_tensor_(local.reshape(rows.num_local, *index.shape[1:], *x.shape[1:]), rows)


def _pairs(x: RowTensor, index: tuple[Any, ...], dim: int) -> Tensor:
    """One place of ``dim`` for each selected row: ``p[torch.arange(N), y]``, ``h[rows, last]`` (as ``x[index[0]]``)."""
    rows = index[0]
    is_all = not isinstance(rows, RowTensor) and len(rows) == x.shape[0]
    # Not selected, so that the result pairs with other rows of x.
    picked = x if is_all and torch.equal(host.as_tensor(rows), host.arange(len(rows))) else x[rows]
    columns, size = _columns(index[dim], picked.shape[0]), x.shape[dim]
    if not isinstance(columns, RowTensor) and columns.device.type == "cpu":  # each rank has all, and raises
        wrong = columns[(columns < -size) | (columns >= size)]
        if wrong.numel():
            raise IndexError(f"index {int(wrong[0])} is out of bounds for dimension {dim} with size {size}")
    columns = torch.where(columns < 0, columns + size, columns).long().to(x.device)
    shape = (-1, *[1] * (dim - 1), 1, *[1] * (x.dim() - dim - 1))
    return picked.gather(dim, columns.view(shape).expand(-1, *x.shape[1:dim], 1, *x.shape[dim + 1 :])).squeeze(dim)


def _columns(given: object, num_rows: int) -> Tensor:
    """A column for each of some rows: integers, no mask. An empty list may be float32, as torch makes it."""
    if isinstance(given, RowTensor) and given.dtype == torch.bool:  # of nodes
        given = _chosen_columns(given)
    columns = host.as_tensor(given)
    columns = columns if len(columns) else columns.long()
    if columns.dtype == torch.bool or columns.is_floating_point() or len(columns) != num_rows:
        raise DataError(
            f"Expected as many columns as rows, {num_rows} positions (got {columns.dtype} of shape "
            f"{list(columns.shape)}): x[rows][:, columns] selects all pairs"
        )
    return columns


def _look_up(table: Tensor, index: object) -> object:
    """Rows of a plain table: one for each integer, distributed as these are; by a mask plain ones (collective)."""
    if isinstance(index, RowTensor) and index.dtype != torch.bool:
        return of_each_row(lambda ids, rows_of_table: rows_of_table[ids], index, table)
    return on_full_tensor(Tensor.__getitem__, table, index)


def _elements(x: RowTensor, mask: Tensor) -> object:
    """The elements where a mask of several dimensions holds, row by row: ``out[~labels.isnan()]`` (collective)."""
    with local_tensors():
        mask = _mask_of(x, mask)
        elements = x.as_subclass(Tensor).flatten(0, mask.dim() - 1)
        return _selected(elements, by_row_mask(x._sharding, mask))


def _assign_elements(x: RowTensor, mask: Tensor, value: object) -> None:
    """A number for all elements where a mask of several dimensions holds, or as many as there are (collective)."""
    with local_tensors():
        mask = _mask_of(x, mask)
        rows, _ = by_row_mask(x._sharding, mask)
        num_dims = x.dim() - mask.dim() + 1
        x[mask.as_subclass(Tensor)] = as_operand(Tensor.__setitem__, moved_to(rows, value, _VALUES), rows, num_dims)


def _assign_pairs(x: RowTensor, index: tuple[Any, ...], dim: int, value: Any) -> None:
    """One place of ``dim`` for each listed row, ``scores[users, seen] = -inf``: a number, or values for each."""
    with local_tensors():
        rows, local_index = select_rows(x._sharding, index[0])
    columns = _columns(index[dim], 1 if len(index[dim]) == 1 else rows.size)
    _note_columns(x, [*[_ALL] * (dim - 1), columns])
    with local_tensors():
        columns, value = (
            as_operand(Tensor.__setitem__, moved_to(rows, given, _VALUES), rows, num_dims=num_dims)
            for given, num_dims in ((columns, 1), (value, x.dim() - 1))
        )
        places: Any = (on_device(local_index, x.device), *[_ALL] * (dim - 1), on_device(columns, x.device))
        x[places] = value


def _mask_of(x: RowTensor, mask: Tensor) -> RowTensor:
    """A mask of x's elements, with x's rows; to be called under :data:`local_tensors`."""
    size = mask._sharding.size if isinstance(mask, RowTensor) else mask.shape[0]
    if size != x._sharding.size or x.shape[1 : mask.dim()] != mask.shape[1:]:
        raise IndexError(
            f"Expected a mask of x's elements {[x._sharding.size, *x.shape[1:]]} (got {[size, *mask.shape[1:]]})"
        )
    if not isinstance(mask, RowTensor):
        return as_row_tensor_(x._sharding.slice_alike(mask), x._sharding)
    return moved_to(x._sharding, mask, "Expected a mask")  # type: ignore[no-any-return]


def _one_row(x: RowTensor, position: int) -> Tensor:
    """Row ``position``, a plain tensor equal on every rank; differentiable (collective)."""
    with local_tensors():
        rows, local_index = rows_by_index(x._sharding, host.tensor([position]))
        return rows.reduce_from_ranks(x.index_select(0, on_device(local_index, x.device)).sum(0, dtype=x.dtype))


@implements("__setitem__")
def setitem(function: Function, x: Tensor, index: object, value: object) -> None:
    """Assign to selected rows: a number, a row-free tensor, one row per selected row, or a like selection.

    Into a plain tensor all distributed rows (collective).
    """
    if not isinstance(x, RowTensor):  # it stays plain
        on_full_tensor(function, x, index, value)
        return
    if isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 1:
        _assign_elements(x, index, value)
        return
    paired = _paired_dim(x, index)
    if paired:
        _assign_pairs(x, cast(tuple[Any, ...], index), paired, value)
        return
    first, rest = _split(x, index)
    _note_columns(x, rest)
    if isinstance(first, int):
        if _lists(rest):
            raise refuse(function, "of one row and a list of columns would pair them: assign to x[rows] with a slice")
        first = [first]
        value = value.unsqueeze(0) if isinstance(value, Tensor) and value.dim() == x.dim() - 1 else value
    with local_tensors():
        rows, places = x._sharding, cast(object, _ALL)
        if first is not _ALL:
            rows, local_index = select_rows(rows, first)
            places = on_device(local_index, x.device)
        no_row, index = (slice(0, 0), *rest), (places, *rest)
        x[index] = as_operand(function, moved_to(rows, value, _VALUES), rows, num_dims=x[no_row].dim())


@implements("index_select", "select")
def index_select(function: Function, x: Tensor, dim: int, index: Any, out: Tensor | None = None) -> object:
    """Rows (dimension 0), or columns; by list, or one. Of a plain table into a plain ``out``: all (collective)."""
    (dim,) = dims_of(dim, x.dim())
    if out is not None:
        if isinstance(x, RowTensor) or isinstance(out, RowTensor):
            raise refuse(function, "with 'out' gives plain values of a plain table alone: assign the result")
        return on_full_tensor(function, x, dim, index, out=out)
    if function.__name__ == "index_select" and index.dim() == 0:  # as a list of one
        index = index.view(1)
    is_named = isinstance(index, (PickedRows, RowIndex)) and isinstance(x, NodeTensor)
    if dim == 0 and (is_named or not isinstance(x, RowTensor)):
        return x[index]
    if not isinstance(x, RowTensor) or isinstance(index, RowTensor):
        raise refuse(function, "by a distributed index would mix rows")
    columns = (*[_ALL] * dim, index)
    return x[columns]


TAKES_OUT.add(index_select)


@implements("index_copy", "index_copy_", "index_fill", "index_fill_")
def index_assign(function: Function, x: Tensor, dim: int, index: Tensor, *value: Any, **named: Any) -> object:
    """Overwrite rows (dimension 0) or columns by a list; a plain tensor takes all rows and stays plain (collective)."""
    if not isinstance(x, RowTensor):
        return on_full_tensor(function, x, dim, index, *value, **named)
    if isinstance(index, RowTensor):
        raise refuse(function, "by a distributed index would mix rows")
    out = x if function.__name__.endswith("_") else x.clone()
    if "fill" in function.__name__:  # what a row is given twice has its gradient once
        index = index.unique()
    places: Any = (*[_ALL] * dims_of(dim, x.dim())[0], index)
    (out[places],) = (*value, *named.values())
    return out


@implements("index_put", "index_put_")
def index_put(
    function: Function, x: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False
) -> Tensor:
    """Assign to rows, as ``x[indices] = values``, or add to those of one list (``accumulate``); to a plain table's by
    several, as a confusion matrix counts (collective).
    """
    out, (index, *others) = x if function.__name__.endswith("_") else x.clone(), indices
    if not accumulate:
        out[(index, *others) if others else index] = values
        return out
    lists_only = all(i is not None and i.dim() == 1 and i.dtype != torch.bool for i in indices)
    if others and lists_only and not isinstance(x, RowTensor):
        places: Any = 0
        for dim, (i, size) in enumerate(zip(indices, x.shape, strict=False)):
            if bool(((i < -size) | (i >= size)).any()):  # on any rank, for all add up together
                raise IndexError(f"an index is out of bounds for dimension {dim} with size {size}")
            places = places * size + torch.where(i < 0, i + size, i)
        added = index_put(torch.index_put, x.flatten(0, len(others)), (places,), values, True)
        return out.copy_(added.view_as(out))
    if others or not lists_only:
        raise refuse(function, "with accumulate takes one list of rows: other indices would pair rows with columns")
    if not isinstance(values, RowTensor) and values.shape != (shape := (index.shape[0], *x.shape[1:])):
        values = values.expand(shape)
    return out.index_add_(0, torch.where(index < 0, index + x.shape[0], index), values)


@implements("masked_select")
def masked_select(function: Function, x: Tensor, mask: Tensor) -> Tensor:
    """Elements, row by row."""
    if x.dim() != mask.dim():
        raise refuse(function, "by a mask of other dimensions would mix rows")
    return x[mask]


@implements("nonzero", "argwhere")
def nonzero(function: Function, x: RowTensor, as_tuple: bool = False) -> object:
    """Global ids of what is not zero, in ascending order, a plain tensor equal on every rank (collective)."""
    with local_tensors():
        index = x.nonzero()
        index[:, 0] = on_device(x._sharding.position, x.device)[index[:, 0]]
    everyone = x._sharding.group.gather_rows(index, x._sharding.group.gather_counts(index.shape[0]))
    # One row's entries come from one rank and in order, so a stable sort by row orders them all.
    everyone = everyone[everyone[:, 0].argsort(stable=True)]
    return everyone.unbind(1) if as_tuple else everyone
