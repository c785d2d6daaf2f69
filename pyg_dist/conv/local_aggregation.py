"""Aggregations that cannot use partial sums (max, std, LSTM, ...): every neighbour's row is fetched first.

Extremes read the rows where they lie; every other aggregation gets a message per edge, as in PyG.
"""

from __future__ import annotations

from inspect import signature
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch_geometric.nn import MessagePassing, aggr, norm
from torch_geometric.nn.aggr import Aggregation, EquilibriumAggregation, MaxAggregation, MinAggregation

from pyg_dist.backend import ops
from pyg_dist.backend.dense.large_tensors import select
from pyg_dist.backend.sparse.matrix import extreme
from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import EdgeView
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.functions.random import own_randomness
from pyg_dist.tensor.row_tensor import local_values

# What one node gets from these depends on the other nodes (or on their number), and a rank aggregates only its own.
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
    conv: MessagePassing, graph: EdgeView, x: NodeTensor, weight: Tensor | None = None
) -> NodeTensor:
    """Apply a conv's aggregation to the (weighted) rows of each node's in-neighbours, in input order of the edges.

    Exact: all in-edges of a node are executed on its rank. Parameters of the aggregation enter, since it runs on
    local rows. Dropout inside of it draws other masks on each rank. A part that looks at several nodes, as batch norm
    does, is refused. Collective.

    The conv's ``aggr_module`` is any of ``torch_geometric.nn.aggr``; ``weight`` is in edge storage order, ``[e]``.

    Shapes: output ``[N, F']``.
    """
    rows, aggregation = x.to_rows().to_local(), conv.aggr_module
    reduce = _EXTREMES.get(type(aggregation))
    if reduce is not None and weight is None and rows.dim() == 2 and rows.dtype in ops.FLOATS:
        return NodeTensor.from_local(extreme(graph.neighbour_rows(rows, conv), graph.csr, reduce), graph.targets)
    _require_node_by_node(aggregation)
    # One more target, with ones for messages, keeps alive what PyG's aggregations lean on: a first target that has
    # messages, two at least (quantiles); and, where sequences are padded (LSTM reads the last place), one length.
    num_padding = graph.max_in_degree if _pads(aggregation) else 2
    source, target = graph.neighbour_lists(num_padding)
    messages = torch.cat([graph.neighbour_rows(rows, conv), rows.new_ones(1, rows.shape[1])]).index_select(0, source)
    if weight is not None:
        messages = messages * torch.cat([weight.new_ones(num_padding), graph.csr.values(weight)]).view(-1, 1)
    return _aggregate_padded(aggregation, graph, messages, target)


def aggregate_messages(aggregation: Aggregation, messages: Tensor, edges: Edges) -> NodeTensor:
    """Apply a PyG aggregation to the messages of each node's in-edges, in PyG's order. Exact; not collective.

    Shapes: messages ``[E, ...]``, an edge tensor of ``edges``; output ``[N, ...]``.
    """
    graph, local = edges.graph, local_values(messages, edges.rows)
    reduce = _REDUCTIONS.get(type(aggregation))
    if reduce is not None:
        out = edges.reduce(local, 1, reduce)
        return NodeTensor.from_local(out, graph.targets)
    _require_node_by_node(aggregation)
    num_padding = edges.max_in_degree if _pads(aggregation) else 2
    padding = local.new_ones(num_padding, *local.shape[1:])
    order = edges.by_target
    target = torch.cat([edges.target.new_zeros(num_padding), edges.target.index_select(0, order) + 1])
    return _aggregate_padded(aggregation, graph, torch.cat([padding, select(local, order)]), target)


def _aggregate_padded(aggregation: Aggregation, graph: EdgeView, messages: Tensor, target: Tensor) -> NodeTensor:
    """Aggregate local messages, of which the first are those of the padding, target 0."""
    entered = {name: graph.targets.copy_to_ranks(p) for name, p in aggregation.named_parameters()}
    num_targets = graph.num_local + 1
    dim = 0 if messages.dim() != 2 else -2
    with own_randomness(graph.group.rank, graph.device):
        out = functional_call(aggregation, entered, (messages, target), {"dim_size": num_targets, "dim": dim})
    return NodeTensor.from_local(out[1:], graph.targets)


def _require_node_by_node(aggregation: Aggregation) -> None:
    for part in aggregation.modules():
        if isinstance(part, _MIXES_NODES) or (isinstance(part, norm.LayerNorm) and part.mode == "graph"):
            raise UnsupportedError(
                f"{type(part).__name__} inside of the aggregation {type(aggregation).__name__} looks at the nodes of "
                f"all ranks: normalise before or after the conv, or each row by itself (torch.nn.LayerNorm)"
            )


def _pads(aggregation: Aggregation) -> bool:
    """Whether it, or a part of it, makes dense sequences whose length is the largest in-degree."""
    return any(
        "max_num_elements" in signature(part.forward).parameters
        for part in aggregation.modules()
        if isinstance(part, Aggregation)
    )
