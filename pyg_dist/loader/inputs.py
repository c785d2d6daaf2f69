"""The seeds that a script gives, read and checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.sampler import NegativeSampling

from pyg_dist.data import DistributedData
from pyg_dist.data.batch import listed_nodes
from pyg_dist.errors import DataError, OptionError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.loader.seeds import Negatives
from pyg_dist.tensor import RowTensor


def _whole(data: Data, value: Any, what: str) -> Any:
    """A row tensor's values on every rank (collective)."""
    if not isinstance(value, RowTensor):
        return value
    if isinstance(data, DistributedData) and value._sharding is not data.graph.node_sharding:
        raise DataError(
            f"Expected '{what}' over the nodes of data (got {value._sharding} of another graph or selection)"
        )
    return value.full_tensor()


def input_nodes_of(data: Data, input_nodes: Any) -> Tensor:
    """Ids in the order given (collective for a mask that is a node tensor)."""
    if input_nodes is None:
        return torch.arange(data.num_nodes)
    if isinstance(input_nodes, tuple):
        raise DataError("Expected 'input_nodes' without a node type (got a tuple): pass the ids or the mask alone")
    ids = listed_nodes(_whole(data, input_nodes, "input_nodes"), data.num_nodes, "input_nodes")
    if ids.numel() == 0:
        raise DataError("Expected input_nodes to be at least one node (got none): leave it out")
    if torch.unique(ids).numel() < ids.numel():
        raise DataError("Expected distinct 'input_nodes' (got some of them several times): pass each node once")
    return ids


def negatives_of(data: Data, neg_sampling: Any, ratio: float | None) -> Negatives:
    """What is drawn beside the edges (collective for weights that are node tensors)."""
    if ratio:
        if neg_sampling is not None:
            raise OptionError("Expected neg_sampling or neg_sampling_ratio (got both): leave one out")
        neg_sampling = NegativeSampling("binary", ratio)
    try:
        cast = NegativeSampling.cast(neg_sampling)
    except (TypeError, ValueError, AttributeError) as error:
        raise OptionError(
            f"Expected neg_sampling to be 'binary', 'triplet' or a NegativeSampling (got {neg_sampling!r})"
        ) from error
    if cast is None:
        return Negatives()
    source, target = (
        _sums_of_weights(data, weight, name)
        for name, weight in (("src_weight", cast.src_weight), ("dst_weight", cast.dst_weight))
    )
    return Negatives("triplet" if cast.is_triplet() else "binary", float(cast.amount), source, target)


def _sums_of_weights(data: Data, weight: Any, name: str) -> Tensor | None:
    """Sums up to each node, float64 ``[N]``, of the weights by which nodes are drawn (collective for node tensors)."""
    weight = _whole(data, weight, name)
    if weight is None:
        return None
    sums = torch.as_tensor(weight).detach().cpu().double().cumsum(0)
    if sums.shape != (data.num_nodes,) or not bool((weight >= 0).all()) or not 0 < float(sums[-1]) < float("inf"):
        raise DataError(
            f"Expected '{name}' of neg_sampling to be {data.num_nodes} weights of at least 0, not all 0 (got shape "
            f"{list(sums.shape)}): give each node one"
        )
    return sums


def labelled_edges(data: Data, edges: Any, label: Any, negatives: Negatives) -> tuple[Tensor, Tensor | None]:
    """The edges and their labels (collective for those of the graph)."""
    edges = data.edge_index if edges is None else edges
    if isinstance(edges, DistributedEdgeIndex):
        edges = edges.full_tensor()
    if isinstance(edges, tuple) or not isinstance(edges, Tensor) or edges.dim() != 2 or edges.shape[0] != 2:
        got = list(edges.shape) if isinstance(edges, Tensor) else type(edges).__name__
        raise DataError(f"Expected 'edge_label_index' to be a tensor of shape [2, n] (got {got})")
    edges = edges.cpu().long()
    listed_nodes(edges.reshape(-1), data.num_nodes, "edge_label_index")
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
