"""Other shapes of rows in other dimensions than the first (``MovedRows``): dimensions before rows, or joined."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from pyg_dist.tensor.functions.moved_rows import HANDLERS, MovedRows, named, refuse_moved
from pyg_dist.tensor.functions.shapes import dims_of, flat_sizes, view
from pyg_dist.tensor.registry import Args, Function, Kwargs, bind, implements
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors
from pyg_dist.tensor.selection import ConcatenatedRows
from pyg_dist.tensor.sharding import RowSharding


@implements("view", "reshape")
def reshape(function: Function, args: Args, kwargs: Kwargs) -> object:
    """As :func:`~pyg_dist.tensor.functions.shapes.view`; dimensions of size one may also come before the rows."""
    x, sizes = args[0], flat_sizes(args, kwargs)
    batch = _as_batch(x, sizes) if isinstance(x._sharding, ConcatenatedRows) else None
    if batch is not None:
        return batch
    place = next((k for k, size in enumerate(sizes) if size != 1), 0)
    if place > 0 and sizes[place] in (-1, x.shape[0]):
        return MovedRows.make(x.reshape(sizes[place], *[1] * place, *sizes[place + 1 :]), place)
    return view(function, args, kwargs)


def _as_batch(x: RowTensor, sizes: tuple[Any, ...]) -> Any:
    """``[B, N, F]`` of the ``[B N, F]`` that :func:`_reshape` has made of it; ``None``: it is something else."""
    parts: tuple[RowSharding, ...] = x._sharding.parts  # type: ignore[attr-defined]
    rows, whole = parts[0], _sizes(x, sizes)
    place = next((k for k in range(1, len(whole)) if (prod(whole[:k]), whole[k]) == (len(parts), rows.size)), None)
    if place is None or any(part is not rows for part in parts):
        return None
    with local_tensors():
        of: Any = x.reshape(len(parts), rows.num_local, *x.shape[1:]).movedim(0, 1)
        of = as_row_tensor_(of.reshape(rows.num_local, *whole[:place], *whole[place + 1 :]), rows)
        return MovedRows.make(of, place)


def _sizes(x: Any, sizes: Sequence[int]) -> tuple[int, ...]:
    """The sizes that a shape of ``x`` stands for, one of which may be -1."""
    known = prod(size for size in sizes if size != -1)
    return tuple(x.numel() // max(known, 1) if size == -1 else size for size in sizes)


def _unsqueeze(function: Function, args: Args, kwargs: Kwargs) -> object:
    bound = bind("x dim", args, kwargs)
    x = bound["x"]
    (dim,) = dims_of(bound["dim"], x.dim() + 1)
    of = x.of.unsqueeze(dim if dim > x.place else dim + 1)
    return MovedRows.make(of, x.place + (dim <= x.place))


def _squeeze(function: Function, args: Args, kwargs: Kwargs) -> object:
    """Dimensions of size one other than the rows'."""
    x = args[0]
    dims = [d for d in dims_of(bind("x dim", args, kwargs).get("dim"), x.dim()) if d != x.place and x.shape[d] == 1]
    return x[tuple(0 if d in dims else slice(None) for d in range(x.dim()))]


def _reshape(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Dimensions before the rows', and those behind it, are reshaped apart; ``[B, N, F]`` may become ``[B N, F]``."""
    x = args[0]
    sizes = _sizes(x, flat_sizes(args, kwargs))
    before, behind = x.shape[: x.place], x.shape[x.place + 1 :]
    for place, size in enumerate(sizes):
        if (
            size == x.shape[x.place]
            and prod(sizes[:place]) == prod(before)
            and prod(sizes[place + 1 :]) == prod(behind)
        ):
            return MovedRows.make(x.of.reshape(size, *sizes[:place], *sizes[place + 1 :]), place)
    if (sizes[0], prod(sizes[1:])) == (prod(before) * x.shape[x.place], prod(behind)):
        of = x.of.reshape(x.of.shape[0], prod(before), *sizes[1:])
        return torch.cat([of[:, k] for k in range(prod(before))])
    raise refuse_moved(function, x)


def _flatten(function: Function, args: Args, kwargs: Kwargs) -> Any:
    x, bound = args[0], bind("x start_dim end_dim", args, kwargs)
    start, end = dims_of((bound.get("start_dim", 0), bound.get("end_dim", -1)), x.dim())
    return _reshape(function, (x, *x.shape[:start], prod(x.shape[start : end + 1]), *x.shape[end + 1 :]), {})


def _expand(function: Function, args: Args, kwargs: Kwargs) -> Any:
    """Expand or repeat other dimensions; new ones come before all."""
    x, sizes = args[0], flat_sizes(args, kwargs)
    new, repeats = len(sizes) - x.dim(), function is Tensor.repeat
    place, keeps = x.place + new, (1,) if repeats else (-1, x.shape[x.place])
    if new < 0 or sizes[place] not in keeps:
        raise refuse_moved(function, x)
    of = x.of.reshape(x.of.shape[0], *[1] * new, *x.of.shape[1:])
    sizes = (keeps[0], *sizes[:place], *sizes[place + 1 :])
    return MovedRows.make(of.repeat(sizes) if repeats else of.expand(sizes), place)


HANDLERS.update(dict.fromkeys(named("squeeze"), _squeeze))
HANDLERS.update(dict.fromkeys(named("unsqueeze"), _unsqueeze))
HANDLERS.update(dict.fromkeys(named("view", "reshape"), _reshape))
HANDLERS.update(dict.fromkeys(named("flatten"), _flatten))
HANDLERS.update(dict.fromkeys(named("expand", "repeat"), _expand))
