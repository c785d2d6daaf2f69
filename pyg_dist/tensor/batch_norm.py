"""Batch normalisation with the statistics of all rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pyg_dist.errors import DataError
from pyg_dist.tensor.row_tensor import LOCALLY, require_rows_first, wrap
from pyg_dist.tensor.table import Function, handles

_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


@handles("batch_norm")
def batch_norm(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` per channel (dimension 1).

    In training, mean and variance are global and differentiable, and the running ones follow them as in torch
    (collective); in evaluation the running ones are used (no communication).
    """
    if function is not torch.nn.functional.batch_norm:
        function, args = torch.nn.functional.batch_norm, (args[0], *args[3:5], *args[1:3], *args[5:8])
    bound = {
        "weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5,
        **dict(zip(_NAMES, args, strict=False)), **kwargs,
    }  # fmt: skip
    require_rows_first(function, tuple(bound[n] for n in _NAMES[:5]))
    x = bound["input"]
    rows = x._rows
    with LOCALLY():
        local = x.as_subclass(Tensor)
        affine = [None if bound[n] is None else rows.enter(bound[n]) for n in ("weight", "bias")]
        if not bound["training"] or rows.axis.size == 1:
            out = function(local, bound["running_mean"], bound["running_var"], *affine, *(bound[n] for n in _NAMES[5:]))
            return wrap(out, rows)
        dims = (0, *range(2, local.dim()))
        number = rows.size * math.prod(local.shape[2:])
        if number <= 1:
            raise DataError(f"Expected more than 1 value per channel when training (got input of {rows.size} rows)")
        channels = (1, -1, *[1] * (local.dim() - 2))
        mean = rows.leave(local.sum(dims)) / number
        centred = local - rows.enter(mean).view(channels)
        variance = rows.leave(centred.square().sum(dims)) / number
        if bound["running_mean"] is not None:
            with torch.no_grad():
                bound["running_mean"].lerp_(mean.to(bound["running_mean"].dtype), bound["momentum"])
                unbiased = variance * (number / (number - 1))
                bound["running_var"].lerp_(unbiased.to(bound["running_var"].dtype), bound["momentum"])
        out = centred * rows.enter(torch.rsqrt(variance + bound["eps"])).view(channels)
        if affine[0] is not None:
            out = out * affine[0].view(channels)
        if affine[1] is not None:
            out = out + affine[1].view(channels)
        return wrap(out, rows)
