"""Which rank owns which node: pure functions of (graph, number of parts, options), without communication."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_dist.errors import OptionError
from pyg_dist.partition.edge_list import as_edges, check_ends
from pyg_dist.partition.given import check_given
from pyg_dist.partition.models.graph import build_graph_model
from pyg_dist.partition.models.hypergraph import build_hypergraph_model
from pyg_dist.partition.solvers.metis import metis_parts
from pyg_dist.partition.solvers.mt_kahypar import hypergraph_parts
from pyg_dist.partition.solvers.random import random_parts

__all__ = ["check_given", "partition"]

METHODS = ("metis", "hypergraph", "random")


def partition(
    edge_index: Tensor,
    num_nodes: int,
    num_parts: int,
    method: str | Tensor | np.ndarray[Any, Any] = "metis",
    train_mask: Tensor | None = None,
    epsilon: float = 0.03,
    seed: int = 0,
) -> Tensor:
    """Return the part of every node. Deterministic for given arguments; not collective.

    Any number of parts is allowed, also more than there are nodes; parts may then be empty.

    Args:
        edge_index: Source and target of each edge, in any order; self loops and duplicates are allowed.
        num_nodes: Number of nodes N.
        num_parts: Number of parts P.
        method: "metis" (few rows to send, balanced work), "hypergraph" (the same goal, with fewer rows for more time),
            "random" (balanced node counts), or the parts themselves, one integer a node.
        train_mask: Nodes with a loss, which are spread over the parts, except at random.
        epsilon: How much heavier than the mean a part may be, as a fraction, except at random.
        seed: Seed of METIS and of the random partition.

    Shapes:
        - **input:** edge_index :math:`(2, |E|)` integer, train_mask :math:`(|V|)` or :math:`(|V|, K)` boolean
        - **output:** parts :math:`(|V|)` int32, each in :math:`[0, P)`

    Raises:
        DataError: If edge_index, train_mask or given parts have the wrong shape, dtype or range.
        OptionError: If another argument is not valid.
        MissingPackageError: If the package of the method is not installed: pymetis or mtkahypar.
    """
    if num_parts < 1:
        raise OptionError(f"Expected at least one part (got num_parts={num_parts})")
    edge_index = as_edges(edge_index)
    check_ends(edge_index, num_nodes, "edge_index")
    if not isinstance(method, str):
        return check_given(method, num_nodes, num_parts)
    if method not in METHODS:
        raise OptionError(
            f"Expected 'method' to be one of {', '.join(METHODS)} or a LongTensor of parts (got {method!r})"
        )
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise OptionError(f"Expected 'epsilon' to be a positive number (got {epsilon})")
    if num_parts == 1:
        return torch.zeros(num_nodes, dtype=torch.int32)
    if num_parts >= num_nodes:  # one node each, which METIS cannot do
        return torch.arange(num_nodes, dtype=torch.int32)
    if method == "random":
        return random_parts(num_nodes, num_parts, seed)
    if method == "hypergraph":
        return hypergraph_parts(build_hypergraph_model(edge_index, num_nodes, train_mask), num_parts, epsilon)
    return metis_parts(build_graph_model(edge_index, num_nodes, train_mask), num_parts, epsilon, seed)
