"""The attributes of a ``DistributedData``: whatever has a row per node or edge is stored distributed."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch_geometric.data.storage import GlobalStorage

from pyg_dist.errors import LayoutMismatchError, MixedRowsError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph
from pyg_dist.store.attributes import GRAPH_KEYS, belongs_to
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor


class DistributedStorage(GlobalStorage):  # type: ignore[misc]
    """PyG's storage, with every assignment (attribute, item, transform) through :meth:`distributed`."""

    def __setitem__(self, key: str, value: Any) -> None:
        stored = self.distributed(key, value)
        if isinstance(stored, RowTensor):
            stored._is_attribute = True
        super().__setitem__(key, stored)

    def distributed(self, key: str, value: Any) -> Any:
        """``value`` as it is stored: a plain ``[N, ...]`` or ``[E, ...]`` tensor is sliced to this rank's rows."""
        graph: DistributedGraph = self._parent().graph
        if key in GRAPH_KEYS:
            if isinstance(value, DistributedEdgeIndex):
                if value.graph.node_sharding is not graph.node_sharding:
                    raise LayoutMismatchError(
                        f"Expected '{key}' over the nodes of this data (got edges of another DistributedData): use "
                        f"that one"
                    )
                self._parent().__dict__["graph"] = value.graph  # fewer edges, or reversed ones: data.num_edges follows
                return value
            if value is None:
                return value
            raise MixedRowsError(
                f"Assigning '{key}' would change a distributed graph: change it before DistributedData"
            )
        if isinstance(value, RowTensor):
            if not (graph.owns(value) or graph.edge_sharding.is_equivalent(value._sharding)):
                name = ", under another name" if key == "y" else ""
                raise LayoutMismatchError(
                    f"Expected '{key}' with a row for every node or edge of this graph (got {value._sharding.size} "
                    f"{value.kind}s of another graph or selection): assign a full_tensor(){name}"
                )
            return graph.place_attribute(key, value)
        if not isinstance(value, Tensor) or value.dim() == 0:
            return value
        nodes, edges = graph.node_sharding.size, graph.edge_sharding.size
        kind = belongs_to(key, value, nodes, edges)
        if kind == "edge":
            return EdgeTensor.from_local(graph.edge_sharding.slice(value), graph.edge_sharding)
        if kind == "node":
            return graph.place_attribute(
                key, NodeTensor.from_local(graph.node_sharding.slice(value), graph.node_sharding)
            )
        return value
