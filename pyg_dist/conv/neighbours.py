"""Aggregations that no partial sum can stand for (max, std, LSTM, …): every neighbour's row comes here first.

Extremes read the rows where they lie; every other aggregation gets a message per edge, as in PyG.
"""

from __future__ import annotations

from inspect import signature
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch_geometric.nn.aggr import Aggregation, MaxAggregation, MinAggregation

from pyg_dist.backend.aggregate import halo_rows
from pyg_dist.backend.extremes import extreme
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.halo_graph import HaloGraph

_EXTREMES: dict[type[Aggregation], Literal["max", "min"]] = {MaxAggregation: "max", MinAggregation: "min"}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def aggregate_neighbours(
    aggregation: Aggregation, graph: HaloGraph, x: NodeTensor, weight: Tensor | None = None
) -> NodeTensor:
    """Apply a PyG aggregation to the (weighted) rows of each node's in-neighbours, in input order of the edges.

    Exact: all in-edges of a node are executed on its rank. Parameters of the aggregation enter, since it runs on
    local rows. Collective.

    Args:
        aggregation: any ``torch_geometric.nn.aggr`` module.
        graph: the graph.
        x: ``[N, F]``.
        weight: edge weights in edge storage order, ``[e]``, or ``None``.

    Shapes:
        - output: ``[N, F']``
    """
    rows = x.to_local()
    reduce = _EXTREMES.get(type(aggregation))
    if reduce is not None and weight is None and rows.dim() == 2 and rows.dtype in _DTYPES:
        arrived = halo_rows(rows, graph.exchange)
        sources = torch.cat([rows, arrived]) if arrived.shape[0] else rows
        return NodeTensor.from_local(extreme(sources, graph.whole, reduce), graph.node_rows)  # type: ignore[return-value]
    # One more target, with ones for messages, keeps alive what PyG's aggregations lean on: no empty input, a first
    # target that has messages, and, where sequences are padded (LSTM reads the last place), one length on every rank.
    num_padding = graph.max_in_degree if _pads(aggregation) else 1
    source, target = graph.neighbour_lists(num_padding)
    messages = torch.cat([rows, halo_rows(rows, graph.exchange), rows.new_ones(1, rows.shape[1])]).index_select(
        0, source
    )
    if weight is not None:
        messages = messages * torch.cat([weight.new_ones(num_padding), weight[graph.whole.edge]]).view(-1, 1)
    entered = {name: graph.node_rows.enter(p) for name, p in aggregation.named_parameters()}
    num_targets = graph.num_local + 1
    out = functional_call(aggregation, entered, (messages, target), {"dim_size": num_targets, "dim": -2})
    return NodeTensor.from_local(out[1:], graph.node_rows)  # type: ignore[return-value]


def _pads(aggregation: Aggregation) -> bool:
    """Whether it, or a part of it, makes dense sequences whose length is the largest in-degree."""
    return any(
        "max_num_elements" in signature(part.forward).parameters
        for part in aggregation.modules()
        if isinstance(part, Aggregation)
    )
