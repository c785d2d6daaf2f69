"""PyG's storages of a type of nodes and of a relation, where each assignment keeps this rank's rows."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch_geometric.data.storage import EdgeStorage, NodeStorage

from pyg_dist.data.storage import RowStorage, same_nodes, with_rows
from pyg_dist.errors import MixedRowsError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import NodeSharding
from pyg_dist.store.attributes import GRAPH_KEYS, belongs_to
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.sharding import RowSharding


class TypedNodes(RowStorage, NodeStorage):
    """The attributes of a type of nodes."""

    @property
    def sharding(self) -> NodeSharding:
        """The sharding of these nodes."""
        return self._parent().node_shardings[self._key]  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """The device of this rank's rows."""
        return self._parent()._device  # type: ignore[no-any-return]

    @property
    def num_nodes(self) -> int:
        """Nodes of this type, over all ranks."""
        return self.sharding.size

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number != self.sharding.size:
            raise MixedRowsError(f"Setting num_nodes={number} would change a distributed graph: set it before")

    def is_node_attr(self, key: str) -> bool:
        """Whether an attribute has a row per node."""
        value = self[key]
        return isinstance(value, NodeTensor) and value._sharding is self.sharding

    def distributed(self, key: str, value: object) -> object:
        return _placed(key, value, self.sharding, "node")


class TypedEdges(RowStorage, EdgeStorage):
    """The edges of a relation, and their attributes."""

    @property
    def handle(self) -> DistributedEdgeIndex:
        """The ``edge_index`` or ``adj_t``."""
        return next(self._mapping[key] for key in GRAPH_KEYS if key in self._mapping)  # type: ignore[no-any-return]

    @property
    def num_edges(self) -> int:
        """Edges of this relation, over all ranks; none where a batch has only labels of it."""
        return self.handle.graph.edge_sharding.size if any(key in self._mapping for key in GRAPH_KEYS) else 0

    def is_edge_attr(self, key: str) -> bool:
        """Whether an attribute has a row per edge; also for the edges themselves."""
        value = self[key]
        rows: RowSharding | None = self.handle.graph.edge_sharding if isinstance(value, EdgeTensor) else None
        return isinstance(value, DistributedEdgeIndex) or (rows is not None and rows.is_equivalent(value._sharding))

    def _whole(self) -> EdgeStorage:
        whole = EdgeStorage(_parent=self._parent(), _key=self._key, edge_index=self.handle.full_tensor())
        if "edge_attr" in self:
            whole.edge_attr = self.edge_attr.full_tensor()
        return whole

    def is_coalesced(self) -> bool:
        """Whether the edges are sorted and none stands twice (collective: gathers all edges)."""
        return bool(self._whole().is_coalesced())

    def is_undirected(self) -> bool:
        """Whether each edge has its reverse, with equal ``edge_attr`` (collective: gathers all edges)."""
        return bool(self._whole().is_undirected())

    def has_isolated_nodes(self) -> bool:
        """Whether some node has no edge of this relation (collective: gathers all edges)."""
        return bool(self._whole().has_isolated_nodes())

    def distributed(self, key: str, value: object) -> object:
        if key in GRAPH_KEYS:
            is_first = not any(key in self._mapping for key in GRAPH_KEYS)
            return same_nodes(key, value, None if is_first else self.handle.graph)
        return _placed(key, value, self.handle.graph.edge_sharding, "edge")


def _placed(key: str, value: object, rows: RowSharding, kind: Literal["node", "edge"]) -> object:
    """An attribute as stored: a tensor with a row for each node of a type, or edge of a relation, gets the sharding."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    if isinstance(value, RowTensor):
        is_its = value._sharding is rows if kind == "node" else rows.is_equivalent(value._sharding)
        if is_its:
            return value
    sizes = (rows.size, None) if kind == "node" else (None, rows.size)
    return with_rows(key, value, rows) if belongs_to(key, value, *sizes) == kind else value
