"""Global shapes, and the functions that change shapes or work along a dimension without touching dimension 0."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from pyg_dist.errors import MixedRowsError
from pyg_dist.tensor.pointwise import aligned
from pyg_dist.tensor.row_tensor import LOCALLY, RowTensor, require_rows_first, wrap
from pyg_dist.tensor.table import Function, handles, public_name


def global_shape(x: RowTensor) -> torch.Size:
    """The shape of the whole tensor."""
    with LOCALLY():
        return torch.Size((x._rows.size, *x.shape[1:]))


def refuse(function: Function, what: str) -> MixedRowsError:
    """The error for a call that would take rows out of dimension 0."""
    return MixedRowsError(
        f"{public_name(function)} {what}: rows are distributed and stay in dimension 0; use .full_tensor() first"
    )


@handles("shape.__get__", "size")
def shape(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Global shape, or one dimension of it."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    whole = global_shape(args[0])
    return whole if dim is None else whole[dim]


@handles("numel", "nelement")
def numel(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Global number of elements."""
    return prod(global_shape(args[0]))


@handles("__len__")
def length(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Global number of rows."""
    return args[0]._rows.size


@handles(
    "dim", "ndim.__get__", "ndimension", "dtype.__get__", "device.__get__", "layout.__get__", "is_cuda.__get__",
    "requires_grad.__get__", "requires_grad.__set__", "is_leaf.__get__", "grad_fn.__get__", "_version.__get__",
    "is_sparse.__get__", "is_quantized.__get__", "is_meta.__get__", "is_cpu.__get__", "is_mkldnn.__get__",
    "is_nested.__get__", "is_xla.__get__", "is_mps.__get__", "is_sparse_csr.__get__",
    "output_nr.__get__", "itemsize.__get__", "retains_grad.__get__", "_backward_hooks.__get__", "_backward_hooks.__set__",
    "is_floating_point", "is_complex", "is_conj", "is_neg", "is_signed", "is_contiguous", "is_inference", "element_size",
    "get_device", "is_pinned", "is_shared", "retain_grad", "is_set_to", "__hash__", "_is_view",
    "__dir__", "is_tensor", "stride", "data_ptr",
)  # fmt: skip
def metadata(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the local tensor and the global one have in common."""
    with LOCALLY():
        return function(*args, **kwargs)


def resized(function: Function, x: RowTensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The local shape for the global ``shape``, which must keep rows whole; one entry may be -1."""
    with LOCALLY():
        per_row, local_rows = prod(x.shape[1:]), x.shape[0]
    first, rest = (shape[0], list(shape[1:])) if shape else (None, [])
    if -1 in rest and first == x._rows.size:
        known = prod(n for n in rest if n != -1)
        if known and per_row % known == 0:
            rest[rest.index(-1)] = per_row // known
    if first not in (-1, x._rows.size) or prod(rest) != per_row or -1 in rest:
        raise refuse(function, f"of shape {list(global_shape(x))} to {list(shape)} would not keep rows whole")
    return (local_rows, *rest)


def flat_sizes(args: tuple[Any, ...]) -> tuple[int, ...]:
    """``f(x, 2, 3)`` and ``f(x, (2, 3))`` alike."""
    return tuple(args[0]) if len(args) == 1 and isinstance(args[0], (tuple, list)) else tuple(args)


@handles("view", "reshape")
def view(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape each row."""
    sizes = flat_sizes(args[1:] or tuple(kwargs.values()))
    if sizes and isinstance(sizes[0], torch.dtype):
        raise refuse(function, "as another dtype is not distributed")
    return _local(function, args[0], resized(function, args[0], sizes))


@handles("view_as", "reshape_as")
def view_as(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reshape each row as another tensor's."""
    return args[0].reshape(tuple(args[1].shape))


@handles("expand")
def expand(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Expand within rows."""
    sizes = flat_sizes(args[1:] or tuple(kwargs.values()))
    x = args[0]
    if len(sizes) != x.dim() or sizes[0] not in (-1, x._rows.size):
        raise refuse(function, f"of shape {list(x.shape)} to {list(sizes)} would move rows")
    return _local(function, x, -1, *sizes[1:])


@handles("expand_as")
def expand_as(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Expand within rows."""
    return args[0].expand(tuple(args[1].shape))


@handles("repeat")
def repeat(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeat within rows."""
    sizes = flat_sizes(args[1:] or tuple(kwargs.values()))
    if len(sizes) != args[0].dim() or sizes[0] != 1:
        raise refuse(function, f"by {list(sizes)} would repeat or move rows")
    return _local(function, args[0], *sizes)


@handles("squeeze")
def squeeze(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Drop dimensions of size one, never the rows (also where there is but one row)."""
    x = args[0]
    with LOCALLY():
        dims = args[1] if len(args) > 1 else kwargs.get("dim", tuple(range(1, x.dim())))
        dims = tuple(d % x.dim() for d in ([dims] if isinstance(dims, int) else dims))
        if 0 in dims and x._rows.size == 1:
            raise refuse(function, "would drop the dimension of the rows")
        return wrap(x.squeeze(tuple(d for d in dims if d)), x._rows)


@handles("unsqueeze")
def unsqueeze(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Add a dimension within rows."""
    dim = args[1] if len(args) > 1 else kwargs["dim"]
    if dim % (args[0].dim() + 1) == 0:
        raise refuse(function, f"at {dim} would move rows out of dimension 0")
    return _local(function, args[0], dim)


@handles("flatten")
def flatten(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Flatten within rows."""
    x = args[0]
    start = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    end = args[2] if len(args) > 2 else kwargs.get("end_dim", -1)
    if start % x.dim() == 0 and end % x.dim() != 0:
        whole = global_shape(x)
        if prod(whole[1 : end % x.dim() + 1]) != 1:
            raise refuse(function, "from dimension 0 would mix rows")
    return _local(function, x, start, end)


@handles("unflatten")
def unflatten(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Unflatten within rows."""
    x, dim, sizes = args[0], *(*args[1:], *kwargs.values())
    if dim % x.dim() == 0:
        raise refuse(function, "of dimension 0 would mix rows")
    return _local(function, x, dim, sizes)


@handles("transpose", "swapaxes", "swapdims")
def transpose(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Swap dimensions within rows."""
    x, *dims = (*args, *kwargs.values())
    if 0 in [d % x.dim() for d in dims] and dims[0] % x.dim() != dims[1] % x.dim():
        raise refuse(function, f"of dimensions {dims[0]} and {dims[1]} would move rows")
    return _local(function, x, *dims)


@handles("permute")
def permute(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Permute dimensions within rows."""
    dims = flat_sizes(args[1:] or tuple(kwargs.values()))
    if dims[0] % args[0].dim() != 0:
        raise refuse(function, f"to {list(dims)} would move rows")
    return _local(torch.permute, args[0], dims)


@handles("cat", "concat", "concatenate", "hstack")
def cat(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate columns."""
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    num_dims = tensors[0].dim()
    if function is torch.hstack:
        dim = 1 if num_dims > 1 else 0
    if dim % num_dims == 0:
        raise refuse(function, "along dimension 0 would append rows")
    with LOCALLY():
        (tensors,), _, rows = aligned(function, (tensors,), {})
        return wrap(torch.cat(tensors, dim), rows)


@handles("stack")
def stack(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Stack along a new dimension within rows."""
    tensors = list(args[0] if args else kwargs["tensors"])
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if dim % (tensors[0].dim() + 1) == 0:
        raise refuse(function, "along dimension 0 would move rows")
    with LOCALLY():
        (tensors,), _, rows = aligned(function, (tensors,), {})
        return wrap(torch.stack(tensors, dim), rows)


@handles("one_hot")
def one_hot(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One column per class; without ``num_classes`` it is the global maximum plus one (collective)."""
    x = args[0]
    num_classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
    if num_classes == -1:
        num_classes = int(x.max()) + 1
    return _local(function, x, num_classes)


@handles("pad")
def pad(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Pad within rows."""
    x, padding = args[0], args[1] if len(args) > 1 else kwargs["pad"]
    if len(padding) // 2 >= x.dim():
        raise refuse(function, "of dimension 0 would add rows")
    with LOCALLY():
        return wrap(function(*args, **kwargs), x._rows)


# function: (position of `dim`, its default). None: torch's default would be dimension 0 or a flattened tensor.
_ALONG = {
    "softmin": (1, None), "cumsum": (1, None), "cumprod": (1, None),
    "cummax": (1, None), "cummin": (1, None), "logcumsumexp": (1, None), "sort": (1, -1), "argsort": (1, -1),
    "topk": (2, -1), "kthvalue": (2, -1), "mode": (1, -1), "glu": (1, -1), "flip": (1, None), "roll": (2, None),
    "gather": (1, None), "take_along_dim": (2, None), "scatter": (1, None), "scatter_add": (1, None),
    "narrow": (1, None), "unbind": (1, 0), "chunk": (2, 0), "split": (2, 0), "tensor_split": (2, 0),
    "diff": (2, -1), "cosine_similarity": (2, 1), "renorm": (2, None), "hsplit": (99, 1), "repeat_interleave": (2, None),
}  # fmt: skip


@handles(*_ALONG)
def along(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Functions along one dimension: row-wise along any but 0."""
    x = args[0]
    position, default = _ALONG[function.__name__]
    dim = args[position] if len(args) > position else kwargs.get("dim", kwargs.get("dims", default))
    dims = dim if isinstance(dim, (tuple, list)) else [dim]
    if not isinstance(x, RowTensor) or any(d is None or d % x.dim() == 0 for d in dims):
        raise refuse(function, "along dimension 0 would mix rows")
    with LOCALLY():
        args, kwargs, rows = aligned(function, args, kwargs)
        return wrap(function(*args, **kwargs), rows)


@handles("normalize")
def normalize(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x / max(norm, eps)``: of each row, or, along dimension 0, of each column (collective)."""
    x, p, dim, eps = [*args, *[2.0, 1, 1e-12][len(args) - 1 :]][:4]
    p, dim, eps = kwargs.get("p", p), kwargs.get("dim", dim), kwargs.get("eps", eps)
    if dim % x.dim() != 0:
        return _local(function, x, p, dim, eps)
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


@handles("pairwise_distance")
def row_pairs(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One number per pair of rows."""
    with LOCALLY():
        args, kwargs, rows = aligned(function, args, kwargs)
        return wrap(function(*args, **kwargs), rows)


def _local(function: Function, x: Tensor, *args: Any) -> Any:
    require_rows_first(function, (x, *args))
    with LOCALLY():
        return wrap(function(x, *args), x._rows)  # type: ignore[attr-defined]
