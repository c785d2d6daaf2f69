"""Normalisation of tiles: statistics of a row sum over the column axis, statistics of a column over the row axes."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_dist.backend.autograd.replicated import copy_to_ranks, reduce_from_ranks
from pyg_dist.errors import DataError
from pyg_dist.grid.collectives import all_gather
from pyg_dist.grid.sharding import Tile
from pyg_dist.grid.tile_tensor import TileTensor, on_tiles
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.registry import Function, bind
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors


@on_tiles("layer_norm", "rms_norm")
def norm_of_each_row(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``(x - mean) / sqrt(var + eps)`` or ``x / sqrt(mean square + eps)`` (ScaleGNN, eq. 29) by row (collective)."""
    centres = function.__name__ == "layer_norm"
    names = "x shape weight bias eps" if centres else "x shape weight eps"
    bound: dict[str, Any] = {"weight": None, "bias": None, "eps": 1e-5 if centres else None}
    bound.update(bind(names, args, kwargs))
    x, shape = bound["x"], bound.get("shape", bound.get("normalized_shape"))
    parameters = [bound["weight"], bound["bias"]]
    if not isinstance(x, TileTensor) or any(isinstance(p, RowTensor) for p in parameters):
        return NotImplemented
    tile = x._sharding
    if tuple(shape or ()) != (tile.width,):
        return NotImplemented
    with local_tensors():
        weight, bias = (None if p is None else tile.slice_columns(p) for p in parameters)
        local = x.to(accumulation_dtype(x.dtype))
        group = tile.column_group
        if centres:
            local = local - copy_to_ranks(reduce_from_ranks(local.sum(1, keepdim=True), group) / tile.width, group)
        mean_square = reduce_from_ranks(local.square().sum(1, keepdim=True), group) / tile.width
        eps = torch.finfo(x.dtype).eps if bound["eps"] is None else bound["eps"]
        out = local * copy_to_ranks(torch.rsqrt(mean_square + eps), group)
        out = out if weight is None else out * weight
        out = out if bias is None else out + bias
        return as_row_tensor_(out.to(x.dtype).as_subclass(Tensor), tile)


@on_tiles("batch_norm", namespaces=(F,))
def batch_norm(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """As for rows; running statistics, which every rank holds whole, are gathered over columns (collective)."""
    bound: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    bound.update(bind("x running_mean running_var weight bias training momentum eps", args, kwargs))
    x, channels = bound["x"], [bound[name] for name in ("running_mean", "running_var", "weight", "bias")]
    if not isinstance(x, TileTensor) or any(isinstance(c, RowTensor) for c in channels):
        return NotImplemented
    tile = x._sharding
    with local_tensors():
        # All four, and before the sums: where one does not fit, no rank may go on.
        mean, var, weight, bias = (None if c is None else tile.slice_columns(c) for c in channels)
        if bound["training"]:
            normal = _normalise(x, tile, channels[:2], bound["momentum"], bound["eps"])
        else:  # torch's own form does not take a rank without columns
            if mean is None or var is None:
                raise DataError("Expected running_mean and running_var in evaluation (got None): use training=True")
            dtype = accumulation_dtype(x.dtype)
            normal = (x - mean.to(dtype)) * torch.rsqrt(var.to(dtype) + bound["eps"])
        out = normal if weight is None else normal * weight
        out = out if bias is None else out + bias
        return as_row_tensor_(out.to(x.dtype).as_subclass(Tensor), tile)


def _normalise(x: Tensor, tile: Tile, running: list[Tensor | None], momentum: float, eps: float) -> Tensor:
    """The rows' deviations from the global means, over the global standard deviations."""
    if tile.size <= 1:
        raise DataError(f"Expected more than 1 value per channel when training (got {tile}): use .eval()")
    local, group = x.to(accumulation_dtype(x.dtype)).as_subclass(Tensor), tile.row_group
    mean = reduce_from_ranks(local.sum(0), group) / tile.size
    centred = local - copy_to_ranks(mean, group)
    variance = reduce_from_ranks(centred.square().sum(0), group) / tile.size
    if any(buffer is not None for buffer in running):
        with torch.no_grad():
            mine = torch.stack([mean, variance * (tile.size / (tile.size - 1))])
            transport = tile.grid.transport(*(tile.layout.columns or ()), exact=True)
            for buffer, batch in zip(running, all_gather(mine, transport, tile.column_sizes, 1), strict=True):
                if buffer is not None:
                    buffer.lerp_(batch.to(buffer.dtype), momentum)
    return centred * copy_to_ranks(torch.rsqrt(variance + eps), group)
