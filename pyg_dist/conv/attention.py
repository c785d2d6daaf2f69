"""Attention convs by one op, which makes no tensor with a row per edge.

PyG's forwards of ``GATv2Conv`` and ``TransformerConv`` run as they are, and what they ask of edges is one call: GATv2
asks for attention weights (``edge_updater``), which stay pending, and then for the sum that they weigh
(``propagate``); Transformer asks for the sum. GAT has its own forward, :func:`fused_forward`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GATConv, GATv2Conv, MessagePassing, TransformerConv
from torch_geometric.nn.aggr import SumAggregation

from pyg_dist.backend import ops
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.ops.attention import MAX_HEADS
from pyg_dist.conv.graph_functions import add_self_loops, remove_self_loops
from pyg_dist.conv.inputs import changed_step
from pyg_dist.conv.linear_order import commutes
from pyg_dist.layout.edges import Edges
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
    outer, _running = _running, conv if is_fusable(conv, given) else None
    try:
        yield
    finally:
        _running = outer


def is_fusable(conv: Any, given: dict[str, Any]) -> bool:
    """Whether ``conv``, called with ``given``, may take the fused steps."""
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
class PendingWeights:
    """Weights of edges that are computed together with the sum that they are for.

    Attributes:
        sum: gives the weighed sums ``[N, H, C]``, differentiable (collective).
    """

    sum: Callable[[], NodeTensor]


def pending_weights(conv: Any, edges: Edges, given: dict[str, Any]) -> PendingWeights | None:
    """What stands for the weights that GATv2 asks for; ``None`` where its own steps have to run (collective)."""
    return _dynamic(conv, edges, **given) if conv is _running and isinstance(conv, GATv2Conv) else None


def weighed_sum(conv: Any, edges: Edges, given: dict[str, Any]) -> NodeTensor | None:
    """What ``conv`` asks ``propagate`` for; ``None`` where its own steps have to run (collective)."""
    alpha = given.get("alpha")
    if isinstance(alpha, PendingWeights):
        return alpha.sum()
    return _dot(conv, edges, **given) if conv is _running and isinstance(conv, TransformerConv) else None


def fused_forward(conv: Any, given: dict[str, Any]) -> NodeTensor | None:
    """GATConv's forward; ``None`` where PyG's has to run (collective).

    The logits of nodes are products with a matrix that has the heads' vectors: PyG's ``(x * att).sum(-1)`` makes two
    more tensors as large as x, and four in the backward pass.
    """
    if conv is not _running or not isinstance(conv, GATConv) or given.get("size") is not None:
        return None
    x, edges, edge_attr = given["x"], given["edge_index"], given.get("edge_attr")
    source, target = x if isinstance(x, (tuple, list)) else (x, x)
    lin_source, lin_target = (conv.lin, conv.lin) if conv.lin is not None else (conv.lin_src, conv.lin_dst)
    attr = edge_attr if conv.lin_edge is not None else None
    if not _are_rows(edges, source, *(() if target is None else (target,))) or source.dim() != 2:
        return None
    weight = getattr(lin_source, "weight", None)  # an adapter in its place may have none
    if weight is None or {weight.dtype, conv.att_src.dtype, source.dtype} != {weight.dtype}:
        return None
    if not _fits(conv, edges, attr, source.dtype):
        return None
    residual = None if conv.res is None or target is None else conv.res(target)
    value = lin_source(source).to_rows()
    own: Any = value if target is source and lin_target is lin_source else None
    if own is None and target is not None:
        own = lin_target(target).to_rows()
    if conv.add_self_loops:
        edges, attr = remove_self_loops(edges, attr)
        edges, attr = add_self_loops(edges, attr, fill_value=conv.fill_value)
    heads, columns = conv.heads, conv.out_channels
    by_source, by_target = (_diagonal(att.view(heads, columns)) for att in (conv.att_src, conv.att_dst))
    key: Any
    query: Any
    if own is value:
        both = F.linear(value, torch.cat([by_source, by_target]))
        key, query = both[:, :heads], both[:, heads:]
    else:
        key, query = F.linear(value, by_source), None if own is None else F.linear(own, by_target)
    edge_weight = None
    if attr is not None:
        of_heads = conv.lin_edge.weight.view(heads, columns, -1) * conv.att_edge.view(heads, columns, 1)
        edge_weight = edges.rows.copy_to_ranks(of_heads.sum(1).view(1, -1))
    spec = _spec(conv, "additive", slope=conv.negative_slope)
    queries = None if query is None else query.to_local()
    inputs = AttentionInputs(value.to_local(), key.to_local(), queries, _local_attr(edges, attr), edge_weight)
    out: Any = _nodes(edges, edges.graph.attend(edges, inputs, spec, conv)[0])
    out = out if conv.concat else out.view(-1, heads, columns).mean(dim=1)
    out = out if residual is None else out + residual
    return out if conv.bias is None else out + conv.bias  # type: ignore[no-any-return]


def _diagonal(att: Tensor) -> Tensor:
    """The vectors of heads as blocks of a matrix, ``[H, H C]``."""
    heads = torch.eye(att.shape[0], dtype=att.dtype, device=att.device)
    return (heads.unsqueeze(2) * att).flatten(1)


def _dynamic(
    conv: Any, edges: Edges, x: Any, edge_attr: Tensor | None = None, size: Any = None
) -> PendingWeights | None:
    """GATv2: the ends' rows meet under a leaky ReLU, so features of edges are projected again at each edge."""
    if not (_fits(conv, edges, edge_attr, x[0].dtype) and _are_rows(edges, *x) and conv.att.dtype == x[0].dtype):
        return None
    att, weight = edges.rows.copy_to_ranks(conv.att).view(-1), None
    if edge_attr is not None:
        weight = edges.rows.copy_to_ranks(conv.lin_edge.weight).t()
    spec = _spec(conv, "dynamic", slope=conv.negative_slope)
    inputs = AttentionInputs(x[0].to_local(), None, x[1].to_local(), _local_attr(edges, edge_attr), weight, att)

    def weigh() -> NodeTensor:
        sums, _ = edges.graph.attend(edges, inputs, spec, conv)
        return _nodes(edges, sums.view(inputs.value.shape))

    return PendingWeights(weigh)


def _dot(
    conv: Any, edges: Edges, query: Any, key: Any, value: Any, edge_attr: Tensor | None = None
) -> NodeTensor | None:
    """Transformer: features of edges are projected by target, before logits and after sums: ``(W f) q = f (W^T q)``."""
    if edge_attr is None and conv.lin_edge is not None:
        return None
    if not (_fits(conv, edges, edge_attr, query.dtype) and _are_rows(edges, query, key, value)):
        return None
    queries, weight, by_edge = query.to_local(), None, None
    if edge_attr is not None:
        by_edge = edges.rows.copy_to_ranks(conv.lin_edge.weight).view(conv.heads, conv.out_channels, -1)
        weight = torch.einsum("nhc,hcd->nhd", queries, by_edge).flatten(1)
    spec = _spec(conv, "dot", scale=1 / math.sqrt(conv.out_channels))
    inputs = AttentionInputs(value.to_local(), key.to_local(), queries, _local_attr(edges, edge_attr), weight)
    sums, of_edges = edges.graph.attend(edges, inputs, spec, conv)
    out = sums.view(queries.shape)
    if by_edge is not None:
        out = out + torch.einsum("nhd,hcd->nhc", of_edges.view(*out.shape[:2], by_edge.shape[2]), by_edge)
    return _nodes(edges, out)


def _spec(conv: Any, form: Any, **numbers: float) -> AttentionSpec:
    p = conv.dropout if conv.training else 0.0
    return AttentionSpec(form, conv.heads, p=p, seed=draw_seed() if p > 0 else 0, **numbers)


def _nodes(edges: Edges, local: Tensor) -> NodeTensor:
    return NodeTensor.from_local(local, edges.graph.node_sharding)


def _are_rows(edges: Edges, *rows: Any) -> bool:
    """Whether these are rows of the graph's nodes that the op takes together."""
    return all(
        isinstance(x, NodeTensor) and edges.graph.owns(x) and x.dtype == rows[0].dtype and x.dtype in ops.FLOATS
        for x in rows
    )


def _fits(conv: Any, edges: Edges, edge_attr: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether the op may project these features of edges as ``lin_edge`` does."""
    if edge_attr is None:
        return True
    lin = conv.lin_edge
    width = 1 if edge_attr.dim() == 1 and not isinstance(conv, TransformerConv) else edge_attr.shape[-1]
    return (
        lin is not None
        and edge_attr.dim() <= 2
        and width == lin.in_channels
        and edge_attr.dtype == lin.weight.dtype == dtype
    )


def _local_attr(edges: Edges, edge_attr: Tensor | None) -> Tensor | None:
    """Features of the local edges, ``[e, D]``."""
    if edge_attr is None:
        return None
    local = local_values(edge_attr, edges.rows)
    return local.view(-1, 1) if local.dim() == 1 else local
