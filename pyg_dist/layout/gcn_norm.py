"""The scales of GCN's norm."""

from __future__ import annotations

from torch import Tensor


def inverse_sqrt_degree(degree: Tensor) -> Tensor:
    """``degree^-1/2``, zero where the degree is zero, as PyG's ``gcn_norm`` has it."""
    scale = degree.pow(-0.5)
    return scale.masked_fill(scale == float("inf"), 0.0)


def mask_non_sources(scale: Tensor, is_source: Tensor) -> Tensor:
    """``scale``, zero for nodes that are no source: no sum needs theirs, and NaN there would be their gradient.

    Degrees are negative where weights are, and their roots NaN.

    Shapes:
        - scale: ``[n, ...]``
        - is_source: bool ``[n]``
    """
    return scale.masked_fill(~is_source.view(-1, *[1] * (scale.dim() - 1)), 0.0)
