"""What a script gives a loader of neighbours in a graph with types: read, checked, and made a sampler."""

from __future__ import annotations

from itertools import accumulate
from operator import index
from typing import Any

import torch
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NumNeighbors
from torch_geometric.typing import EdgeType

from pyg_dist.data.hetero import DistributedHeteroData
from pyg_dist.data.storage import TypedEdges
from pyg_dist.data.typed_batch import ready
from pyg_dist.errors import DataError, OptionError, UnsupportedError
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.inputs import (
    Inputs,
    Nodes,
    Relation,
    input_nodes_of,
    labelled_edges,
    negatives_of,
    sampling_over,
)
from pyg_dist.loader.known_nodes import SamplingRanks
from pyg_dist.loader.neighbors import NeighborSampling
from pyg_dist.loader.seeds import LinkSeeds, NodeSeeds, Steps


def nodes_of_types(data: HeteroData) -> dict[str, Nodes]:
    """The nodes of each type."""
    shardings = data.node_shardings if isinstance(data, DistributedHeteroData) else {}
    sizes = [int(store.num_nodes) for store in data.node_stores]
    firsts = accumulate(sizes, initial=0)
    return {
        kind: Nodes(size, shardings.get(kind), first)
        for kind, size, first in zip(data.node_types, sizes, firsts, strict=False)
    }


def node_seeds(data: HeteroData, input_nodes: Any) -> Inputs:
    """Those of a type, ``"paper"`` or ``("paper", ids or mask)`` (collective for a mask that is a node tensor)."""
    kind, given = (
        input_nodes if isinstance(input_nodes, tuple | list) and len(input_nodes) == 2 else (input_nodes, None)
    )
    found = nodes_of_types(data)
    if not isinstance(kind, str) or kind not in found:
        raise DataError(
            f"Expected input_nodes to be a type of nodes, or a pair of it and ids or a mask (got {input_nodes!r}): "
            f"the types are {', '.join(found)}"
        )
    nodes = found[kind]
    ids, input_id = input_nodes_of(nodes, given)
    return Inputs(ids.numel(), lambda steps: NodeSeeds(steps, ids + nodes.first, input_id), kind)


def link_seeds(data: HeteroData, edges: Any, label: Any, neg_sampling: Any, ratio: float | None) -> Inputs:
    """The ends of edges of a relation, which is given alone or with them (collective for those of the graph).

    Given with them, it may be one that the graph has no edges of, but for those whose ends are asked for.
    """
    given = edges if isinstance(edges, tuple | list) and edges else (None,)
    relation, chosen = (edges, None) if isinstance(given[0], str) else (given[0], given[-1])
    try:
        relation = data._to_canonical(*relation)
    except (TypeError, ValueError):
        relation = None
    is_new = relation is not None and chosen is not None and {relation[0], relation[-1]} <= set(data.node_types)
    if relation not in data.edge_types and not is_new:
        raise DataError(
            f"Expected edge_label_index to be a relation of the graph, or a pair of one and edges (got "
            f"{edges if chosen is None else given[0]!r}): the relations are {', '.join(map(str, data.edge_types))}"
        )
    found = nodes_of_types(data)
    ends = found[relation[0]], found[relation[-1]]
    negatives = negatives_of(ends, neg_sampling, ratio)
    if chosen is None:
        store = data[relation]
        chosen = store.handle.graph.full_edge_index() if isinstance(store, TypedEdges) else store.edge_index
    chosen, label = labelled_edges(ends, chosen, label, negatives)
    ids = chosen + torch.tensor([[nodes.first] for nodes in ends])
    ranges = ends[0].ids, ends[1].ids
    return Inputs(ids.shape[1], lambda steps: LinkSeeds(steps, ranges, ids, label, negatives), relation)


def fan_outs(data: HeteroData, num_neighbors: Any) -> list[list[int]]:
    """Lists of in-edges of a node by hop, of each relation.

    Raises:
        OptionError: A relation is missing, or is none of the graph, or they differ in hops.
    """
    return list(_by_relation(data, num_neighbors).values())


def _by_relation(data: HeteroData, num_neighbors: object) -> dict[EdgeType, list[int]]:
    try:
        given = num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(num_neighbors)
        found = given.get_values(data.edge_types)
        return {relation: [index(count) for count in found[relation]] for relation in data.edge_types}
    except (ValueError, TypeError, AssertionError) as error:
        raise OptionError(
            f"Expected num_neighbors to be a list of counts of each hop, or one for each relation (got "
            f"{num_neighbors!r}: {error}): give all relations as many hops"
        ) from None


def check(loader: str, data: HeteroData, options: dict[str, Any]) -> None:
    """Check what only a graph with types may not have, or has to."""
    if not isinstance(data, DistributedHeteroData) and not all("edge_index" in store for store in data.edge_stores):
        raise DataError("Expected relations with an edge_index (got none): T.ToEdgeIndex() makes it of adj_t")
    if options["subgraph_type"] == "bidirectional":
        raise UnsupportedError(
            f"Expected {loader} of a HeteroData with subgraph_type='directional' or 'induced' (got 'bidirectional'): "
            f"opposite edges are another relation's; T.ToUndirected() before adds them"
        )
    weight = options["weight_attr"]
    if weight is not None and not any(weight in store for store in data.edge_stores):
        raise DataError(f"Expected weight_attr to be an attribute of a relation (got {weight!r}): add it to data")


def sampling(
    data: HeteroData, num_neighbors: Any, inputs: Inputs, steps: Steps, options: dict[str, Any]
) -> NeighborSampling:
    """The sampler (collective)."""
    name, nodes = options["weight_attr"], nodes_of_types(data)
    weights = {relation: None if name is None else store.get(name) for relation, store in data.edge_items()}
    relations: dict[EdgeType, Relation] = {}
    if isinstance(data, DistributedHeteroData):
        ready(data)
        shardings = data.node_shardings
        own = [shardings[kind].global_id.cpu() + of_type.first for kind, of_type in nodes.items()]
        for relation, store in data.edge_items():
            graph = store.handle.graph
            relations[relation] = Relation.of(graph, weights[relation], nodes[relation[0]].first)
        shared_by = {store.handle.graph.ranks_per_machine for store in data.edge_stores} - {None}
        ranks = SamplingRanks.sharing(next(iter(shardings.values())).group, next(iter(shared_by), None))
    else:
        own = [torch.arange(of_type.first, of_type.ids.stop) for of_type in nodes.values()]
        for relation, store in data.edge_items():
            sizes = nodes[relation[0]].size, nodes[relation[-1]].size
            relations[relation] = Relation(InEdges.of_edge_index(store.edge_index, sizes, weights[relation]))
        ranks = SamplingRanks.alone()
    types = {kind: of_type.ids for kind, of_type in nodes.items()}
    counts = {relation: tuple(found) for relation, found in _by_relation(data, num_neighbors).items()}
    return sampling_over(types, own, relations, ranks, inputs, counts, steps, options)
