"""Functions along a dimension, and joins of rows and columns.

Row-wise along any dimension but 0. Along dimension 0 rows can be concatenated and split: no row leaves its rank. What
orders rows, or picks them by an index for each element, gathers them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pyg_dist.backend.autograd.linear_map import append
from pyg_dist.errors import LayoutMismatchError
from pyg_dist.tensor.calling_code import of_whole_graphs
from pyg_dist.tensor.functions.full_tensor import on_full_tensor
from pyg_dist.tensor.functions.moved_rows import MovedRows
from pyg_dist.tensor.functions.pointwise import aligned, pointwise
from pyg_dist.tensor.functions.shapes import dims_of, flat_sizes, refuse
from pyg_dist.tensor.registry import Args, Function, Kwargs, bind, implements, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, copied_slice, local_tensors, on_rows
from pyg_dist.tensor.selection import ConcatenatedRows

# The parameters before `dim`, and its default; None where torch's default is dimension 0 or a flattened tensor.
_ALONG: dict[str, tuple[str, int | None]] = {
    "softmin": ("", None), "cumsum": ("", None), "cumprod": ("", None), "cummax": ("", None), "cummin": ("", None),
    "logcumsumexp": ("", None), "sort": ("", -1), "argsort": ("", -1), "topk": ("k", -1), "kthvalue": ("k", -1),
    "mode": ("", -1), "glu": ("", -1), "roll": ("shifts", None), "gather": ("", None),
    "take_along_dim": ("indices", None),
    "narrow": ("", None), "unbind": ("", 0),
    "chunk": ("chunks", 0), "split": ("split_size", 0), "tensor_split": ("indices_or_sections", 0),
    "diff": ("n", -1), "cosine_similarity": ("x2", 1), "repeat_interleave": ("repeats", None),
}  # fmt: skip
_CUTS = ("narrow", "chunk", "split", "tensor_split")
_OF_ALL_ROWS = (
    "sort", "argsort", "topk", "kthvalue", "mode", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "gather",
    "take_along_dim",
)  # fmt: skip
_BROADCASTS = ("take_along_dim", "cosine_similarity", "repeat_interleave")


@implements(*_ALONG, "cumsum_", "cumprod_")
def along(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Along other dimensions than 0. Along 0, what orders or accumulates rows is of all, and plain (collective)."""
    name = function.__name__.removesuffix("_")
    before, default = _ALONG[name]
    bound = bind(f"x {before} dim", args, kwargs)
    x, dim = args[0] if args else None, bound.get("dim", bound.get("dims", default))
    if name in _CUTS and isinstance(x, RowTensor) and 0 in dims_of(dim, x.dim()):
        rest = {key: value for key, value in bound.items() if key not in ("x", "dim")}
        positional = [rest.pop(key) for key in [before] if key in rest]
        places = torch.arange(x.shape[0])
        if name == "narrow":
            pieces = places.narrow(0, *(args[2:] or ()), **rest)
        else:
            pieces = function(places, *positional, dim=0, **rest)
        return copied_slice(x[pieces]) if isinstance(pieces, Tensor) else tuple(copied_slice(x[p]) for p in pieces)
    gathers = function.__name__ in _OF_ALL_ROWS and not of_whole_graphs()
    if gathers and isinstance(x, RowTensor) and 0 in dims_of(dim, x.dim()):
        return on_full_tensor(function, args, kwargs)
    if not isinstance(x, RowTensor) or dim is None or 0 in dims_of(dim, x.dim()):
        raise refuse(function, "along dimension 0, or of a plain tensor, would mix rows")
    with local_tensors():
        args, kwargs, rows = aligned(function, args, kwargs, name in _BROADCASTS)
        return as_row_tensor_(function(*args, **kwargs), rows)


@implements("flip")
def flip(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Reverse the order of columns, and of rows, which are picked (collective)."""
    x = args[0]
    dims = dims_of(flat_sizes(args, kwargs), x.dim())
    if 0 in dims:
        x = x[torch.arange(x.shape[0] - 1, -1, -1)]
    return on_rows(torch.flip, x, [dim for dim in dims if dim])


@implements("cat", "concat", "concatenate", "hstack", "vstack", "row_stack", "column_stack", "stack")
def join(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Concatenate columns, stack along a new dimension within rows, or append rows."""
    bound = bind("tensors dim", args, kwargs)
    tensors = tuple(bound["tensors"])
    if function is torch.column_stack:
        tensors = tuple(t.unsqueeze(1) if t.dim() == 1 else t for t in tensors)
    num_dims = tensors[0].dim()
    dim = bound.get("dim", 0)
    if function in (torch.hstack, torch.column_stack):
        function, dim = torch.cat, 1 if num_dims > 1 else 0
    stacks = function is torch.stack or (function in (torch.vstack, torch.row_stack) and num_dims < 2)
    if 0 in dims_of(dim, num_dims + (function is torch.stack)):
        if stacks and function is torch.stack and num_dims > 1:
            return MovedRows.make(torch.stack(tensors, dim=1), 1)
        if stacks:
            raise refuse(function, "along dimension 0 would move rows (along the last one, dim=-1, it does not)")
        return _append(function, tensors)
    with local_tensors():
        tensors, _, rows = aligned(function, tensors, {}, broadcasts=False)
        return as_row_tensor_(function(tensors, dim), rows)


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
def one_hot(function: Function, args: Args, kwargs: Kwargs) -> object:
    """One column per class; without ``num_classes`` it is the global maximum plus one (collective)."""
    x, num_classes = args[0], bind("x num_classes", args, kwargs).get("num_classes", -1)
    return on_rows(function, x, int(x.max()) + 1 if num_classes == -1 else num_classes)


@implements("pad")
def pad(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Pad within rows."""
    if len(bind("x pad", args, kwargs)["pad"]) // 2 >= args[0].dim():
        raise refuse(function, "of dimension 0 would add rows")
    return on_rows(lambda x, *rest, **named: _of_some_rows(function, x, *rest, **named), *args, **kwargs)


def _of_some_rows(function: Callable[..., Tensor], x: Tensor, *args: object, **kwargs: object) -> Tensor:
    """``function`` of local rows, of which it wants one at least; in the graph on every rank."""
    if x.shape[0]:
        return function(x, *args, **kwargs)
    return function(torch.cat([x, x.new_zeros(1, *x.shape[1:])]), *args, **kwargs)[:0]


@implements("normalize")
def normalize(function: Function, args: Args, kwargs: Kwargs) -> object:
    """``x / max(norm, eps)``: of each row, or, along dimension 0, of each column (collective)."""
    x, bound = args[0], {"p": 2.0, "dim": 1, "eps": 1e-12, **bind("x p dim eps", args, kwargs)}
    if 0 not in dims_of(bound["dim"], x.dim()):
        return on_rows(function, *args, **kwargs)
    norm = torch.linalg.vector_norm(x, bound["p"], bound["dim"], keepdim=True)
    return x / norm.clamp_min(bound["eps"])


@implements("pairwise_distance")
def pairwise_distance(function: Function, args: Args, kwargs: Kwargs) -> object:
    """One number per pair of rows."""
    if args[0].dim() < 2:
        raise refuse(function, "of one dimension would mix rows")
    return pointwise(function, args, kwargs)
