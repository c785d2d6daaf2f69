"""The subgraph that some nodes induce, as a ``DistributedData`` of its own: each rank takes it from its own part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import DataError, LayoutMismatchError, UnsupportedError
from pyg_dist.layout.edge_index import DistributedEdgeIndex
from pyg_dist.layout.grid.batch import GridBatch
from pyg_dist.layout.grid.graph import GridGraph
from pyg_dist.layout.halo.batch import HaloBatch
from pyg_dist.layout.halo.graph import HaloGraph
from pyg_dist.plan.sample import Sample
from pyg_dist.tensor import NodeTensor, RowTensor
from pyg_dist.tensor.picked_rows import PickedEdges, PickedNodes
from pyg_dist.tensor.sharding import require_same

if TYPE_CHECKING:
    from pyg_dist.data.distributed_data import DistributedData


Batch = HaloBatch | GridBatch


def data_group(data: DistributedData) -> tuple[int, int]:
    """The number of this rank's data group, and how many there are: ranks of several hold the same rows."""
    if isinstance(data.graph, GridGraph):
        mesh = data.graph.grid.mesh
        return mesh.coordinates["data"], mesh.shape.data
    groups = data.graph.node_sharding.groups
    return groups.index, groups.count


def ready(data: DistributedData) -> None:
    """Prepare subgraphs of ``data`` (collective at the first use).

    Raises:
        UnsupportedError: It is a batch of several data groups.
    """
    graph = data.graph
    if graph.node_sharding.is_union:
        raise UnsupportedError(
            "Expected a graph, or a batch of one data group (got a batch of several): take the subgraph of the graph"
        )
    if isinstance(graph, HaloGraph):
        graph.links  # noqa: B018
        return
    graph.stored_by_source  # noqa: B018
    graph.grid.mesh.connect_data_groups()


def induced(data: DistributedData, sample: Sample) -> DistributedData:
    """The subgraph, with all attributes but those that learn (:func:`add_learning`). Not collective, once ready.

    Raises:
        LayoutMismatchError: An edge attribute belongs to edges that ``data`` had before.
    """
    with torch.inference_mode(False):
        parent = data.graph
        graph: Batch = HaloBatch(parent, sample) if isinstance(parent, HaloGraph) else GridBatch(parent, sample)
        nodes, edges = graph.pick_nodes(), graph.pick_edges()
        batch = type(data).__new__(type(data))
        batch._adopt_rows(graph, data.plan, _attributes(data, graph, nodes, edges) | {"n_id": nodes, "e_id": edges})
    return batch


def _attributes(data: DistributedData, graph: Batch, nodes: PickedNodes, edges: PickedEdges) -> dict[str, Any]:
    """Everything of ``data`` at the sample that does not learn, by name."""
    attributes: dict[str, Any] = {}
    for name, value in data._store.items():
        if isinstance(value, DistributedEdgeIndex):
            if value.graph is not graph.parent:
                raise LayoutMismatchError(f"Expected one set of edges (got another one in '{name}'): delete it")
            weight = value.weight
            if weight is not None and not weight.requires_grad:
                weight = graph.picked(weight, edges)
            attributes[name] = DistributedEdgeIndex(graph, value.is_sparse, weight)
        elif not isinstance(value, RowTensor):
            attributes[name] = value
        elif not value.requires_grad:
            _require_rows(name, value, graph)
            attributes[name] = graph.picked(value, nodes if isinstance(value, NodeTensor) else edges)
    return attributes


def _require_rows(name: str, value: RowTensor, graph: Batch) -> None:
    parent = graph.parent
    if not parent.owns(value) and value._sharding is not parent.edge_sharding:
        raise LayoutMismatchError(
            f"Expected '{name}' with a row for every node or edge of the graph (got {value._sharding} that it had "
            f"before): select it alike, or delete it"
        )


def add_learning(data: DistributedData, batch: DistributedData) -> None:
    """Add the attributes that learn, at their present values; the gradient reaches those of ``data``."""
    graph: Batch = batch.graph
    for name, value in data._store.items():
        if isinstance(value, DistributedEdgeIndex):
            if value.weight is not None and value.weight.requires_grad:
                weight = graph.picked(value.weight, batch.e_id)
                batch._store._mapping[name] = DistributedEdgeIndex(graph, value.is_sparse, weight)
        elif isinstance(value, RowTensor) and value.requires_grad:
            _require_rows(name, value, graph)
            index = batch.n_id if isinstance(value, NodeTensor) else batch.e_id
            batch._store._mapping[name] = graph.picked(value, index)


def chosen_nodes(data: DistributedData, subset: Any, what: str = "subset") -> Tensor:
    """Ascending ids of nodes that are given as ids or as a mask (collective: ranks compare them).

    Raises:
        DataError: They are neither.
        AgreementError: The ranks were given different ones.
    """
    if isinstance(subset, RowTensor):
        if subset._sharding is not data.graph.node_sharding:
            raise DataError(f"Expected '{what}' over the {data.num_nodes} nodes of data (got {subset._sharding})")
        subset = subset.full_tensor()
    subset = torch.as_tensor(subset).cpu()
    num_nodes, is_mask = data.num_nodes, subset.dtype == torch.bool
    if subset.dim() != 1 or (is_mask and subset.numel() != num_nodes):
        raise DataError(
            f"Expected '{what}' to be a mask of {num_nodes} nodes, or a list of ids (got {subset.dtype} of shape "
            f"{list(subset.shape)})"
        )
    ids: Tensor = subset.nonzero().view(-1) if is_mask else torch.unique(subset.long())
    if ids.numel() and not (int(ids[0]) >= 0 and int(ids[-1]) < num_nodes):
        raise DataError(f"Expected ids in '{what}' between 0 and {num_nodes - 1} (got {int(ids[0])} to {int(ids[-1])})")
    require_same(data.graph.group, digest(ids), what)
    return ids
