"""Small random graphs with everything that graphs can have, and partitions that leave ranks empty."""

from __future__ import annotations

import torch
from torch import Tensor
from torch_geometric.data import Data

DTYPE = torch.float64


def random_graph(
    num_nodes: int,
    num_edges: int,
    num_features: int = 5,
    num_classes: int = 4,
    seed: int = 0,
    dtype: torch.dtype = DTYPE,
) -> Data:
    """A directed graph with self loops, duplicate edges and isolated nodes; edges of one target in input order.

    A hub (node 0, where it exists) is the source of a quarter of the edges. About a third of the nodes train.
    """
    rng = torch.Generator().manual_seed(seed)
    source = torch.randint(0, num_nodes, (num_edges,), generator=rng)
    target = torch.randint(0, num_nodes, (num_edges,), generator=rng)
    source[: num_edges // 4] = 0
    duplicates = num_edges // 8
    source[-duplicates or num_edges :] = source[:duplicates]
    target[-duplicates or num_edges :] = target[:duplicates]
    loops = slice(num_edges // 3, num_edges // 3 + num_edges // 10)
    target[loops] = source[loops]
    train_mask = torch.rand(num_nodes, generator=rng) < 0.3
    train_mask[num_nodes // 2] = True
    return Data(
        x=torch.randn(num_nodes, num_features, generator=rng, dtype=dtype),
        edge_index=torch.stack([source, target]),
        edge_weight=torch.rand(num_edges, generator=rng, dtype=dtype) + 0.1,
        edge_attr=torch.randn(num_edges, 3, generator=rng, dtype=dtype),
        y=torch.randint(0, num_classes, (num_nodes,), generator=rng),
        train_mask=train_mask,
    )


def uneven_parts(num_nodes: int, world_size: int, seed: int = 0) -> Tensor:
    """Random owners; with three ranks or more, the last one owns nothing."""
    used = world_size - 1 if world_size >= 3 else world_size
    return torch.randint(0, used, (num_nodes,), generator=torch.Generator().manual_seed(seed))
