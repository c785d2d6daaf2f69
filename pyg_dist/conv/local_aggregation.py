"""Aggregations other than sums (max, std, LSTM, ...): every neighbour's row is fetched first.

Maxima and minima read these rows in place; every other aggregation gets a message per edge, as in PyG.
"""

from __future__ import annotations

from inspect import signature
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import MessagePassing, aggr, norm
from torch_geometric.nn.aggr import Aggregation, EquilibriumAggregation, MaxAggregation, MinAggregation

from pyg_dist.backend.dense.indexed_rows import select
from pyg_dist.backend.sparse.matrix import extreme
from pyg_dist.conv.fast_paths import is_hooked
from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.layer_call import running
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.functions.random import own_randomness
from pyg_dist.tensor.operands import local_values

# Their result for a node depends on the other nodes (or their number), and a rank has only its own.
_MIXES_NODES = (
    nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, norm.GraphNorm, norm.GraphSizeNorm,
    norm.MeanSubtractionNorm, norm.PairNorm, EquilibriumAggregation,
)  # fmt: skip

_EXTREMES: dict[type[Aggregation], Literal["max", "min"]] = {MaxAggregation: "max", MinAggregation: "min"}
_REDUCTIONS: dict[type[Aggregation], str] = {
    aggr.SumAggregation: "sum", aggr.MeanAggregation: "mean", aggr.MulAggregation: "mul",
    MaxAggregation: "max", MinAggregation: "min",
}  # fmt: skip


def aggregate_neighbours(
    conv: MessagePassing, edge_index: DistributedEdgeIndex, x: NodeTensor, is_weighted: bool
) -> NodeTensor:
    """Apply a conv's ``aggr_module`` to the rows of in-neighbours, times an ``adj_t``'s values (collective)."""
    reduce = _EXTREMES.get(type(conv.aggr_module))
    if reduce is not None and not is_weighted:
        graph, rows = edge_index.graph.edge_view, x.to_rows().to_local()
        return NodeTensor.from_local(extreme(graph.neighbour_rows(rows, conv), graph.csr, reduce), graph.targets)
    edges = edge_index.edges()
    with running(conv):
        messages: Tensor = edges.end(0).fetch(x)
    if is_weighted:
        assert edges.weight is not None
        messages = messages * edges.weight.view(-1, 1)
    return aggregate_messages(conv.aggr_module, messages, edges)


def aggregate_messages(aggregation: Aggregation, messages: Tensor, edges: Edges) -> NodeTensor:
    """Apply a PyG aggregation to the messages of each node's in-edges, in PyG's order. Not collective.

    Exact: all in-edges of a node are on its rank. The aggregation runs on local rows, so its parameters' gradients are
    summed over ranks, and dropout in it draws other masks on each rank. Modules that mix nodes (batch norm) raise.

    Shapes: messages ``[E, ...]``, an edge tensor of ``edges``; output ``[N, ...]``.
    """
    if "forward" in vars(aggregation) or is_hooked(aggregation):
        raise UnsupportedError(
            f"Expected no hook on the aggregation {type(aggregation).__name__}, and no other forward of it (got one), "
            f"which would see the rows of one rank: change the messages or the output of the conv instead"
        )
    graph, local = edges.graph, local_values(messages, edges.rows)
    reduce = _REDUCTIONS.get(type(aggregation))
    if reduce is not None:
        out = edges.reduce(local, 1, reduce)
        return NodeTensor.from_local(out, graph.targets)
    for part in aggregation.modules():
        if isinstance(part, _MIXES_NODES) or (isinstance(part, norm.LayerNorm) and part.mode == "graph"):
            raise UnsupportedError(
                f"{type(part).__name__} inside of the aggregation {type(aggregation).__name__} looks at the nodes of "
                f"all ranks: normalise before or after the conv, or each row by itself (torch.nn.LayerNorm)"
            )
    # One more target comes first, whose messages are ones. Quantiles need a first target with two messages or more;
    # padded sequences need the same length on all ranks (LSTM reads the last position).
    num_padding = edges.max_in_degree if _pads(aggregation) else 2
    padding = local.new_ones(num_padding, *local.shape[1:])
    order = edges.by_target
    target = torch.cat([edges.target.new_zeros(num_padding), edges.target.index_select(0, order) + 1])
    padded = torch.cat([padding, select(local, order)])
    entered = {name: graph.targets.copy_to_ranks(p) for name, p in aggregation.named_parameters()}
    options = {"dim_size": graph.num_local + 1, "dim": 0 if padded.dim() != 2 else -2}
    with own_randomness(graph.group.rank, graph.device):
        out = functional_call(aggregation, entered, (padded, target), options)
    return NodeTensor.from_local(out[1:], graph.targets)


def _pads(aggregation: Aggregation) -> bool:
    """Whether the aggregation pads sequences of messages to the largest in-degree."""
    return any(
        "max_num_elements" in signature(part.forward).parameters
        for part in aggregation.modules()
        if isinstance(part, Aggregation)
    )
