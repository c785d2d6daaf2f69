"""The seeds that a script gives, read and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling
from torch_geometric.typing import EdgeType

from pyg_dist.data import DistributedData
from pyg_dist.data.batch import listed_nodes, ready
from pyg_dist.errors import DataError, OptionError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.protocol import DistributedGraph, NodeSharding
from pyg_dist.loader.columns import Columns
from pyg_dist.loader.in_edges import InEdges
from pyg_dist.loader.known_nodes import SamplingRanks
from pyg_dist.loader.neighbors import ONE_TYPE, NeighborSampling
from pyg_dist.loader.seeds import LinkSeeds, Negatives, NodeSeeds, Seeds, Steps
from pyg_dist.tensor import EdgeTensor, RowTensor


@dataclass(frozen=True)
class Nodes:
    """The nodes of a graph, or of one of its types."""

    size: int
    sharding: NodeSharding | None = None  # of a graph over ranks
    first: int = 0  # ids of these begin there, counted through all types

    @staticmethod
    def of(data: Data) -> Nodes:
        """Those of a graph with one type."""
        return Nodes(data.num_nodes, data.graph.node_sharding if isinstance(data, DistributedData) else None)

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


Ends = tuple[Nodes, Nodes]
"""Where edges begin, and where they end."""


class Inputs(NamedTuple):
    """What a script gives a loader to begin batches with."""

    size: int  # inputs of an epoch
    seeds_of: Callable[[Steps], Seeds]  # those of its steps
    of: str | EdgeType | None = None  # the type of the seeds, or the relation whose ends they are


def node_seeds(data: Data, input_nodes: Any) -> Inputs:
    """Input nodes (collective for a mask that is a node tensor)."""
    ids, input_id = input_nodes_of(Nodes.of(data), input_nodes)
    return Inputs(ids.numel(), lambda steps: NodeSeeds(steps, ids, input_id))


def link_seeds(data: Data, edges: Any, label: Any, neg_sampling: Any, ratio: float | None) -> Inputs:
    """The ends of edges (collective for those of the graph)."""
    nodes = Nodes.of(data)
    negatives = negatives_of((nodes, nodes), neg_sampling, ratio)
    given = edges
    if given is None:
        given = data.graph.full_edge_index() if isinstance(data, DistributedData) else data.edge_index
    ids, label = labelled_edges((nodes, nodes), given, label, negatives)
    return Inputs(ids.shape[1], lambda steps: LinkSeeds(steps, (nodes.ids, nodes.ids), ids, label, negatives))


def input_nodes_of(nodes: Nodes, input_nodes: object) -> tuple[Tensor, Tensor]:
    """Ids in the order given, and where each was given: in the mask or list (collective for a node tensor)."""
    if input_nodes is None:
        return torch.arange(nodes.size), torch.arange(nodes.size)
    if isinstance(input_nodes, tuple):
        raise DataError("Expected 'input_nodes' without a node type (got a tuple): pass the ids or the mask alone")
    given = nodes.whole(input_nodes, "input_nodes")
    ids = listed_nodes(given, nodes.size, "input_nodes")
    if ids.numel() == 0:
        raise DataError("Expected input_nodes to be at least one node (got none): leave it out")
    if torch.unique(ids).numel() < ids.numel():
        raise DataError("Expected distinct 'input_nodes' (got some of them several times): pass each node once")
    return ids, ids if torch.as_tensor(given).dtype == torch.bool else torch.arange(ids.numel())


def negatives_of(ends: Ends, neg_sampling: object, ratio: float | None) -> Negatives:
    """What is drawn beside the edges (collective for weights that are node tensors)."""
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
    sums = torch.as_tensor(weight).detach().cpu().double().cumsum(0)
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
    edges = edges.cpu().long()
    for nodes, end in zip(ends, edges, strict=True):
        listed_nodes(end, nodes.size, "edge_label_index")
    if edges.shape[1] == 0:
        raise DataError("Expected edge_label_index to have at least one edge (got none): leave it out")
    if label is None:
        return edges, None
    if negatives.mode == "triplet":
        raise OptionError("Expected no edge_label with neg_sampling='triplet' (got one): leave it out")
    label = label.full_tensor() if isinstance(label, RowTensor) else torch.as_tensor(label)
    if label.dim() == 0 or label.shape[0] != edges.shape[1]:
        raise DataError(f"Expected 'edge_label' to have {edges.shape[1]} rows (got shape {list(label.shape)})")
    label = label.cpu()
    if negatives.mode == "binary" and not label.is_complex() and int(label.min()) == 0:
        label = label + 1  # zero is the label of negative edges
    return edges, label


def check(loader: str, data: Data, options: dict[str, Any]) -> None:
    """Check what is asked of a graph with one type alone."""
    if not isinstance(data, DistributedData) and "adj_t" in data:
        raise DataError("Expected a graph with edge_index (got none): T.ToEdgeIndex() makes it of adj_t")


def fan_outs(data: Data, num_neighbors: Any) -> list[Any]:
    """Lists of in-edges of a node by hop, unchecked: there is one."""
    return [None if isinstance(num_neighbors, dict | str) else num_neighbors]


def sampling(data: Data, num_neighbors: Any, inputs: Inputs, steps: Steps, options: dict[str, Any]) -> NeighborSampling:
    """The sampler of a graph with one type (collective)."""
    weight = None if options["weight_attr"] is None else data[options["weight_attr"]]
    if isinstance(data, DistributedData):
        ready(data)
        ranks, own = SamplingRanks.of(data.graph), data.graph.edge_view.sources.global_id
        relation = Relation.of(data.graph, weight)
    else:
        ranks, own = SamplingRanks.alone(), torch.arange(data.num_nodes)
        edge_index = torch.empty(2, 0) if data.edge_index is None else data.edge_index
        relation = Relation(InEdges.of_edge_index(edge_index, (data.num_nodes, data.num_nodes), weight))
    counts = {ONE_TYPE: tuple(int(count) for count in num_neighbors)}
    types = {"": range(data.num_nodes)}
    return sampling_over(types, [own.cpu()], {ONE_TYPE: relation}, ranks, inputs, counts, steps, options)


class Relation(NamedTuple):
    """The in-edges of a rank's nodes, whose sources are numbered as its own rows, then as other ranks' nodes."""

    in_edges: InEdges
    node_id: Tensor = torch.arange(0)  # of the latter, int64 ``[h]``
    owner: Tensor = torch.arange(0)  # their ranks, int64 ``[h]``

    @staticmethod
    def of(graph: DistributedGraph, weight: EdgeTensor | None, first: int = 0) -> Relation:
        """Of a graph over ranks, whose sources' ids begin at ``first`` (collective)."""
        view = graph.edge_view
        node_id, owner = (x[view.num_sources :].cpu() for x in (view.neighbour_id, view.neighbour_rank))
        return Relation(InEdges.of(graph, weight), node_id + first, owner)


def sampling_over(
    types: Mapping[str, range],
    own: Sequence[Tensor],
    relations: Mapping[EdgeType, Relation],
    ranks: SamplingRanks,
    inputs: Inputs,
    num_neighbors: Mapping[EdgeType, tuple[int, ...]],
    steps: Steps,
    options: dict[str, Any],
) -> NeighborSampling:
    """The sampler of a graph, given ids of each type, of this rank's nodes by type, and its edges (collective)."""
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
        input_type=inputs.of or "",
        num_neighbors=num_neighbors,
        seed=steps.seed,
        replace=bool(options["replace"]),
        subgraph_type=options["subgraph_type"] if options["directed"] else "induced",
        disjoint=bool(options["disjoint"]),
    )
