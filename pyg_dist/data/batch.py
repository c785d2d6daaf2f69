"""The subgraph that some nodes induce, as a ``DistributedData``: each rank cuts it from its own part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from pyg_dist.backend import host
from pyg_dist.backend.on_device import copied_to, on_device
from pyg_dist.backend.session.agreement import digest
from pyg_dist.errors import DataError, LayoutMismatchError, UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import SampledGraph
from pyg_dist.graph.sample import KeptEdges, Subset
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.operands import by_row_mask
from pyg_dist.tensor.row_index import PickedEdges, PickedNodes
from pyg_dist.tensor.sharding import RowSharding, require_same


def ready(data: Data) -> None:
    """Prepare subgraphs of ``data`` (collective at the first use)."""
    if data.graph.node_sharding.is_union:
        raise UnsupportedError(
            "Expected a graph, or a batch of one data group (got a batch of several): take the subgraph of the graph"
        )
    data.graph.prepare_subgraphs()
    for rows in (data.graph.edge_sharding, *(x._sharding for x in data._store.values() if isinstance(x, RowTensor))):
        rows.size  # noqa: B018 - counted


def induced(data: Data, sample: Subset) -> Data:
    """The subgraph, without attributes that learn (:func:`add_learning`). Not collective, once ready."""
    with torch.inference_mode(False):
        graph = data.graph.induced(sample)
        nodes, edges = graph.pick_nodes(), graph.pick_edges()
        of: Any = type(data)
        batch = of.__new__(of)
        known = {"n_id": nodes, "e_id": edges, **moved(sample.attributes, graph.device), **drawn_rows(sample, nodes)}
        attributes = cut(data._store, graph, nodes, edges, learns=False) | known
        if graph.device.type != "cpu":
            _make_ahead(graph, attributes.values())
        batch._adopt_rows(graph, data.plan, attributes)
    return batch


def _make_ahead(graph: SampledGraph, attributes: Iterable[object]) -> None:
    """Make operators, edges, selections by masks and random keys on the device now, so that a step need not wait."""
    values = [*attributes]
    for handle in values:
        if isinstance(handle, DistributedEdgeIndex):
            handle.edges(by_operator=True).make_ahead()
            values.append(handle.weight)
    graph.make_ahead(value for value in values if isinstance(value, EdgeTensor))
    rows = graph.node_sharding
    on_device(rows.rng_key, graph.device)
    if not rows.counts_selections:
        for value in values:
            if isinstance(value, NodeTensor) and value.dtype == torch.bool and value.dim() == 1:
                by_row_mask(rows, value)


def add_learning(data: Data, batch: Data) -> None:
    """Add the attributes that learn, at their present values; the gradient reaches those of ``data``."""
    batch._store._mapping.update(cut(data._store, batch.graph, batch.n_id, batch.e_id, learns=True))


def moved(attributes: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """A sample's attributes that are no rows of the graph, such as labels of edges, on the batch's device."""
    return {
        name: copied_to(value, device) if isinstance(value, Tensor) else value for name, value in attributes.items()
    }


def drawn_rows(sample: Subset, nodes: PickedNodes) -> dict[str, NodeTensor]:
    """A sample's attributes with a row for each of its nodes, by name."""
    return {
        name: NodeTensor.from_local(value[nodes.listed].to(nodes.device), nodes._sharding)
        for name, value in sample.node_attributes.items()
    }


def cut(
    attributes: Mapping[str, object],
    graph: SampledGraph | None,
    nodes: PickedNodes | None,
    edges: PickedEdges | None,
    learns: bool,
) -> dict[str, object]:
    """The attributes of a graph, or of one of its types, at a sample, by name: those that learn, or the others.

    ``graph`` has the sampled edges (``None``: these are attributes of nodes alone); ``nodes`` and ``edges`` are the
    sample's (``None``: no attribute has a row for each).
    """
    found: dict[str, object] = {}
    for name, value in attributes.items():
        if isinstance(value, DistributedEdgeIndex) and (graph is None or value.graph is not graph.parent):
            raise LayoutMismatchError(f"Expected one set of edges (got another one in '{name}'): delete it")
    for name, value in attributes.items():
        if isinstance(value, DistributedEdgeIndex):
            assert graph is not None
            weight = value.weight
            if weight is not None and weight.requires_grad is learns and edges is not None:
                weight = edges.fetch(weight)
            if not learns or weight is not value.weight:
                found[name] = type(value)(graph, weight)
        elif not isinstance(value, RowTensor):
            if not learns:
                found[name] = value
        elif value.requires_grad is learns:
            index = nodes if isinstance(value, NodeTensor) else edges
            is_tile = graph is not None and graph.parent.owns(value)
            rows = value._sharding
            if index is not None and not is_tile and _are_chosen(rows, index, nodes, edges):
                found[name] = value  # unchanged, as in PyG
                continue
            if index is None or not (rows is index.source or is_tile):
                raise LayoutMismatchError(
                    f"Expected '{name}' with a row for every node or edge of the graph (got {rows} that it "
                    f"had before): select it alike, or delete it"
                )
            found[name] = index.fetch(value)
    return found


def _are_chosen(rows: RowSharding, index: PickedNodes | PickedEdges, *picks: PickedNodes | PickedEdges | None) -> bool:
    """Whether a script has selected these rows; a batch keeps them, as PyG cuts only as many rows as nodes or edges."""
    if index.replicas is not None or rows is index.source or rows.whole is rows:
        return False
    size, *cut = (vars(of).get("size") for of in (rows, *(pick.source for pick in picks if pick is not None)))
    if size is None or None in cut:  # not counted yet, which would be collective
        return rows.whole is index.source
    return size not in cut


def plain_batch(data: Data, subset: Subset) -> Data:
    """The batch of a graph that one process has, as PyG makes it; for a subset that names its edges."""
    found = plain_attributes(data, data._store, subset, subset.kept)
    return data.__class__().update({**found, **subset.attributes, **subset.node_attributes})


def plain_attributes(
    data: Data | HeteroData, store: Any, nodes: Subset | None, kept: KeptEdges | None
) -> dict[str, object]:
    """Attributes of a plain graph, or of one of its types or relations, at a sample of its nodes, edges, or both."""
    found, node_id = dict[str, object](), None if nodes is None else nodes.node_id
    order: Any = None if kept is None else kept.key.argsort()
    edge_id = None if kept is None else kept.edge_id[order]
    for name, value in store.items():
        if kept is not None and name == "edge_index":
            found[name] = kept.edge_index(order).to(value.device)
            continue
        ids = node_id if store.is_node_attr(name) else edge_id if store.is_edge_attr(name) else None
        dim = 0 if ids is None else data.__cat_dim__(name, value, store)
        if ids is not None and isinstance(value, np.ndarray):  # maybe a mapped file, of which only these rows are read
            value = torch.from_numpy(value.take(ids.numpy(), axis=dim))
        elif ids is not None and isinstance(value, Tensor):
            value = value.index_select(dim, ids.to(value.device))
        found[name] = value
    if nodes is not None:
        found |= {"num_nodes": nodes.size, "n_id": node_id}
    return found if kept is None else {**found, "e_id": edge_id}


def chosen_nodes(data: Data, subset: object, what: str = "subset") -> Tensor:
    """Ascending ids of nodes that are given as ids or as a mask (collective: ranks compare them)."""
    if isinstance(subset, RowTensor):
        if subset._sharding is not data.graph.node_sharding:
            raise DataError(
                f"Expected '{what}' over the {data.num_nodes} nodes of data (got {subset._sharding} of another graph "
                f"or selection): select it alike"
            )
        subset = subset.full_tensor()
    ids: Tensor = torch.unique(listed_nodes(subset, data.num_nodes, what))
    require_same(data.graph.group, digest(ids), what)
    return ids


def listed_nodes(subset: object, num_nodes: int, what: str) -> Tensor:
    """Ids of nodes that are given as ids, whose order stays, or as a mask; int64. Not collective.

    Raises:
        DataError: They are neither.
    """
    if isinstance(subset, str) or subset is None:
        raise DataError(f"Expected '{what}' to be a mask of {num_nodes} nodes, or a list of ids (got {subset!r})")
    subset = host.as_tensor(subset)
    is_mask = subset.dtype == torch.bool
    is_fraction = subset.numel() > 0 and (subset.is_floating_point() or subset.is_complex())  # [] is float32
    if subset.dim() != 1 or (is_mask and subset.numel() != num_nodes) or is_fraction:
        raise DataError(
            f"Expected '{what}' to be a mask of {num_nodes} nodes, or a list of ids (got {subset.dtype} of shape "
            f"{list(subset.shape)})"
        )
    ids: Tensor = subset.nonzero().view(-1) if is_mask else subset.long()
    if ids.numel():
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= num_nodes:
            raise DataError(f"Expected ids in '{what}' between 0 and {num_nodes - 1} (got {low} to {high})")
    return ids
