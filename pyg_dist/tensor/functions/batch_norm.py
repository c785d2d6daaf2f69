"""Batch normalisation with the statistics of all rows."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyg_dist.backend.autograd.replicated import copy_to_ranks
from pyg_dist.errors import DataError, MixedRowsError
from pyg_dist.tensor.functions.reductions import accumulation_dtype
from pyg_dist.tensor.registry import Function, bind, implements, public_name
from pyg_dist.tensor.row_tensor import RowTensor, as_row_tensor_, local_tensors


@implements("batch_norm", namespaces=(F,))
def batch_norm(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` per channel (dimension 1).

    In training, mean and variance are global and differentiable, and the running ones follow them as in torch
    (collective); in evaluation the running ones are used (no communication).
    """
    bound: dict[str, Any] = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}
    bound.update(bind("x running_mean running_var weight bias training momentum eps", args, kwargs))
    x, channels = bound["x"], [bound[name] for name in ("running_mean", "running_var", "weight", "bias")]
    if not isinstance(x, RowTensor) or any(isinstance(c, RowTensor) for c in channels):
        raise MixedRowsError(f"{public_name(function)} expects distributed rows and one plain value per channel")
    mean, var, weight, bias = channels
    rows = x._sharding
    with local_tensors():
        if bound["training"] and rows.group.size > 1:
            return as_row_tensor_(_normalise(x, mean, var, weight, bias, bound["momentum"], bound["eps"]), rows)
        weight, bias = (None if t is None else rows.copy_to_ranks(t) for t in (weight, bias))
        for running in (mean, var):
            if running is not None:
                rows.meet(running)
        rest = (bound["training"], bound["momentum"], bound["eps"])
        return as_row_tensor_(function(x, mean, var, weight, bias, *rest), rows)


def _normalise(
    x: RowTensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Training on more than one rank, to be called under :data:`local_tensors`."""
    rows, dims, shape = x._sharding, (0, *range(2, x.dim())), (1, -1, *[1] * (x.dim() - 2))
    number = rows.size * math.prod(x.shape[2:])
    if number <= 1:
        raise DataError(f"Expected more than 1 value per channel when training (got {rows}): use .eval()")
    local = x.to(accumulation_dtype(x.dtype))
    mean = rows.reduce_from_ranks(local.sum(dims)) / number
    centred = local - copy_to_ranks(mean, rows.group).view(shape)
    variance = rows.reduce_from_ranks(centred.square().sum(dims)) / number
    with torch.no_grad():
        for running, batch in ((running_mean, mean), (running_var, variance * (number / (number - 1)))):
            if running is not None:
                running.lerp_(batch.to(running.dtype), momentum)
    out = centred * copy_to_ranks(torch.rsqrt(variance + eps), rows.group).view(shape)
    if weight is not None:
        out = out * rows.copy_to_ranks(weight).view(shape)
    if bias is not None:
        out = out + rows.copy_to_ranks(bias).view(shape)
    return out.to(x.dtype)


class DistributedSyncBatchNorm(nn.SyncBatchNorm):
    """torch's :class:`~torch.nn.SyncBatchNorm`, whose own code asks for a GPU (exact).

    On distributed rows it is batch norm, which has the statistics of all ranks' rows; else it is the stock norm.
    Collective on distributed rows.

    Shapes:
        - x: ``[N, F]`` or ``[N, F, ...]``; output the same

    Example:
        >>> norm = pyg_dist.distribute(torch.nn.SyncBatchNorm(34))
        >>> tuple(norm(data.x).shape)
        (34, 34)
    """

    def forward(self, input: Tensor) -> Tensor:
        """See the class."""
        if not isinstance(input, RowTensor):
            return super().forward(input)
        self._check_input_dim(input)
        return nn.modules.batchnorm._BatchNorm.forward(self, input)
