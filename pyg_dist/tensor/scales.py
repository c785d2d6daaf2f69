"""The scales of GCN's norm."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_sqrt(degree: Tensor) -> Tensor:
    """``degree^-1/2``, zero where the degree is zero, as PyG's ``gcn_norm`` has it."""
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0.0)


def at_sources(scale: Tensor, *columns: Tensor) -> Tensor:
    """``scale``, zero for nodes that are no source: no sum needs theirs, and NaN there would be their gradient.

    Degrees are negative where weights are, and their roots NaN.

    Args:
        scale: ``[n, ...]``.
        columns: the sources of some edges each.
    """
    if not bool(scale.isnan().any()):
        return scale
    is_source = torch.zeros(scale.shape[0], dtype=torch.bool, device=scale.device)
    for column in columns:
        is_source[column.long()] = True
    return scale.masked_fill(~is_source.view(-1, *[1] * (scale.dim() - 1)), 0.0)
