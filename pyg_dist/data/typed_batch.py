"""Mini-batches of a graph with types, as ``DistributedHeteroData`` or plain: each rank cuts them from its own part."""

from __future__ import annotations

from typing import Any

import torch
from torch_geometric.data import HeteroData

from pyg_dist.data.batch import cut, drawn_rows, moved, plain_rows
from pyg_dist.data.hetero import DistributedHeteroData
from pyg_dist.graph.sample import TypedSubset


def ready(data: DistributedHeteroData) -> None:
    """Prepare batches of ``data`` (collective at the first use)."""
    for rows in data.node_shardings.values():
        rows.rows_by_id  # noqa: B018
    for store in data.edge_stores:
        store.handle.graph.edge_sharding.counts  # noqa: B018


def device_of(data: DistributedHeteroData) -> torch.device:
    """Where batches of ``data`` lie."""
    return data._device


def induced(data: DistributedHeteroData, sample: TypedSubset) -> DistributedHeteroData:
    """The batch, with all attributes but those that learn (:func:`add_learning`). Not collective, once ready."""
    with torch.inference_mode(False):
        nodes = {kind: whole.sampled(sample.nodes[kind]) for kind, whole in data.node_shardings.items()}
        batch: DistributedHeteroData = type(data).__new__(type(data))
        batch._begin(nodes, data.plan, data._device)
        batch._global_store._mapping.update(data._global_store._mapping)
        for kind, store in data.node_items():
            picked, drawn = nodes[kind].picked(data._device), sample.nodes[kind]
            known = {"n_id": picked, **moved(drawn.attributes, data._device), **drawn_rows(drawn, picked)}
            batch.get_node_store(kind)._mapping.update(cut(store, None, picked, None, learns=False) | known)
        for relation, store in data.edge_items():
            ends = nodes[relation[0]], nodes[relation[-1]]
            graph = store.handle.graph.between(*ends, sample.edges[relation])
            edges = graph.pick_edges()
            known = {"e_id": edges, **moved(sample.edge_attributes[relation], data._device)}
            batch.get_edge_store(*relation)._mapping.update(cut(store, graph, None, edges, learns=False) | known)
        for relation in sample.edge_attributes.keys() - sample.edges.keys():
            its = batch.get_edge_store(*relation)
            its._mapping.update(moved(sample.edge_attributes[relation], data._device))
    return batch


def add_learning(data: DistributedHeteroData, batch: DistributedHeteroData) -> None:
    """Add the attributes that learn, at their present values; the gradient reaches those of ``data``."""
    for kind, store in data.node_items():
        its = batch.get_node_store(kind)
        its._mapping.update(cut(store, None, its.n_id, None, learns=True))
    for relation, store in data.edge_items():
        its = batch.get_edge_store(*relation)
        graph: Any = its.handle.graph  # a batch's
        its._mapping.update(cut(store, graph, None, its.e_id, learns=True))


def plain_batch(data: HeteroData, sample: TypedSubset) -> HeteroData:
    """The batch of a graph that one process has, as PyG makes it."""
    batch = data.__class__()
    batch._global_store._mapping.update(data._global_store._mapping)
    for kind, store in data.node_items():
        nodes, its = sample.nodes[kind], batch[kind]
        for name, value in store.items():
            if store.is_node_attr(name):
                value = plain_rows(value, nodes.node_id, data.__cat_dim__(name, value, store))
            its[name] = value
        its.num_nodes, its.n_id = nodes.size, nodes.node_id
        for name, value in {**nodes.attributes, **nodes.node_attributes}.items():
            its[name] = value
    for relation, store in data.edge_items():
        kept, its = sample.edges[relation], batch[relation]
        order = kept.key.argsort()
        for name, value in store.items():
            if name == "edge_index":
                its.edge_index = kept.edge_index(order).to(value.device)
            elif store.is_edge_attr(name):
                its[name] = plain_rows(value, kept.edge_id[order], data.__cat_dim__(name, value, store))
            else:
                its[name] = value
        its.e_id = kept.edge_id[order]
    for relation, attributes in sample.edge_attributes.items():
        for name, value in attributes.items():
            batch[relation][name] = value
    return batch
