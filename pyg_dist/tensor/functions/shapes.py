"""Global shapes and other metadata, with no communication, and changes of shape that keep rows whole or split them.

A row of k times F elements may become k rows, which stay on its rank, and these may become one row again.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.registry import Args, Function, Kwargs, bind, implements, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors, on_rows
from pyg_dist.tensor.selection import elements_of
from pyg_dist.tensor.sharding import RowSharding


def global_shape(x: RowTensor) -> torch.Size:
    """The shape of the whole tensor."""
    with local_tensors():
        return x._sharding.global_shape(x.shape)


def dims_of(dim: object, num_dims: int) -> tuple[int, ...]:
    """``dim`` as non-negative dimensions; ``None`` and ``()`` stand for all, as in torch."""
    if dim is None or dim == () or dim == []:
        return tuple(range(num_dims))
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    for d in dims:
        if not -num_dims <= d < num_dims:
            raise IndexError(f"Dimension out of range (expected to be in [{-num_dims}, {num_dims - 1}], but got {d})")
    return tuple(d % num_dims for d in dims)


def refuse(function: Function, what: str) -> MixedRowsError:
    """The error for a call that would take rows out of dimension 0."""
    return MixedRowsError(
        f"{public_name(function)} {what}: rows are distributed and stay in dimension 0; use .full_tensor() first"
    )


@implements("shape.__get__", "size")
def shape(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Global shape, or one dimension of it."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    whole = global_shape(args[0])
    return whole if dim is None else whole[dim]


@implements("numel")
def numel(function: Function, args: Args, kwargs: Kwargs) -> int:
    """Global number of elements."""
    return prod(global_shape(args[0]))


@implements("nbytes.__get__")
def num_bytes(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Global size in bytes."""
    return numel(function, args, kwargs) * args[0].element_size()


@implements("__len__")
def length(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Global number of rows."""
    return args[0]._sharding.size


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
def metadata(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """What the local tensor and the global one have in common."""
    with local_tensors():
        return function(*args, **kwargs)


def flat_sizes(args: Args, kwargs: Kwargs) -> tuple[Any, ...]:
    """The sizes or dimensions of ``f(x, 2, 3)``, ``f(x, (2, 3))`` and ``f(x, size=(2, 3))``."""
    sizes = (*args[1:], *kwargs.values())
    return tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes


def view(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Reshape each row, or split each into several, or put those together that were one."""
    x, sizes = args[0], flat_sizes(args, kwargs)
    if sizes and isinstance(sizes[0], torch.dtype):
        raise refuse(function, "as another dtype is not distributed")
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


@implements("new")
def new_of_shape(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Uninitialised rows beside x's, which ``torch.distributions`` fills; of another number of rows a plain tensor."""
    x, sizes = args[0], flat_sizes(args, kwargs)
    if not sizes or not all(isinstance(size, int) for size in sizes):
        raise refuse(function, "of values makes no rows")
    with local_tensors():
        if sizes[0] != x._sharding.size:
            return x.new_empty(sizes)
        return as_row_tensor_(x.new_empty((x._sharding.num_local, *sizes[1:])), x._sharding)


@implements("view_as", "reshape_as", "expand_as")
def as_other(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Reshape or expand each row to the shape of another tensor's."""
    x, other = (*args, *kwargs.values())
    return getattr(x, function.__name__.removesuffix("_as"))(tuple(other.shape))


@implements("expand", "broadcast_to")
def expand(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Expand within rows."""
    x, sizes = args[0], flat_sizes(args, kwargs)
    if len(sizes) != x.dim() or sizes[0] not in (-1, x._sharding.size):
        raise refuse(function, f"of shape {list(x.shape)} to {list(sizes)} would move rows")
    return on_rows(Tensor.expand, x, -1, *sizes[1:])


@implements("repeat")
def repeat(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Repeat within rows."""
    sizes = flat_sizes(args, kwargs)
    if len(sizes) != args[0].dim() or sizes[0] != 1:
        raise refuse(function, f"by {list(sizes)} would repeat or move rows")
    return on_rows(function, args[0], *sizes)


@implements("squeeze")
def squeeze(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Drop dimensions of size one. Rows stay a dimension, also where there is but one and no dimension is named."""
    x, dim = args[0], bind("x dim", args, kwargs).get("dim")
    dims = dims_of(dim, x.dim())
    if dim is not None and 0 in dims and x._sharding.size == 1:
        raise refuse(function, "would drop the dimension of the rows")
    return on_rows(torch.squeeze, x, tuple(d for d in dims if d))


@implements("flatten", "ravel")
def flatten(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Flatten dimensions, those of the rows among them."""
    x, bound = args[0], bind("x start_dim end_dim", args, kwargs)
    start, end = dims_of((bound.get("start_dim", 0), bound.get("end_dim", -1)), x.dim())
    if start > 0:
        return on_rows(torch.flatten, x, start, end)
    whole = global_shape(x)
    return x.reshape(prod(whole[: end + 1]), *whole[end + 1 :])


@implements("unflatten")
def unflatten(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Unflatten a dimension; of rows, those that were split before."""
    bound = bind("x dim sizes", args, kwargs)
    x, dim, sizes = args[0], bound["dim"], bound["sizes"]
    if 0 in dims_of(dim, x.dim()):
        return x.reshape(*sizes, *global_shape(x)[1:])
    return on_rows(function, x, dim, sizes)
