"""Attention convs by one op: PyG's forward runs as it is, its steps on edges become one call without edge tensors.

``GATConv`` and ``GATv2Conv`` ask for attention weights (``edge_updater``) and then for the sum that these weigh
(``propagate``); ``TransformerConv`` does both in ``message``. Within :func:`fusing` the first request is answered by
:class:`Pending`, which the second one carries out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn.aggr import SumAggregation

from pyg_dist.backend import ops
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.ops.attention import MAX_HEADS
from pyg_dist.backend.sparse.attention import attention
from pyg_dist.conv.inputs import changed_step
from pyg_dist.conv.linear_order import commutes
from pyg_dist.layout.edges import Edges
from pyg_dist.layout.node_edge import neighbour_rows
from pyg_dist.tensor import NodeTensor
from pyg_dist.tensor.functions.random import draw_seed
from pyg_dist.tensor.row_tensor import local_values

_CONVS = (GATConv, GATv2Conv, TransformerConv)
_CODE = ("forward", "message", "edge_update", "aggregate", "update", "message_and_aggregate", "edge_updater")

_running: MessagePassing | None = None


@contextmanager
def fusing(conv: Any, given: dict[str, Any]) -> Iterator[None]:
    """Within it, ``conv``, called with ``given``, takes the fused steps if it may: if nobody sees what they leave out.

    PyG's own steps run where the conv's code is changed, hooked or adapted, where the weights of edges are asked for,
    and under autocast.
    """
    global _running
    outer, _running = _running, conv if _is_fusable(conv, given) else None
    try:
        yield
    finally:
        _running = outer


def _is_fusable(conv: Any, given: dict[str, Any]) -> bool:
    base = next((c for c in _CONVS if issubclass(conv.stock, c)), None)
    return (
        base is not None
        and all(getattr(conv.stock, name) is getattr(base, name) for name in _CODE)
        and changed_step(conv) is None
        and type(conv.aggr_module) is SumAggregation
        and conv.decomposed_layers == 1
        and given.get("return_attention_weights") is None
        and getattr(conv, "negative_slope", 0.0) >= 0
        and conv.heads <= MAX_HEADS
        and not (conv.training and conv.dropout >= 1)
        and (conv.lin_edge is None or commutes(conv.lin_edge))
        and not torch.is_autocast_enabled("cpu")
    )


@dataclass(frozen=True)
class Pending:
    """Weights of edges that are computed together with the sum that they are for.

    Attributes:
        sum: from the sources' rows ``[N, H, C]`` their weighed sums, differentiable (collective).
    """

    sum: Callable[[NodeTensor], NodeTensor]


def pending_weights(conv: Any, edges: Edges, given: dict[str, Any]) -> Pending | None:
    """What stands for the weights that ``conv`` asks for; ``None`` where its own steps have to run (collective)."""
    if conv is not _running or given.pop("size", None) is not None:
        return None
    return _additive(conv, edges, **given) if isinstance(conv, GATConv) else _dynamic(conv, edges, **given)


def weighed_sum(conv: Any, edges: Edges, given: dict[str, Any]) -> NodeTensor | None:
    """What ``conv`` asks ``propagate`` for; ``None`` where its own steps have to run (collective)."""
    alpha = given.get("alpha")
    if isinstance(alpha, Pending):
        return alpha.sum(given["x"][0])
    return _dot(conv, edges, **given) if conv is _running and isinstance(conv, TransformerConv) else None


def _additive(conv: Any, edges: Edges, alpha: Any, edge_attr: Tensor | None = None) -> Pending | None:
    """GAT: the two ends' logits are known by node, those of edge features are products with one vector a head."""
    key, query = alpha
    attr, is_known = _edge_attr(conv, edges, None if conv.lin_edge is None else edge_attr, key)
    if not (is_known and _are_rows(edges, key, *(() if query is None else (query,)))):
        return None
    weight = None
    if attr is not None:
        of_heads = conv.lin_edge.weight.view(conv.heads, conv.out_channels, -1) * conv.att_edge.view(conv.heads, -1, 1)
        weight = edges.rows.copy_to_ranks(of_heads.sum(1).view(1, -1))
    keys, queries = neighbour_rows(key, edges.graph), None if query is None else query.to_local()
    spec = _spec(conv, "additive", slope=conv.negative_slope)

    def weigh(x: NodeTensor) -> NodeTensor:
        value = neighbour_rows(x, edges.graph).to(key.dtype)
        out, _ = _attend(edges, spec, AttentionInputs(value, keys, queries, attr, weight))
        return NodeTensor.from_local(out, edges.graph.node_sharding)

    return Pending(weigh)


def _dynamic(conv: Any, edges: Edges, x: Any, edge_attr: Tensor | None = None) -> Pending | None:
    """GATv2: the ends' rows meet under a leaky ReLU, so features of edges are projected again at each edge."""
    attr, is_known = _edge_attr(conv, edges, edge_attr, x[0])
    if not (is_known and _are_rows(edges, *x) and conv.att.dtype == x[0].dtype):
        return None
    rows = edges.rows
    weight = None if attr is None else rows.copy_to_ranks(conv.lin_edge.weight).t().contiguous()
    att, value, query = rows.copy_to_ranks(conv.att), neighbour_rows(x[0], edges.graph), x[1].to_local()
    spec = _spec(conv, "dynamic", slope=conv.negative_slope)
    inputs = AttentionInputs(value, None, query, attr, weight, att.view(-1))
    return Pending(lambda _: NodeTensor.from_local(_attend(edges, spec, inputs)[0], edges.graph.node_sharding))


def _dot(
    conv: Any, edges: Edges, query: Any, key: Any, value: Any, edge_attr: Tensor | None = None
) -> NodeTensor | None:
    """Transformer: features of edges are projected by target, before logits and after sums: ``(W f) q = f (W^T q)``."""
    attr, is_known = _edge_attr(conv, edges, edge_attr, query)
    if not (is_known and _are_rows(edges, query, key, value)):
        return None
    queries, weight, by_edge = query.to_local(), None, None
    if attr is not None:
        by_edge = edges.rows.copy_to_ranks(conv.lin_edge.weight).view(conv.heads, conv.out_channels, -1)
        weight = torch.einsum("nhc,hcd->nhd", queries, by_edge).flatten(1)
    keys, values = neighbour_rows(key, edges.graph), neighbour_rows(value, edges.graph)
    spec = _spec(conv, "dot", scale=1 / math.sqrt(conv.out_channels))
    out, of_edges = _attend(edges, spec, AttentionInputs(values, keys, queries, attr, weight))
    if by_edge is not None:
        of_heads = of_edges.view(out.shape[0], conv.heads, by_edge.shape[2])
        out = out + torch.einsum("nhd,hcd->nhc", of_heads, by_edge)
    return NodeTensor.from_local(out, edges.graph.node_sharding)


def _spec(conv: Any, form: Any, **numbers: float) -> AttentionSpec:
    p = conv.dropout if conv.training else 0.0
    return AttentionSpec(form, conv.heads, p=p, seed=draw_seed() if p > 0 else 0, **numbers)


def _attend(edges: Edges, spec: AttentionSpec, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Sums of the values ``[n, H, C]``; of the edges' features ``[n, H D]``, where the form has these. Local rows."""
    y, z = attention(edges.csr, edges.rows.rng_key if spec.p > 0 else None, spec, inputs)
    return y.view(y.shape[0], *inputs.value.shape[1:]), z


def _are_rows(edges: Edges, *rows: Any) -> bool:
    """Whether these are rows of the graph's nodes that the op takes together."""
    return all(
        isinstance(x, NodeTensor) and edges.graph.owns(x) and x.dtype == rows[0].dtype and x.dtype in ops.FLOATS
        for x in rows
    )


def _edge_attr(conv: Any, edges: Edges, edge_attr: Tensor | None, like: Any) -> tuple[Tensor | None, bool]:
    """Features of the local edges ``[e, D]`` or ``None``, and whether they are what the op takes."""
    if edge_attr is None:
        return None, conv.lin_edge is None or not isinstance(conv, TransformerConv)
    local = local_values(edge_attr, edges.rows)
    local = local.view(-1, 1) if local.dim() == 1 and not isinstance(conv, TransformerConv) else local
    lin = conv.lin_edge
    fits = lin is not None and local.dim() == 2 and local.shape[1] == lin.in_channels
    return local, fits and local.dtype == lin.weight.dtype == like.dtype
