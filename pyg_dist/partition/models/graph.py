"""The graph that METIS partitions: symmetric, without loops and duplicates, its nodes weighted by their work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pyg_dist.partition.node_work import node_work

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class GraphModel:
    """An undirected graph in CSR form with integer node weights.

    Node ``i`` has the neighbours ``neighbor[start[i]:start[i + 1]]``, ascending; ``weight[i] >= 1``.
    """

    start: Array
    neighbor: Array
    weight: Array

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return int(self.weight.size)


def build_graph_model(edge_index: Tensor, num_nodes: int, train_mask: Tensor | None = None) -> GraphModel:
    """Build the model of a graph with valid ``edge_index``. Not collective.

    Shapes:
        - **input:** edge_index :math:`(2, |E|)`, train_mask :math:`(|V|)` or :math:`(|V|, K)` boolean
        - **output:** start :math:`(|V| + 1)`, neighbor (at most :math:`2 |E|`), weight :math:`(|V|)`

    Raises:
        DataError: If train_mask has the wrong length or dtype.
    """
    source, target = edge_index.detach().cpu().numpy()
    start, neighbor = _symmetric_csr(source, target, num_nodes)
    return GraphModel(start, neighbor, node_work(np.bincount(target, minlength=num_nodes), train_mask))


def _symmetric_csr(source: Array, target: Array, num_nodes: int) -> tuple[Array, Array]:
    from scipy import sparse

    index_dtype = np.int32 if max(num_nodes, 2 * source.size) <= np.iinfo(np.int32).max else np.int64
    is_link = source != target
    # Each array goes as soon as the next one stands: this is where rank 0 holds most.
    source, target = source[is_link].astype(index_dtype), target[is_link].astype(index_dtype)
    del is_link
    # Booleans: a duplicate is or-ed away, where small integers could wrap around to zero.
    shape = (num_nodes, num_nodes)
    one_way = sparse.coo_array((np.ones(source.size, dtype=bool), (source, target)), shape=shape).tocsr()
    del source, target
    adjacency = one_way + one_way.T.tocsr()
    del one_way
    adjacency.sort_indices()
    return adjacency.indptr, adjacency.indices
