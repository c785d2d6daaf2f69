"""Alpha dropout for SELU, dropout of channels, and ReLU with slopes that are drawn: keyed as :mod:`.random`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.on_device import on_device
from pyg_dist.tensor.functions.random import draw_seed, dropout_arguments
from pyg_dist.tensor.functions.shapes import refuse
from pyg_dist.tensor.registry import Function, bind, implements
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors


def uniform_like(x: RowTensor, per_row: Sequence[int]) -> Tensor:
    """Uniform numbers in [0, 1), of ``per_row`` for each local row of x, to be called under :data:`local_tensors`."""
    first = x._sharding.first_column if tuple(per_row) == tuple(x.shape[1:]) else 0
    key = on_device(x._sharding.rng_key, x.device)
    dtype = torch.promote_types(x.dtype, torch.float32)
    return ops.keyed_uniform(key, math.prod(per_row), draw_seed(), first, dtype).view(len(key), *per_row)


@implements("alpha_dropout", "feature_alpha_dropout", "feature_dropout", "dropout1d", "dropout2d", "dropout3d")
def dropout_of_kinds(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Dropout that keeps mean and variance of SELU's outputs (alpha), or drops whole channels ``[N, C, ...]``.

    Raises:
        MixedRowsError: Channels would be rows: ``[C, L]`` is one sample without a batch to torch.
    """
    x, p, bound = dropout_arguments(args, kwargs)
    name = function.__name__.rstrip("_")
    of_channels, is_alpha = name != "alpha_dropout", "alpha" in name
    if of_channels and x.dim() < {"dropout1d": 3, "dropout3d": 5}.get(name, 2):
        raise refuse(function, f"of {x.dim()} dimensions would drop rows, as channels of one sample")
    if p == 0.0:
        return x
    shape = x.shape[1:2] + (1,) * (x.dim() - 2) if of_channels else x.shape[1:]
    with local_tensors():
        keep = uniform_like(x, shape) >= p
        if is_alpha:
            # What is dropped becomes SELU's limit, -scale * alpha; then mean 0 and variance 1 are restored.
            low = -1.7580993408473766
            scale = 0.0 if p == 1.0 else ((low * low * p + 1) * (1 - p)) ** -0.5
            out = torch.where(keep, x.as_subclass(Tensor), low) * scale - low * p * scale
        else:
            out = x.as_subclass(Tensor) * (keep.to(x.dtype) / (1 - p) if p < 1.0 else 0.0)
        return x.copy_(out) if bound["inplace"] else as_row_tensor_(out, x._sharding)


@implements("rrelu", "rrelu_", namespaces=(torch, torch.nn.functional))
def rrelu(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """ReLU with slopes of negative values that are drawn in training, and their mean in evaluation."""
    defaults = {"lower": 1.0 / 8, "upper": 1.0 / 3, "training": False, "inplace": function.__name__.endswith("_")}
    bound = {**defaults, **bind("x lower upper training inplace", args, kwargs)}
    x, low, high = args[0], bound["lower"], bound["upper"]
    with local_tensors():
        slope: Any = (low + high) / 2
        if bound["training"]:
            slope = low + (high - low) * uniform_like(x, x.shape[1:])
        local = x.as_subclass(Tensor)
        out = torch.where(local <= 0, local * slope, local)
        return x.copy_(out) if bound["inplace"] else as_row_tensor_(out, x._sharding)
