"""Norms and directions of edges, as a package keeps them in a module beside its convs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm


def by_degree(edge_index: Any, edge_weight: Tensor, num_nodes: int) -> tuple[Any, Tensor]:
    degree = torch.zeros(num_nodes, dtype=edge_weight.dtype)
    degree.scatter_add_(0, edge_index[1], edge_weight)
    return edge_index, edge_weight / degree[edge_index[1]]


def normalized(edge_index: Any, edge_weight: Tensor, num_nodes: int, norm: str) -> tuple[Any, Tensor]:
    if norm == "gcn":
        return gcn_norm(edge_index, edge_weight, num_nodes)  # type: ignore[no-any-return]
    return by_degree(edge_index, edge_weight, num_nodes)


def transposed(edge_index: Any) -> Any:
    return edge_index[[1, 0]]


class NormedEdges:
    """What convs inherit beside ``MessagePassing``."""

    norm = "gcn"

    def edges_of(self, x: Tensor, edge_index: Any, edge_weight: Tensor) -> tuple[Any, Tensor]:
        return normalized(edge_index, edge_weight, x.size(-2), self.norm)
