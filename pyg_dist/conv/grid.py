"""Convs over the grid layout: the same numbers from tiles (Plexus, Alg. 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GCNConv, SAGEConv
from torch_geometric.nn.aggr import MeanAggregation, SumAggregation

from pyg_dist.conv.inputs import edge_rows, features
from pyg_dist.conv.linear_order import can_project_last, commutes, project_first
from pyg_dist.errors import UnsupportedError
from pyg_dist.layout.edge_index import DistributedEdgeIndex
from pyg_dist.layout.grid.functions import linear_sum
from pyg_dist.layout.grid.graph import GridGraph, TileOperators, learns
from pyg_dist.layout.grid.tile_tensor import TileTensor
from pyg_dist.tensor import EdgeTensor, NodeTensor
from pyg_dist.tensor.functions.reductions import accumulation_dtype


def gcn_on_grid(
    conv: GCNConv,
    x: NodeTensor,
    graph: GridGraph,
    weight: EdgeTensor | None,
    operator: Callable[[torch.dtype], TileOperators | None],
    loop_value: float,
) -> Tensor:
    """GCN over tiles; the linear map comes first where that narrows the rows to sum (collective).

    Args:
        conv: the conv.
        x: ``[N, F_in]``.
        graph: what it runs over.
        weight: of the edges.
        operator: the matrix for x of a dtype, or ``None`` if its values learn.
        loop_value: the weight of the self loops that it adds.
    """

    def aggregate(tiles: TileTensor) -> TileTensor:
        matrix = operator(tiles.dtype)
        if matrix is not None:
            return graph.aggregate(tiles, matrix)
        assert weight is not None
        if not conv.normalize:
            return graph.aggregate(tiles, graph.neighbourhood("sum", weight, accumulation_dtype(tiles.dtype)))
        return graph.symmetric_norm_product(
            tiles, conv.add_self_loops, loop_value, weight, accumulation_dtype(tiles.dtype)
        )

    tiles = graph.place(x)
    dtype = torch.promote_types(x.dtype, (x if weight is None else weight).dtype)
    waits = can_project_last(conv.lin, x, dtype)
    if waits and not project_first(conv.lin, graph, tiles, operator(x.dtype)):
        return linear_sum([(aggregate(tiles), conv.lin.weight)], conv.bias)
    projected = conv.lin(tiles)
    if conv.normalize or weight is not None:
        # PyG's norm has the dtype of the weights or of x, which autocast does not change, and promotes.
        projected = projected.to(torch.promote_types(projected.dtype, dtype))
    out = aggregate(graph.place(projected))
    return out if conv.bias is None else out + conv.bias


def sage_on_grid(conv: SAGEConv, x: Any, edge_index: DistributedEdgeIndex) -> Tensor:
    """GraphSAGE over tiles: neighbours and root share one sum over the column axis (collective)."""
    graph: GridGraph = edge_index.graph  # type: ignore[assignment]
    # PyG reads the values of a torch.sparse adj_t where it multiplies by it, and ignores edge weights otherwise.
    has_weight = conv.fuse and graph.loop_rule == "add"
    weight = edge_rows(conv, edge_index, None) if has_weight else None
    if type(conv.aggr_module) not in (MeanAggregation, SumAggregation):
        raise UnsupportedError(
            f"{type(conv).__name__} with aggr={conv.aggr!r} needs every neighbour's row in one place, and the grid "
            f"layout has partial sums: use aggr='mean' or 'sum', or layout='halo'"
        )
    reduce: Literal["mean", "sum"] = "mean" if type(conv.aggr_module) is MeanAggregation else "sum"
    source, target = x if isinstance(x, (tuple, list)) else (x, x)
    source = features(conv, graph, source)
    if conv.project:
        source = graph.place(conv.lin(graph.place(source)).relu())
    source = graph.place(source)
    operator = graph.neighbourhood(reduce, weight, accumulation_dtype(source.dtype))
    root = graph.place(features(conv, graph, target)) if conv.root_weight and target is not None else None
    out = _combine(conv, graph, source, root, operator, learns(weight))
    return F.normalize(out, p=2.0, dim=-1) if conv.normalize else out


def _combine(
    conv: SAGEConv,
    graph: GridGraph,
    source: TileTensor,
    root: TileTensor | None,
    operator: TileOperators,
    learning: bool,
) -> Tensor:
    plain = commutes(conv.lin_l) and (root is None or commutes(conv.lin_r))
    if not plain or torch.is_autocast_enabled(source.device.type):
        out: Tensor = conv.lin_l(graph.aggregate(source, operator))
        return out if root is None else out + conv.lin_r(root)
    if project_first(conv.lin_l, graph, source, None if learning else operator):
        # Means and sums commute with linear maps: fewer columns to send and to add.
        out = graph.aggregate(linear_sum([(source, conv.lin_l.weight)]), operator)
        if root is not None:
            out = out + linear_sum([(root, conv.lin_r.weight)])
        return out if conv.lin_l.bias is None else out + conv.lin_l.bias
    if root is None:
        return linear_sum([(graph.aggregate(source, operator), conv.lin_l.weight)], conv.lin_l.bias)
    neighbours = graph.start(source, operator)
    # The root's way into the product's layout, and its own product, hide behind the neighbours' sum.
    moved = graph.align(root, source)
    return linear_sum([(moved, conv.lin_r.weight), (neighbours, conv.lin_l.weight)], conv.lin_l.bias)
