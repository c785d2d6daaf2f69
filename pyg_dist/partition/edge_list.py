"""The edges of a graph as one plain tensor, checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_dist.errors import DataError


def as_edges(edge_index: Any) -> Tensor:
    """A plain int64 tensor ``[2, E]`` on the CPU.

    Raises:
        DataError: It has another shape, or no integers.
    """
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        shape = list(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise DataError(f"Expected 'edge_index' of shape [2, num_edges] (got {shape}): transpose or stack it")
    if edge_index.dtype.is_floating_point or edge_index.dtype == torch.bool:
        raise DataError(f"Expected 'edge_index' to hold integer node ids (got {edge_index.dtype}): use .long()")
    return edge_index.detach().to("cpu", torch.int64)


def check_ends(edge_index: Tensor, num_nodes: int, name: str) -> None:
    """Check that edges lie between nodes that exist.

    Raises:
        DataError: They do not.
    """
    if edge_index.numel() == 0:
        return
    low, high = edge_index.aminmax()
    if low < 0:
        raise DataError(f"Expected '{name}' to hold node ids from 0 (got {int(low)}): drop edges to missing nodes")
    if high >= num_nodes:
        raise DataError(
            f"Expected '{name}' to hold node ids below num_nodes={num_nodes} (got {int(high)}): one row of x per node"
        )
