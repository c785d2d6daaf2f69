"""Checked inputs of a partition: edges, given parts, and the work that each node is for its rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric import EdgeIndex

from pyg_dist.backend import host
from pyg_dist.errors import DataError, refusing


def as_edges(edge_index: object) -> Tensor:
    """A plain int64 tensor ``[2, E]`` on the CPU."""
    if isinstance(edge_index, EdgeIndex):
        edge_index = edge_index.as_tensor()
    if getattr(type(edge_index), "is_distributed", None) is True:  # torch's tensors have a method of this name
        raise DataError(
            f"Expected 'edge_index' of shape [2, num_edges] on every rank (got a {type(edge_index).__name__}): give "
            f"edge_index.full_tensor()"
        )
    if not isinstance(edge_index, Tensor) or edge_index.dim() != 2 or edge_index.shape[0] != 2:
        shape = list(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise DataError(f"Expected 'edge_index' of shape [2, num_edges] (got {shape}): transpose or stack it")
    if edge_index.dtype.is_floating_point or edge_index.dtype == torch.bool:
        raise DataError(f"Expected 'edge_index' to hold integer node ids (got {edge_index.dtype}): use .long()")
    return edge_index.detach().to("cpu", torch.int64)


def check_ends(edge_index: Tensor, num_nodes: int, name: str) -> None:
    """Check that the ends of edges are nodes that exist."""
    if edge_index.numel() == 0:
        return
    low, high = edge_index.aminmax()
    if low < 0:
        raise DataError(f"Expected '{name}' to hold node ids from 0 (got {int(low)}): drop edges to missing nodes")
    if high >= num_nodes:
        raise DataError(
            f"Expected '{name}' to hold node ids below num_nodes={num_nodes} (got {int(high)}): one row of x per node"
        )


def as_parts(parts: object) -> Tensor:
    """Return ``parts``, of any form, as a CPU tensor of integers. Not collective."""
    with refusing(DataError, "'partition' to be a vector of integers", "one part a node", ValueError, TypeError):
        given = parts.detach().cpu() if isinstance(parts, Tensor) else np.asarray(parts)
        if isinstance(given, np.ndarray) and given.dtype.kind in "iu":  # of any byte order, strides and width
            given = np.array(given, dtype=np.int64)
        vector = host.as_tensor(given)
    if vector.is_floating_point() or vector.is_complex() or vector.dtype == torch.bool:
        raise DataError(f"Expected 'partition' to hold integers (got {vector.dtype}); use partition.long()")
    vector = vector.long()
    if vector.dim() != 1:
        raise DataError(f"Expected 'partition' to be a vector (got shape {list(vector.shape)}): one part a node")
    return vector


def check_given(parts: Tensor | np.typing.NDArray[np.generic], num_nodes: int, num_parts: int) -> Tensor:
    """``parts``, ``[N]`` of any integer type, as an int32 CPU tensor. Not collective."""
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


Array = np.ndarray[Any, Any]


def node_work(in_degree: Array, train_mask: Tensor | None = None) -> Array:
    """The work of every node, int64 ``[N]``; ``train_mask`` is bool ``[N]`` or ``[N, K]``.

    The partitioners take one weight a node. A rank's time goes into in-edges (aggregation) and nodes (dense layers,
    memory of the rows), so

        weight = in-degree + mean in-degree + (mean in-degree, for training nodes)

    (rounded, at least 1 a node). With the mean as unit both kinds of work weigh the same in total, and each stays near
    balance on skewed degrees: on Amazon Computers, weighing in-degrees alone gives a quarter of the ranks 40% more rows
    than the mean, weighing nodes alone gives one rank 80% more edges. Training nodes count twice to spread the loss and
    its gradients (SuperGCN, 7.2: "node weights based on in-degree of nodes and training masks").
    """
    num_nodes = in_degree.size
    mean = max(1, round(int(in_degree.sum()) / max(1, num_nodes)))
    weight: Array = in_degree + mean
    if train_mask is None:
        return weight
    mask: Array = train_mask.detach().cpu().numpy()
    if mask.dtype != np.bool_ or mask.ndim not in (1, 2) or mask.shape[0] != num_nodes:
        raise DataError(
            f"Expected a boolean 'train_mask' with {num_nodes} rows (got {train_mask.dtype}, {list(train_mask.shape)})"
        )
    weight += mean * (mask if mask.ndim == 1 else mask.any(axis=1))
    return weight
