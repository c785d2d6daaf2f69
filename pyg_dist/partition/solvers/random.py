"""A balanced random partition, the baseline that every other one must beat."""

from __future__ import annotations

import torch
from torch import Tensor


def random_parts(num_nodes: int, num_parts: int, seed: int) -> Tensor:
    """Return a random part for every node; the parts' node counts differ by one at most. Not collective.

    Shapes:
        - **output:** :math:`(|V|)` int32
    """
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.int32 if num_nodes <= torch.iinfo(torch.int32).max else torch.int64
    order = torch.randperm(num_nodes, generator=generator, dtype=dtype)
    return order.remainder_(num_parts).to(torch.int32)
