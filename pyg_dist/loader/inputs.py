"""The arguments of neighbour loaders, read and checked: seeds, numbers of neighbours, weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NegativeSampling, NumNeighbors
from torch_geometric.typing import EdgeType

from pyg_dist.backend import host
from pyg_dist.data.batch import listed_nodes
from pyg_dist.errors import DataError, OptionError, UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph, NodeSharding
from pyg_dist.loader.batches import cutter_of, is_distributed
from pyg_dist.loader.columns import Columns
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.known_nodes import SamplingRanks
from pyg_dist.loader.neighbors import ONE_TYPE, NeighborSampling
from pyg_dist.loader.seeds import LinkSeeds, Negatives, NodeSeeds, Seeds, Steps
from pyg_dist.tensor import EdgeTensor, RowTensor


@dataclass(frozen=True)
class Nodes:
    """The nodes of a type; a graph without types has one, ``""``."""

    size: int
    sharding: NodeSharding | None  # of a graph over ranks
    first: int  # ids of these begin there, counted through all types

    @property
    def ids(self) -> range:
        """Counted through all types."""
        return range(self.first, self.first + self.size)

    def whole(self, value: object, what: str) -> object:
        """A row tensor's values on every rank (collective)."""
        if not isinstance(value, RowTensor):
            return value
        if self.sharding is not None and value._sharding is not self.sharding:
            raise DataError(
                f"Expected '{what}' over the nodes of data (got {value._sharding} of another graph, type or selection)"
            )
        return value.full_tensor()


def nodes_of(data: Data | HeteroData) -> dict[str, Nodes]:
    """The nodes of each type."""
    if not isinstance(data, HeteroData):
        return {"": Nodes(data.num_nodes, data.graph.node_sharding if is_distributed(data) else None, 0)}
    shardings = data.node_shardings if is_distributed(data) else {}
    sizes = [int(store.num_nodes) for store in data.node_stores]
    firsts = accumulate(sizes, initial=0)
    return {
        kind: Nodes(size, shardings.get(kind), first)
        for kind, size, first in zip(data.node_types, sizes, firsts, strict=False)
    }


def stores_of(data: Data | HeteroData) -> dict[EdgeType, Any]:
    """The store with the edges of each relation; without types the graph itself."""
    return dict(data.edge_items()) if isinstance(data, HeteroData) else {ONE_TYPE: data}


def _graph_of(store: Any) -> DistributedGraph:
    graph: DistributedGraph = store.graph if isinstance(store, Data) else store.handle.graph
    return graph


Ends = tuple[Nodes, Nodes]
"""Where edges begin, and where they end."""


class Inputs(NamedTuple):
    """The inputs of a loader: nodes or edges from which batches begin."""

    size: int  # inputs of an epoch
    seeds_of: Callable[[Steps], Seeds]  # makes the seeds of steps
    of: str | EdgeType  # the type of the seeds, or the relation whose ends they are


def node_seeds(data: Data | HeteroData, input_nodes: Any) -> Inputs:
    """Input nodes; of types ``"paper"`` or ``("paper", ids or mask)`` (collective for a mask that is a node tensor)."""
    found, kind, given = nodes_of(data), "", input_nodes
    if isinstance(data, HeteroData):
        is_pair = isinstance(given, tuple | list) and len(given) == 2
        kind, given = given if is_pair else (given, None)
        if not isinstance(kind, str) or kind not in found:
            raise DataError(
                f"Expected input_nodes to be a type of nodes, or a pair of it and ids or a mask (got {input_nodes!r}): "
                f"the types are {', '.join(found)}"
            )
    nodes = found[kind]
    ids, input_id = input_nodes_of(nodes, given)
    return Inputs(ids.numel(), lambda steps: NodeSeeds(steps, ids + nodes.first, input_id), kind)


def link_seeds(
    data: Data | HeteroData, edges: object, label: object, neg_sampling: object, ratio: float | None
) -> Inputs:
    """The ends of edges (collective for the graph's edges). With types a relation is given, alone or with edges.

    A relation that the graph does not have may be given with edges, which are then only labelled.
    """
    relation, chosen = _relation_of(data, edges) if isinstance(data, HeteroData) else (ONE_TYPE, edges)
    found = nodes_of(data)
    ends = found[relation[0]], found[relation[-1]]
    negatives = negatives_of(ends, neg_sampling, ratio)
    if chosen is None:
        store = stores_of(data)[relation]
        chosen = _graph_of(store).full_edge_index() if is_distributed(data) else store.edge_index
    chosen, label = labelled_edges(ends, chosen, label, negatives)
    ids = chosen + host.tensor([[nodes.first] for nodes in ends])
    ranges = ends[0].ids, ends[1].ids
    of = "" if relation == ONE_TYPE else relation
    return Inputs(ids.shape[1], lambda steps: LinkSeeds(steps, ranges, ids, label, negatives), of)


def _relation_of(data: HeteroData, edges: Any) -> tuple[EdgeType, object]:
    """The relation in ``edge_label_index``, and the edges that are given with it, or ``None``."""
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
    return relation, chosen


def input_nodes_of(nodes: Nodes, input_nodes: object) -> tuple[Tensor, Tensor]:
    """Ids in the order given, and the ``input_id`` of each: its place in the mask or list (collective for rows)."""
    if input_nodes is None:
        return host.arange(nodes.size), host.arange(nodes.size)
    if isinstance(input_nodes, tuple):
        raise DataError("Expected 'input_nodes' without a node type (got a tuple): pass the ids or the mask alone")
    given = nodes.whole(input_nodes, "input_nodes")
    ids = listed_nodes(given, nodes.size, "input_nodes")
    if ids.numel() == 0:
        raise DataError("Expected input_nodes to be at least one node (got none): leave it out")
    if torch.unique(ids).numel() < ids.numel():
        raise DataError("Expected distinct 'input_nodes' (got some of them several times): pass each node once")
    return ids, ids if host.as_tensor(given).dtype == torch.bool else host.arange(ids.numel())


def negatives_of(ends: Ends, neg_sampling: object, ratio: float | None) -> Negatives:
    """The negative samples that are drawn with the edges (collective for weights that are node tensors)."""
    if ratio and neg_sampling is not None:
        raise OptionError("Expected neg_sampling or neg_sampling_ratio (got both): leave one out")
    try:
        cast = NegativeSampling("binary", ratio) if ratio else NegativeSampling.cast(neg_sampling)
    except (TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            f"Expected neg_sampling to be 'binary', 'triplet' or a NegativeSampling (got {neg_sampling!r}), and "
            f"neg_sampling_ratio a number from 0 (got {ratio!r})"
        ) from error
    if cast is None:
        return Negatives()
    source, target = (
        _sums_of_weights(nodes, weight, name)
        for nodes, name, weight in zip(
            ends, ("src_weight", "dst_weight"), (cast.src_weight, cast.dst_weight), strict=True
        )
    )
    return Negatives("triplet" if cast.is_triplet() else "binary", float(cast.amount), source, target)


def _sums_of_weights(nodes: Nodes, weight: Any, name: str) -> Tensor | None:
    """Sums up to each node, float64 ``[N]``, of the weights by which nodes are drawn (collective for node tensors)."""
    weight = nodes.whole(weight, name)
    if weight is None:
        return None
    sums = host.as_tensor(weight).detach().double().cumsum(0)
    if sums.shape != (nodes.size,) or not bool((weight >= 0).all()) or not 0 < float(sums[-1]) < float("inf"):
        raise DataError(
            f"Expected '{name}' of neg_sampling to be {nodes.size} weights of at least 0, not all 0 (got shape "
            f"{list(sums.shape)}): give each node one"
        )
    return sums


def labelled_edges(ends: Ends, edges: object, label: object, negatives: Negatives) -> tuple[Tensor, Tensor | None]:
    """The edges and their labels (collective for those of the graph)."""
    if isinstance(edges, DistributedEdgeIndex):
        edges = edges.full_tensor()
    if isinstance(edges, tuple) or not isinstance(edges, Tensor) or edges.dim() != 2 or edges.shape[0] != 2:
        got = list(edges.shape) if isinstance(edges, Tensor) else type(edges).__name__
        raise DataError(f"Expected 'edge_label_index' to be a tensor of shape [2, n] (got {got})")
    if edges.dtype == torch.bool or edges.is_floating_point() or edges.is_complex():
        raise DataError(f"Expected ids in 'edge_label_index' (got {edges.dtype}): pass integers")
    edges = edges.cpu().long()
    for nodes, end in zip(ends, edges, strict=True):
        listed_nodes(end, nodes.size, "edge_label_index")
    if edges.shape[1] == 0:
        raise DataError("Expected edge_label_index to have at least one edge (got none): leave it out")
    if label is None:
        return edges, None
    if negatives.mode == "triplet":
        raise OptionError("Expected no edge_label with neg_sampling='triplet' (got one): leave it out")
    if isinstance(label, RowTensor):
        label = label.full_tensor()
    try:
        label = host.as_tensor(label)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"Expected 'edge_label' to be numbers (got a {type(label).__name__} of others)") from None
    if label.dim() == 0 or label.shape[0] != edges.shape[1]:
        raise DataError(f"Expected 'edge_label' to have {edges.shape[1]} rows (got shape {list(label.shape)})")
    if negatives.mode == "binary" and not label.is_complex() and bool(label.min() == 0):
        label = label + 1  # zero is the label of negative edges
    return edges, label


def check(loader: str, data: Data | HeteroData, options: dict[str, object]) -> None:
    """Check the graph, and the options that depend on its types."""
    is_typed, stores = isinstance(data, HeteroData), stores_of(data)
    has_ends = all("edge_index" in store for store in stores.values()) if is_typed else "adj_t" not in data
    if not is_distributed(data) and not has_ends:
        raise DataError("Expected edges as edge_index (got none): T.ToEdgeIndex() makes it of adj_t")
    if is_typed and options["subgraph_type"] == "bidirectional":
        raise UnsupportedError(
            f"Expected {loader} of a HeteroData with subgraph_type='directional' or 'induced' (got 'bidirectional'): "
            f"opposite edges are another relation's; T.ToUndirected() before adds them"
        )
    weight = options["weight_attr"]
    if is_typed and weight is not None and not any(weight in store for store in stores.values()):
        raise DataError(f"Expected weight_attr to be an attribute of a relation (got {weight!r}): add it to data")


def fan_outs(data: Data | HeteroData, num_neighbors: object) -> dict[EdgeType, tuple[int, ...]]:
    """In-edges of a node by hop, of each relation.

    Raises:
        OptionError: One is missing, or is none of the graph, or they differ in hops, or are no counts.
    """
    wrong = OptionError(
        f"Expected num_neighbors to be a list of counts of each hop, -1 for all (got {num_neighbors!r})"
    )
    try:
        if isinstance(data, HeteroData):
            given = num_neighbors if isinstance(num_neighbors, NumNeighbors) else NumNeighbors(num_neighbors)
            lists = given.get_values(data.edge_types)
        else:
            lists = {ONE_TYPE: None if isinstance(num_neighbors, dict | str) else num_neighbors}
        counts = {relation: tuple(map(index, lists[relation])) for relation in stores_of(data)}
    except (ValueError, TypeError, AssertionError) as error:
        if not isinstance(data, HeteroData):
            raise wrong from None
        raise OptionError(
            f"Expected num_neighbors to be a list of counts of each hop, or one for each relation (got "
            f"{num_neighbors!r}: {error}): give all relations as many hops"
        ) from None
    if any(min(of_hops, default=0) < -1 for of_hops in counts.values()):
        raise wrong
    if isinstance(num_neighbors, Tensor) and num_neighbors.dim() != 1:
        raise wrong
    return counts


class Relation(NamedTuple):
    """The in-edges of a rank's nodes; sources are numbered by its own rows, then by nodes of other ranks."""

    in_edges: InEdges
    node_id: Tensor = host.arange(0)  # ids of the other ranks' nodes, int64 ``[h]``
    owner: Tensor = host.arange(0)  # their ranks, int64 ``[h]``

    @staticmethod
    def of(graph: DistributedGraph, weight: EdgeTensor | None, first: int = 0) -> Relation:
        """The relation of a graph over ranks; ids of its sources begin at ``first`` (collective)."""
        view = graph.edge_view
        node_id, owner = (x[view.num_sources :].cpu() for x in (view.neighbour_id, view.neighbour_rank))
        return Relation(InEdges.of(graph, weight), node_id + first, owner)


def sampling(
    data: Data | HeteroData,
    num_neighbors: Mapping[EdgeType, tuple[int, ...]],
    inputs: Inputs,
    steps: Steps,
    options: dict[str, Any],
) -> NeighborSampling:
    """The sampler of a graph (collective)."""
    name, nodes, relations = options["weight_attr"], nodes_of(data), dict[EdgeType, Relation]()
    types = {kind: of_type.ids for kind, of_type in nodes.items()}
    if is_distributed(data):
        cutter_of(data).ready(data)
        if isinstance(data, HeteroData):
            rows = [*data.node_shardings.values()]
            shared_by = {store.handle.graph.ranks_per_machine for store in data.edge_stores} - {None}
            ranks = SamplingRanks.sharing(rows[0].group, next(iter(shared_by), None))
        else:
            rows, ranks = [data.graph.edge_view.sources], SamplingRanks.of(data.graph)
        own = [here.global_id.cpu() + of_type.first for here, of_type in zip(rows, nodes.values(), strict=True)]
    else:
        ranks, own = SamplingRanks.alone(), [host.arange(ids.start, ids.stop) for ids in types.values()]
    for key, store in stores_of(data).items():
        ends, weight = (nodes[key[0]], nodes[key[-1]]), None if name is None else store.get(name)
        if is_distributed(data):
            relations[key] = Relation.of(_graph_of(store), weight, ends[0].first)
        else:
            edge_index = host.empty(2, 0) if store.edge_index is None else store.edge_index
            relations[key] = Relation(InEdges.of_edge_index(edge_index, (ends[0].size, ends[1].size), weight))
    others = [(relation.node_id, relation.owner) for relation in relations.values()]
    columns, of_rows, of_others = Columns.of(own, others, sum(map(len, types.values())), ranks.part)
    rows_of = dict(zip(types, of_rows, strict=True))
    in_edges = {
        key: relation.in_edges.renumbered(torch.cat([rows_of[key[0]], of_other]))
        for (key, relation), of_other in zip(relations.items(), of_others, strict=True)
    }
    return NeighborSampling(
        ranks=ranks,
        columns=columns,
        in_edges=in_edges,
        types=types,
        seeds=inputs.seeds_of(steps),
        input_type=inputs.of,
        num_neighbors=num_neighbors,
        seed=steps.seed,
        replace=bool(options["replace"]),
        subgraph_type=options["subgraph_type"] if options["directed"] else "induced",
        disjoint=bool(options["disjoint"]),
    )
