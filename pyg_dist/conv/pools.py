"""What PyG's pools that keep nodes (``TopKPooling``, ``SAGPooling``, ``GraphUNet``) are made of, on distributed data.

``SelectTopK`` chooses nodes among the scores of all, and ``FilterEdges`` keeps the edges between these. Rows stay on
their ranks; each rank cuts its own edges (:meth:`~pyg_dist.graph.protocol.DistributedGraph.among`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.nn import GraphUNet
from torch_geometric.nn.pool.connect import FilterEdges
from torch_geometric.nn.pool.select import SelectTopK

from pyg_dist.conv.function_patching import patched
from pyg_dist.conv.graph_functions import SUBSTITUTES
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.tensor import RowTensor


class DistributedSelectTopK(SelectTopK):
    """Its own code; the highest scores are found among those of all nodes (collective). Exact."""

    forward = patched(SelectTopK.forward, SUBSTITUTES)


class DistributedFilterEdges(FilterEdges):
    """Its own code, with the edges between the nodes that were chosen (collective). Exact."""

    forward = patched(FilterEdges.forward, SUBSTITUTES)


class DistributedGraphUNet(GraphUNet):
    """Its own code; every rank computes the paths of two edges of the whole graph (collective). Exact."""

    def augment_adj(self, edge_index: Any, edge_weight: Tensor, num_nodes: int) -> tuple[Tensor, Tensor]:
        """The edges of all pairs that two edges join, and the sums of products of their weights, plain tensors."""
        if isinstance(edge_index, DistributedEdgeIndex):
            edge_index = edge_index.full_tensor()
        if isinstance(edge_weight, RowTensor):
            edge_weight = edge_weight.full_tensor()
        return super().augment_adj(edge_index, edge_weight, num_nodes)  # type: ignore[no-any-return]
