"""Functions along a dimension, and joins of rows and columns.

Row-wise along any dimension but that of the rows. Along these, rows can be concatenated and split: no row leaves its
rank. What orders rows, or picks them by an index for each element, gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.autograd.linear_map import append
from pyg_dist.errors import LayoutMismatchError
from pyg_dist.tensor.calling_code import of_whole_graphs
from pyg_dist.tensor.functions.full_tensor import on_full_tensor
from pyg_dist.tensor.functions.moved_rows import (
    MOVED,
    MovedRows,
    as_seen,
    dim_of_rows_first,
    moved_in,
    on_moved,
    refuse_moved,
)
from pyg_dist.tensor.functions.pointwise import aligned, pointwise
from pyg_dist.tensor.functions.shapes import flat_sizes
from pyg_dist.tensor.operands import on_rows
from pyg_dist.tensor.registry import Function, Handler, bind, dims_of, implements, public_name, refuse
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, copied_slice, local_tensors
from pyg_dist.tensor.selection import ConcatenatedRows


def along(
    *names: str, parameters: str = "dim", default: int | None = None, broadcasts: bool = False
) -> Callable[[Handler], Handler]:
    """Register functions along a dimension: within rows torch's own runs, over rows the decorated one.

    ``parameters`` are those behind the tensor, ``default`` is the dimension where none is named; ``None``: all of them,
    or the first. ``broadcasts``: see :func:`~.pointwise.as_operand`. The decorator returns the handler.
    """
    place_of_dim = next(k for k, name in enumerate(parameters.split()) if name in ("dim", "dims"))

    def decorate(over_rows: Handler) -> Handler:
        @implements(*names)
        @wraps(over_rows)
        def of_rows(function: Function, x: object, *args: object, **kwargs: object) -> object:
            dim = args[place_of_dim] if len(args) > place_of_dim else kwargs.get("dim", kwargs.get("dims", default))
            if isinstance(dim, Tensor) or "other" in kwargs:  # `max(x, y)`
                return pointwise(function, x, *args, **kwargs)
            if not isinstance(x, Tensor):
                raise refuse(function, "along dimension 0, or of a plain tensor, would mix rows")
            with local_tensors():
                if 0 not in dims_of(None if isinstance(dim, bool) else dim, x.dim()):  # `std(x, unbiased)`
                    given: tuple[object, ...] = (x, *args)
                    rows = x._sharding if isinstance(x, RowTensor) else None
                    if rows is None or any(isinstance(value, Tensor) for value in (*args, *kwargs.values())):
                        given, kwargs, rows = aligned(function, given, kwargs, broadcasts)
                    return as_row_tensor_(function(*given, **kwargs), rows)
            return over_rows(function, x, *args, **kwargs)

        @MOVED.implements(*names)
        def of_moved(function: Function, x: object, *args: object, **kwargs: object) -> object:
            bound = bind(function, parameters, args, kwargs)
            dim = bound.pop("dim", default)
            if isinstance(dim, Tensor) or "other" in bound:
                return on_moved(function, x, *args, **kwargs)
            if type(x) is not MovedRows or any(isinstance(v, Tensor) for v in bound.values()) or "dims" in bound:
                raise refuse_moved(function, moved_in((x, *args, *kwargs.values()))[0])
            if dim is None or isinstance(dim, bool):
                whole = x.full_tensor() if function.__name__ in ("argmax", "argmin") else x.of  # places count as seen
                return function(whole, *args, **kwargs)
            before = [bound.pop(name) for name in parameters.split()[:place_of_dim] if name in bound]
            dims = dims_of(dim, x.dim())
            if x.place in dims and over_rows is _mixes:
                raise refuse_moved(function, x)
            mapped = [dim_of_rows_first(d, x.place) for d in dims]
            out = function(x.of, *before, dim=mapped if isinstance(dim, (tuple, list)) else mapped[0], **bound)

            def seen(t: Tensor) -> Tensor:
                if t.dim() == x.dim():
                    return MovedRows.make(t, x.place) if isinstance(t, RowTensor) else t.movedim(0, x.place)
                return MovedRows.make(t, x.place - sum(d < x.place for d in dims)) if isinstance(t, RowTensor) else t

            return as_seen(out, seen)

        return of_rows

    return decorate


def _mixes(function: Function, *args: object, **kwargs: object) -> object:
    raise refuse(function, "along dimension 0, or of a plain tensor, would mix rows")


def _of_all(function: Function, *args: object, **kwargs: object) -> object:
    """Gather all rows: the result is plain (collective). Refused to a transform of PyG, which expects rows."""
    return _mixes(function) if of_whole_graphs() else on_full_tensor(function, *args, **kwargs)


def _cut(function: Function, x: RowTensor, *args: object, **kwargs: object) -> object:
    """Pieces of the rows, each picked by a list (collective)."""
    pieces = function(host.arange(x.shape[0]).view(-1, *[1] * (x.dim() - 1)), *args, **kwargs)
    return as_seen(pieces, lambda places: copied_slice(x[places.flatten()]))


along("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp")(_of_all)
along("unbind", default=0)(_of_all)
along("sort", "argsort", parameters="dim descending", default=-1)(_of_all)
along("mode", parameters="dim keepdim", default=-1)(_of_all)
along("topk", parameters="k dim largest sorted", default=-1)(_of_all)
along("kthvalue", parameters="k dim keepdim", default=-1)(_of_all)
along("take_along_dim", parameters="indices dim", broadcasts=True)(_of_all)
along("median", "nanmedian", parameters="dim keepdim")(on_full_tensor)
along("narrow", parameters="dim start length")(_cut)
along("chunk", parameters="chunks dim", default=0)(_cut)
along("split", parameters="split_size dim", default=0)(_cut)
along("tensor_split", parameters="indices_or_sections dim", default=0)(_cut)
along("softmin", "cumsum_", "cumprod_")(_mixes)
along("glu", default=-1)(_mixes)
along("diff", parameters="n dim", default=-1)(_mixes)


@along("gather", parameters="dim index")
def gather(function: Function, x: Tensor, *args: object, **kwargs: object) -> object:
    """From rows, which are gathered (collective), or a plain table: each rank looks up its own rows of the index."""
    if isinstance(x, RowTensor):
        return _of_all(function, x, *args, **kwargs)
    bound = bind(function, "dim index", args, kwargs)
    index = bound.pop("index")
    with local_tensors():
        table = index._sharding.copy_to_ranks(x)
        return on_rows(lambda local: function(table, index=local, **bound), index)


@along("roll", parameters="shifts dims")
def roll(function: Function, x: Tensor, shifts: Any, dims: Any = ()) -> object:
    """Roll rows, which are picked in another order (collective), and columns."""
    if not dims and dims != 0 and x.dim() > 1:
        return _mixes(function)
    places = dims_of(dims or 0, x.dim())
    by = list(zip(shifts if isinstance(shifts, (tuple, list)) else [shifts], places, strict=True))
    rolled: Tensor = x[host.arange(x.shape[0]).roll(sum(n for n, dim in by if dim == 0))]
    columns = [pair for pair in by if pair[1]]
    return on_rows(torch.roll, rolled, *zip(*columns, strict=True)) if columns else rolled


@along("repeat_interleave", parameters="repeats dim", broadcasts=True)
def repeat_interleave(
    function: Function, x: Tensor, repeats: Any = None, dim: int | None = None, **size: int
) -> object:
    """Each row as often as a number says, or a plain tensor's number for it: rows are picked (collective)."""
    if repeats is None or (dim is None and x.dim() > 1) or isinstance(repeats, RowTensor):
        return _mixes(function)
    repeated = repeats.cpu() if isinstance(repeats, Tensor) else repeats
    return x[host.arange(x.shape[0]).repeat_interleave(repeated, **size)]


@along("cosine_similarity", parameters="x2 dim", default=1, broadcasts=True)
def _cosines(function: Function, x: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> object:
    """The similarity of each pair of columns, or of two one-dimensional tensors of rows (collective)."""
    if x.dim() != x2.dim() or x.shape[0] != x2.shape[0]:
        return _mixes(function)
    return (F.normalize(x, dim=0, eps=eps) * F.normalize(x2, dim=0, eps=eps)).sum(0)


@implements("cosine_similarity")
def cosine_similarity(function: Function, x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> object:
    """Row by row, of a query and each row, or column by column; ``dim`` counts in the operand with more dimensions."""
    x1, x2 = (x2, x1) if x1.dim() < x2.dim() else (x1, x2)
    return _cosines(function, x1, x2, dim, eps)


@along("normalize", parameters="p dim eps", default=1)
def normalize(function: Function, x: RowTensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12) -> Tensor:
    """``x / max(norm, eps)`` of each column (collective)."""
    norms: Tensor = torch.linalg.vector_norm(x, p, dim, keepdim=True)
    return x / norms.clamp_min(eps)


_quantile = along("quantile", "nanquantile", parameters="q dim keepdim", broadcasts=True)(on_full_tensor)


@implements("quantile", "nanquantile")
def quantile(
    function: Function, x: Tensor, q: object, dim: int | None = None, keepdim: bool = False, **options: object
) -> object:
    """Within rows, or of all rows; several quantiles at once put their own dimension first, and are plain."""
    if isinstance(q, Tensor) and q.dim() > 0:
        return on_full_tensor(function, x, q, dim, keepdim, **options)
    if isinstance(x, RowTensor) and x._sharding.num_local == 0 and dim is not None and 0 not in dims_of(dim, x.dim()):
        return on_rows(torch.sum, x, dim, keepdim)  # torch refuses; a sum has the same shape, and is differentiable too
    return _quantile(function, x, q, dim, keepdim, **options)


@implements("flip")
def flip(function: Function, x: Tensor, *dims: object, **named: object) -> Tensor:
    """Reverse columns, and rows, which are picked in that order (collective)."""
    given = flat_sizes(dims, named)
    reversed_ = dims_of(given, x.dim()) if given else ()
    if 0 in reversed_:
        x = x[host.arange(x.shape[0] - 1, -1, -1)]
    return on_rows(torch.flip, x, [dim for dim in reversed_ if dim])


@implements("cat", "concat", "concatenate", "hstack", "vstack", "row_stack", "column_stack", "stack")
def join(function: Function, tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate columns, append rows, or stack: if the new dimension is the first one, rows are in the second."""
    tensors = tuple(tensors)
    if function is torch.column_stack:
        tensors = tuple(t.view(-1, 1) if t.dim() < 2 else t for t in tensors)
    elif function is torch.hstack:
        tensors = tuple(t if t.dim() else t.view(1) for t in tensors)
    num_dims = max(t.dim() for t in tensors)
    if function in (torch.hstack, torch.column_stack):
        function, dim = torch.cat, 1 if num_dims > 1 else 0
    stacks = function is torch.stack or (function in (torch.vstack, torch.row_stack) and num_dims < 2)
    if 0 in dims_of(dim, num_dims + (function is torch.stack)):
        if stacks:
            return MovedRows.make(torch.stack(tensors, dim=1), 1)
        if function in (torch.vstack, torch.row_stack):
            if any(isinstance(t, RowTensor) and t.dim() < 2 for t in tensors):
                raise refuse(function, "of a vector and a matrix would make one row of all rows")
            tensors = tuple(t.view(1, -1) if t.dim() < 2 else t for t in tensors)
        return _append(function, tensors)
    with local_tensors():
        tensors, _, rows = aligned(function, tensors, {}, broadcasts=False)
        joined: Tensor = function(tensors, dim)
        return as_row_tensor_(joined, rows)


def _append(function: Function, tensors: tuple[Tensor, ...]) -> RowTensor:
    """Concatenated rows (collective at the first use of a mask's rows); plain tensors are split into blocks."""
    with local_tensors():
        first = next(t for t in tensors if isinstance(t, RowTensor))
        # torch ignores flat empty tensors, too
        tensors = tuple(t for t in tensors if isinstance(t, RowTensor) or t.shape != (0,) or first.dim() == 1)
        parts = tuple(
            t._sharding if isinstance(t, RowTensor) else first._sharding.block_sharding(t.shape[0]) for t in tensors
        )
        for part in parts:
            is_mixed = part.kind != first.kind and not (part.is_indexed or first._sharding.is_indexed)
            if part.group is not first._sharding.group or is_mixed:
                raise LayoutMismatchError(
                    f"{public_name(function)} along dimension 0 expected rows of one kind over the same ranks "
                    f"(got {first._sharding} and {part}): use .full_tensor() on them"
                )
        local = [
            t.as_subclass(Tensor) if isinstance(t, RowTensor) else part.slice(t)
            for t, part in zip(tensors, parts, strict=True)
        ]
        return as_row_tensor_(append(local), parts[0] if len(parts) == 1 else ConcatenatedRows(parts))


@implements("one_hot")
def one_hot(function: Function, x: Tensor, num_classes: int = -1) -> Tensor:
    """One column per class; without ``num_classes`` it is the global maximum plus one (collective)."""
    return on_rows(function, x, int(x.max()) + 1 if num_classes == -1 else num_classes)


@implements("pad")
def pad(function: Function, x: Tensor, pad: Sequence[int], *args: object, **kwargs: object) -> Tensor:
    """Pad within rows."""
    if len(pad) // 2 >= x.dim():
        raise refuse(function, "of dimension 0 would add rows")

    def padded(local: Tensor) -> Tensor:
        rows = local if local.shape[0] else torch.cat([local, local.new_zeros(1, *local.shape[1:])])  # torch wants one
        out: Tensor = function(rows, pad, *args, **kwargs)
        return out if local.shape[0] else out[:0]

    return on_rows(padded, x)


@implements("pairwise_distance")
def pairwise_distance(function: Function, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """One number per pair of rows."""
    if x.dim() < 2:
        raise refuse(function, "of one dimension would mix rows")
    return pointwise(function, x, *args, **kwargs)
