"""Parts that the user passes, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.errors import DataError


def as_parts(parts: Any) -> Tensor:
    """Return ``parts``, of any form, as a CPU tensor of integers. Not collective.

    Raises:
        DataError: If it is not a vector of integers.
    """
    try:
        given = parts.detach().cpu() if isinstance(parts, Tensor) else np.asarray(parts)
        if isinstance(given, np.ndarray) and given.dtype.kind in "iu":  # of any byte order, strides and width
            given = np.array(given, dtype=np.int64)
        vector = torch.as_tensor(given)
    except (ValueError, TypeError) as error:
        raise DataError(f"Expected 'partition' to be a vector of integers (got: {error}): one part a node") from error
    if vector.is_floating_point() or vector.is_complex() or vector.dtype == torch.bool:
        raise DataError(f"Expected 'partition' to hold integers (got {vector.dtype}); use partition.long()")
    vector = vector.long()
    if vector.dim() != 1:
        raise DataError(f"Expected 'partition' to be a vector (got shape {list(vector.shape)}): one part a node")
    return vector


def check_given(parts: Tensor | np.ndarray[Any, Any], num_nodes: int, num_parts: int) -> Tensor:
    """Return ``parts`` as an int32 CPU tensor. Not collective.

    Shapes:
        - **input:** :math:`(|V|)` of any integer type
        - **output:** :math:`(|V|)` int32

    Raises:
        DataError: If it is not a vector of integers, has another length than the graph, or a part out of range.
    """
    vector = as_parts(parts)
    if vector.numel() != num_nodes:
        raise DataError(
            f"Expected 'partition' to have one part for each of {num_nodes} nodes (got shape {list(vector.shape)})"
        )
    if num_nodes:
        low, high = (int(bound) for bound in torch.aminmax(vector))
        if low < 0 or high >= num_parts:
            raise DataError(f"Expected parts in [0, {num_parts}), one part a rank (got values from {low} to {high})")
    return vector.to(torch.int32)
