"""Operands of functions of rows, brought to the rows of the first one."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from pyg_dist.backend.comm.checks import replicas
from pyg_dist.backend.comm.checks.noted import Settings, digest_of_words
from pyg_dist.errors import LayoutMismatchError, MixedRowsError
from pyg_dist.tensor.registry import Function, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors, version_of
from pyg_dist.tensor.selection import Selection, elements_of, rows_by_mask, rows_by_places
from pyg_dist.tensor.sharding import RowSharding


def on_rows(function: Function, x: object, *args: object, **kwargs: object) -> Tensor:
    """``function(x, ...)`` on the local rows of x, where no other argument is a tensor; the result has x's rows."""
    if not isinstance(x, RowTensor):
        raise MixedRowsError(
            f"{public_name(function)} expects the distributed tensor as its first operand and plain arguments "
            f"elsewhere: use .full_tensor() on the others"
        )
    with local_tensors():
        return as_row_tensor_(function(x, *args, **kwargs), x._sharding)


def like_rows(function: Function, *operands: object) -> tuple[tuple[Any, ...], RowSharding]:
    """The operands, with all row tensors distributed as the first one is, and their rows; under :data:`local_tensors`.

    Collective where two masks, or lists, made the rows.
    """
    rows: RowSharding | None = None
    like = list(operands)
    for k, operand in enumerate(operands):
        if isinstance(operand, RowTensor):
            if rows is None:
                rows = operand._sharding
            elif operand._sharding is not rows:
                like[k] = moved_to(rows, operand, f"{public_name(function)} expected operands")
        elif rows is not None and isinstance(operand, (tuple, list)):  # the states of a recurrent cell
            what = f"{public_name(function)} expected operands"
            like[k] = type(operand)(moved_to(rows, item, what) for item in operand)
    assert rows is not None, "a handler is called only for row tensors"
    return tuple(like), rows


def moved_to(rows: RowSharding, operand: object, what: str) -> Any:
    """``operand`` with these ``rows``, matched by position; itself where it has none. Under :data:`local_tensors`.

    Errors begin with ``what``.
    """
    if not isinstance(operand, RowTensor) or rows.is_equivalent(operand._sharding):
        return operand
    local = rows.from_sharding(operand.as_subclass(Tensor), operand._sharding)
    if local is None:
        raise LayoutMismatchError(
            f"{what} with the same rows (got {rows} and {operand._sharding}, of another graph or selection): select "
            f"both alike, or use .full_tensor()"
        )
    return as_row_tensor_(local, rows)


def by_row_mask(rows: RowSharding, mask: RowTensor) -> Selection:
    """The rows where ``mask`` holds; kept with the mask while it does not change (collective at its first use).

    A mask with columns selects elements of rows with as many columns. A mask over other rows is matched by position
    where one of the two was selected by a list, as pairs are by a mask over their edges.
    """
    if mask._attribute and rows.group.size > 1:  # a loop over a set of names has an order of its own on each rank
        replicas.noted().note(_mask_of(mask._attribute))
    with local_tensors():
        version, known = version_of(mask), mask._selection
        if known is not None and known[0] == version and known[1] is rows:
            return known[2]
        local = moved_to(rows, mask, "Expected a mask").as_subclass(Tensor)
        # Counting is collective; a mask is used for outputs and labels alike, every epoch.
        whole = rows if mask.dim() == 1 else elements_of(rows, mask[:0].flatten(1).shape[1])
        places = mask._places
        if version is not None and places is not None and places[0] == version and whole is mask._sharding:
            selection = rows_by_places(whole, places[1], local.device)
        else:
            selection = rows_by_mask(whole, local.flatten())
        mask._selection = None if version is None else (version, rows, selection)
    return selection


@cache
def _mask_of(name: str) -> Settings:
    """The name of a mask, as ranks compare it."""
    return Settings("mask", digest_of_words(name), lambda: {"": name})


def local_values(values: Tensor, rows: RowSharding) -> Tensor:
    """This rank's part of a value per edge: an edge tensor, or a plain ``[E, ...]`` tensor.

    Collective where an edge tensor has other rows: if one of the two was selected by a list, positions match.
    """
    if isinstance(values, RowTensor):
        local = rows.from_sharding(values.to_local(), values._sharding)
        if local is not None:
            return local
    elif values.shape[:1] == (rows.size,):
        return rows.slice(values)
    raise LayoutMismatchError(
        f"Expected a value for each of {rows} (got {described(values)}): pass an edge attribute of the same "
        f"DistributedData"
    )


def described(values: Tensor) -> str:
    """The class and shape of a tensor that was given for the rows of a graph; for errors."""
    of = " of another graph or selection" if isinstance(values, RowTensor) else ""
    return f"{type(values).__name__} of shape {list(values.shape)}{of}"
