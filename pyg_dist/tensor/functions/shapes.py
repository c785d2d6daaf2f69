"""Global shapes and other metadata, with no communication, and changes of shape that keep rows whole or split them.

A row of k times F elements may become k rows, which stay on its rank, and these may become one row again. Rows may be
in any dimension (:mod:`~.moved_rows`), and other dimensions are changed before and behind theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.functions.moved_rows import (
    MOVED,
    MovedRows,
    dim_of_rows_first,
    implements_anywhere,
    refuse_moved,
    rows_and_place,
)
from pyg_dist.tensor.operands import moved_to, on_rows
from pyg_dist.tensor.registry import Function, dims_of, implements, public_name, refuse
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, global_shape, local_tensors
from pyg_dist.tensor.selection import ConcatenatedRows, elements_of
from pyg_dist.tensor.sharding import RowSharding


@implements("shape.__get__", "size")
def shape(function: Function, x: RowTensor, dim: int | None = None) -> object:
    """Global shape, or one dimension of it."""
    whole = global_shape(x)
    return whole if dim is None else whole[dim]


@implements("numel")
def numel(function: Function, x: RowTensor) -> int:
    """Global number of elements."""
    return prod(global_shape(x))


@implements("nbytes.__get__")
def num_bytes(function: Function, x: RowTensor) -> int:
    """Global size in bytes."""
    return x.numel() * x.element_size()


@implements("__len__")
def length(function: Function, x: RowTensor) -> int:
    """Global number of rows."""
    return x._sharding.size


@implements(
    "dim", "ndim.__get__", "ndimension", "dtype.__get__", "device.__get__", "layout.__get__", "is_cuda.__get__",
    "requires_grad.__get__", "requires_grad.__set__", "is_leaf.__get__", "grad_fn.__get__", "_version.__get__",
    "is_sparse.__get__", "is_quantized.__get__", "is_meta.__get__", "is_cpu.__get__", "is_mkldnn.__get__",
    "is_nested.__get__", "is_xla.__get__", "is_mps.__get__", "is_sparse_csr.__get__", "output_nr.__get__",
    "itemsize.__get__", "retains_grad.__get__", "_backward_hooks.__get__", "_backward_hooks.__set__",
    "is_floating_point", "is_complex", "is_conj", "is_neg", "is_signed", "is_contiguous", "is_inference",
    "is_xpu.__get__", "_has_compatible_shallow_copy_type", "element_size", "get_device", "is_pinned", "is_shared",
    "is_set_to", "__hash__", "__dir__", "stride", "data_ptr",
)  # fmt: skip
def metadata(function: Function, *args: object, **kwargs: object) -> Any:
    """Properties that the local tensor and the global one share."""
    with local_tensors():
        return function(*args, **kwargs)


def flat_sizes(sizes: tuple[object, ...], named: dict[str, object]) -> tuple[Any, ...]:
    """The sizes or dimensions of ``f(x, 2, 3)``, ``f(x, (2, 3))`` and ``f(x, size=(2, 3))``."""
    sizes = (*sizes, *named.values())
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes


def _refuse(function: Function, x: Tensor, what: str) -> MixedRowsError:
    return refuse_moved(function, x) if isinstance(x, MovedRows) else refuse(function, what)


@implements("view", "reshape")
def view(function: Function, x: RowTensor, *sizes: Any, **named: object) -> Tensor:
    """Reshape each row, or split each into several, or put those together that were one.

    Dimensions of size one may also come before the rows. Rows of a list are moved by position, where several become
    one (collective).
    """
    sizes = flat_sizes(sizes, named)
    if sizes and isinstance(sizes[0], torch.dtype):
        raise refuse(function, "as another dtype is not distributed")
    batch = _as_batch(x, sizes) if isinstance(x._sharding, ConcatenatedRows) else None
    if batch is not None:
        return batch
    whole = _sizes(x, sizes)
    place = next((k for k, size in enumerate(whole) if size != 1), 0)
    if place > 0 and whole[place] == x.shape[0]:
        return MovedRows.make(x.reshape(-1, *[1] * place, *whole[place + 1 :]), place)
    width = x.shape[0] // max(whole[0], 1) if whole else 0
    if width > 1 and x._sharding.derives_from_index and whole[0] * width == x.shape[0] and prod(whole) == x.numel():
        rows = x._sharding.block_sharding(whole[0])
        with local_tensors():
            local: Tensor = moved_to(elements_of(rows, width), x, f"{public_name(function)} expected rows")
            return as_row_tensor_(local.reshape(rows.num_local, *whole[1:]), rows)
    rows, per_row = _reshaped(function, x, sizes)
    with local_tensors():
        return as_row_tensor_(function(x, (rows.num_local, *per_row)), rows)


def _reshaped(function: Function, x: RowTensor, sizes: tuple[int, ...]) -> tuple[RowSharding, tuple[int, ...]]:
    """The rows and their shape that the global ``sizes`` stand for; one of these may be -1."""
    whole, sizes = global_shape(x), (*sizes,)
    numel = prod(whole)
    known = prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known > 0 and numel % known == 0:
        place = sizes.index(-1)
        sizes = (*sizes[:place], numel // known, *sizes[place + 1 :])
    first, *per_row = sizes or (None,)
    if -1 not in per_row:
        if first in (-1, whole[0]) and prod(per_row) == prod(whole[1:]):
            return x._sharding, (*per_row,)
        rows, num_parts = x._sharding.undivided
        width, rest = divmod(num_parts * prod(whole[1:]), max(prod(per_row), 1))
        if first == rows.size * width and rest == 0 < width:
            return elements_of(rows, width), (*per_row,)
    raise refuse(function, f"of shape {list(whole)} to {list(sizes)} would not keep rows whole")


def _as_batch(x: RowTensor, sizes: tuple[Any, ...]) -> Tensor | None:
    """``[B, N, F]`` again, if :func:`_view_moved` has made ``[B N, F]`` of it; else ``None``."""
    parts: tuple[RowSharding, ...] = x._sharding.parts  # type: ignore[attr-defined]
    rows, whole = parts[0], _sizes(x, sizes)
    place = next((k for k in range(1, len(whole)) if (prod(whole[:k]), whole[k]) == (len(parts), rows.size)), None)
    if place is None or any(part is not rows for part in parts):
        return None
    with local_tensors():
        of = x.reshape(len(parts), rows.num_local, *x.shape[1:]).movedim(0, 1)
        of = as_row_tensor_(of.reshape(rows.num_local, *whole[:place], *whole[place + 1 :]), rows)
        return MovedRows.make(of, place)


def _sizes(x: Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes that a shape of ``x`` stands for, one of which may be -1."""
    known = prod(size for size in sizes if size != -1)
    return tuple(x.numel() // max(known, 1) if size == -1 else size for size in sizes)


@MOVED.implements("view", "reshape")
def _view_moved(function: Function, x: MovedRows, *sizes: object, **named: object) -> Tensor:
    """Reshape dimensions before the rows, and those behind; ``[B, N, F]`` may become ``[B N, F]``."""
    sizes = _sizes(x, flat_sizes(sizes, named))
    before, behind = prod(x.shape[: x.place]), prod(x.shape[x.place + 1 :])
    for place, size in enumerate(sizes):
        if (prod(sizes[:place]), size, prod(sizes[place + 1 :])) == (before, x.shape[x.place], behind):
            return MovedRows.make(x.of.reshape(size, *sizes[:place], *sizes[place + 1 :]), place)
    if (sizes[0], prod(sizes[1:])) == (before * x.shape[x.place], behind):
        of = x.of.reshape(x.of.shape[0], before, *sizes[1:])
        return torch.cat([of[:, k] for k in range(before)])
    raise refuse_moved(function, x)


@implements("new")
def new_of_shape(function: Function, x: RowTensor, *sizes: Any, **named: Any) -> Tensor:
    """Uninitialised rows beside x's, which ``torch.distributions`` fills; of another number of rows a plain tensor."""
    sizes = flat_sizes(sizes, named)
    if not sizes or not all(isinstance(size, int) for size in sizes):
        raise refuse(function, "of values makes no rows")
    with local_tensors():
        if sizes[0] != x._sharding.size:
            return x.new_empty(sizes)
        return as_row_tensor_(x.new_empty((x._sharding.num_local, *sizes[1:])), x._sharding)


@implements_anywhere("view_as", "reshape_as", "expand_as")
def as_other(function: Function, x: Tensor, other: Tensor) -> object:
    """Reshape or expand each row to the shape of another tensor's."""
    return getattr(x, function.__name__.removesuffix("_as"))(tuple(other.shape))


@implements_anywhere("expand", "broadcast_to", "repeat")
def expand(function: Function, x: Tensor, *sizes: object, **named: object) -> Tensor:
    """Expand or repeat other dimensions than the rows'; new ones may come before rows that are not first.

    A single row, such as ``x[index]``, may become many, which are plain (collective).
    """
    (of, place), sizes, repeats = rows_and_place(x), flat_sizes(sizes, named), function.__name__ == "repeat"
    new, keeps = len(sizes) - x.dim(), (1,) if repeats else (-1, of._sharding.size)
    place += new
    if new < 0 or (new > 0 and of is x) or sizes[place] not in keeps:
        if of._sharding.size == 1:
            return function(x.full_tensor(), *sizes)  # type: ignore[attr-defined,no-any-return]
        what = f"by {list(sizes)} would repeat or move rows" if repeats else f"to {list(sizes)} would move rows"
        raise _refuse(function, x, what if repeats else f"of shape {list(x.shape)} {what}")
    rows = of.reshape(of.shape[0], *[1] * new, *of.shape[1:]) if new else of
    sizes = (keeps[0], *sizes[:place], *sizes[place + 1 :])
    return MovedRows.make(on_rows(Tensor.repeat if repeats else Tensor.expand, rows, *sizes), place)


@implements_anywhere("squeeze")
def squeeze(function: Function, x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Drop dimensions of size one; that of a single row where it is named: a plain row (collective)."""
    (of, place), shape = rows_and_place(x), x.shape
    dims = dims_of(dim, len(shape))
    if dim is not None and place in dims and of._sharding.size == 1:
        return x.full_tensor().squeeze(dim)  # type: ignore[attr-defined,no-any-return]
    dropped = [d for d in dims if d != place and shape[d] == 1]
    out = on_rows(torch.squeeze, of, tuple(dim_of_rows_first(d, place) for d in dropped))
    return MovedRows.make(out, place - sum(d < place for d in dropped))


@implements_anywhere("unsqueeze")
def unsqueeze(function: Function, x: Tensor, dim: int) -> Tensor:
    """Add a dimension within rows, or before them."""
    (of, place), (dim,) = rows_and_place(x), dims_of(dim, x.dim() + 1)
    return MovedRows.make(on_rows(torch.unsqueeze, of, dim if dim > place else dim + 1), place + (dim <= place))


@implements_anywhere("flatten")
@implements("ravel")
def flatten(function: Function, x: Tensor, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Flatten dimensions, those of the rows among them."""
    (of, place), (start, end) = rows_and_place(x), dims_of((start_dim, end_dim), x.dim())
    if start > place:
        return MovedRows.make(on_rows(torch.flatten, of, start, end), place)
    whole = x.shape
    return x.reshape(*whole[:start], prod(whole[start : end + 1]), *whole[end + 1 :])


@implements("unflatten")
def unflatten(function: Function, x: RowTensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Unflatten a dimension; of rows, those that were split before."""
    if 0 in dims_of(dim, x.dim()):
        return x.reshape(*sizes, *x.shape[1:])
    return on_rows(function, x, dim, sizes)


def permuted(x: Tensor, order: Sequence[int]) -> Tensor:
    """``x.permute(order)``."""
    of, place = rows_and_place(x)
    dims = [dim_of_rows_first(d, place) for d in order]
    rest = [d for d in dims if d]
    return MovedRows.make(of if rest == sorted(rest) else on_rows(torch.permute, of, [0, *rest]), dims.index(0))


@lru_cache(maxsize=256)
def _order(function: Function, num_dims: int, args: tuple[object, ...], kwargs: tuple[tuple[str, object], ...]) -> Any:
    """The order in which a function puts dimensions, found by a trial tensor whose sizes all differ."""
    with local_tensors():
        seen = function(torch.empty(*range(1, num_dims + 1), device="meta"), *args, **dict(kwargs))
    return [size - 1 for size in seen.shape]


@implements_anywhere(
    "permute", "movedim", "moveaxis", "transpose", "swapaxes", "swapdims", "mT.__get__", "T.__get__", "t", "H.__get__",
    "mH.__get__",
)  # fmt: skip
def permute(function: Function, x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Dimensions in another order; rows may be any of them."""
    given = tuple(tuple(a) if isinstance(a, list) else a for a in args)
    named = tuple((name, tuple(a) if isinstance(a, list) else a) for name, a in kwargs.items())
    return permuted(x, _order(function, x.dim(), given, named))
