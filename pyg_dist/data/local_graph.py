"""A rank's part of a graph, or of a relation, before it is filled into a ``DistributedData``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_dist.graph.adjacency import DistributedAdjacency
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.halo.plan.relations import HeteroPlan
from pyg_dist.pricing.base import DistributionPlan
from pyg_dist.store.graph_input import GraphInput
from pyg_dist.tensor import EdgeTensor, RowTensor
from pyg_dist.tensor.sharding import RowSharding


@dataclass(frozen=True)
class LocalGraph:
    """This rank's part of a graph with one type of nodes, or of a relation."""

    graph: DistributedGraph
    plan: DistributionPlan | HeteroPlan
    graph_key: str | None  # ``"edge_index"`` or ``"adj_t"``; ``None``: there are only hyperedges
    weight: EdgeTensor | None  # values of ``adj_t``
    attributes: dict[str, object]  # all others by name, rows as row tensors

    @staticmethod
    def of(given: GraphInput, graph: DistributedGraph, plan: DistributionPlan) -> LocalGraph:
        """This rank's rows of every attribute of the input, on the input's device (not collective)."""
        edges, device = graph.edge_sharding, given.device
        rows = {
            name: local_rows(value, graph.attribute_sharding(name, value), device)
            for name, value in given.node_attributes.items()
        }
        rows |= {name: local_rows(value, edges, device) for name, value in given.edge_attributes.items()}
        weight = None if given.adj_values is None else local_rows(given.adj_values, edges, device)
        return LocalGraph(graph, plan, given.form.key, weight, rows | given.other_attributes)

    @property
    def handle(self) -> DistributedEdgeIndex:
        """The ``edge_index`` or ``adj_t`` of a script."""
        is_matrix = self.graph_key == "adj_t"
        return DistributedAdjacency(self.graph, self.weight) if is_matrix else DistributedEdgeIndex(self.graph)


def local_rows(value: Tensor, rows: RowSharding, device: torch.device) -> Any:
    """This rank's rows of an attribute of the input."""
    local = rows.slice(value.detach()).to(device)
    return RowTensor.from_local(local, rows).requires_grad_(value.requires_grad)
