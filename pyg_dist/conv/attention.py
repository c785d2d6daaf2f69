"""Attention convs by one op, which makes no tensor with a row per edge.

PyG's forwards of ``GATv2Conv``, ``TransformerConv``, ``AGNNConv`` and ``GeneralConv`` run unchanged, with the op in
place of their steps on edges: ``edge_updater`` (attention weights) and ``propagate`` (their sum) of GATv2,
``propagate`` of the others. For GAT the forward is replaced. Attention weights, a number for each edge and head, are
made only if the conv is to return them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import AGNNConv, GATConv, GATv2Conv, GeneralConv, Linear, MessagePassing, TransformerConv
from torch_geometric.nn.aggr import SumAggregation

from pyg_dist.backend import ops
from pyg_dist.backend.dense import large_tensors
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.ops.attention import MAX_HEADS
from pyg_dist.conv.fast_paths import Given, Step, fast_path
from pyg_dist.conv.graph_functions import add_self_loops, remove_self_loops
from pyg_dist.conv.hetero_conv import Biased
from pyg_dist.conv.weighted_sum import can_project_last, commutes
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.layer_call import call_of
from pyg_dist.tensor import EdgeTensor, NodeTensor
from pyg_dist.tensor.functions.layers import product, sparse_rows
from pyg_dist.tensor.functions.random import draw_seed
from pyg_dist.tensor.operands import local_values
from pyg_dist.tensor.row_tensor import local_tensors

Fused = TypeVar("Fused", bound=Callable[..., Any])


def _takes_op(conv: MessagePassing) -> bool:
    return (
        getattr(conv, "negative_slope", 0.0) >= 0
        and getattr(conv, "heads", 1) <= MAX_HEADS
        and not (conv.training and getattr(conv, "dropout", 0.0) >= 1)
        and (getattr(conv, "lin_edge", None) is None or commutes(conv.lin_edge))
    )


def _weighs_sources(conv: MessagePassing) -> bool:
    """Whether a GeneralConv's messages are the sources' projected rows, with logits of a form that the op has."""
    is_additive = conv.attention and conv.attention_type == "additive" and _takes_op(conv)
    return is_additive and conv.directed_msg and conv.in_edge_channels is None and commutes(conv.lin_msg)


def _attention(conv: type, step: Step, when: Callable[[MessagePassing], bool] = _takes_op) -> Callable[[Fused], Fused]:
    """Register a fused step of a conv; it takes the step's arguments by name."""

    def register(fused: Fused) -> Fused:
        @fast_path(conv, step=step, sums=(SumAggregation,), when=when)
        def run(conv: MessagePassing, edges: Edges, given: Given) -> Any:
            return None if call_of(conv) is None else fused(conv, edges, **given)

        return fused

    return register


@_attention(GATConv, "forward")
def _additive(
    conv: MessagePassing, edges: Edges, x: object, edge_attr: Tensor | None = None, **others: object
) -> object:
    """GATConv's forward.

    The logits of nodes are products with a matrix that has the heads' vectors: PyG's ``(x * att).sum(-1)`` makes two
    more tensors as large as x, and four in the backward pass.
    """
    source, target = x if isinstance(x, (tuple, list)) else (x, x)
    lin_source, lin_target = (conv.lin, conv.lin) if conv.lin is not None else (conv.lin_src, conv.lin_dst)
    attr = edge_attr if conv.lin_edge is not None else None
    if not _are_rows(edges, (source,), () if target is None else (target,)) or source.dim() != 2:
        return None
    # An adapter may have no weight; a parametrization may change whenever it is read (spectral norm).
    weight = getattr(lin_source, "_parameters", {}).get("weight")
    if weight is None or not _meet(source, weight, conv.att_src) or not _fits(conv, edges, attr, source):
        return None
    residual = None if conv.res is None or target is None else conv.res(target)
    heads, columns, enter = conv.heads, conv.out_channels, edges.graph.targets.copy_to_ranks
    is_own = target is source and lin_target is lin_source
    comes_along = _projects_heads(lin_source, source)
    rows = source.to_rows() if comes_along else lin_source(source).to_rows()
    dtype = _dtype_of_sums(rows, conv.att_src)
    by_source, by_target = (
        _diagonal(enter(att).view(heads, columns).to(dtype)) for att in (conv.att_src, conv.att_dst)
    )
    by_value = torch.cat([by_source, by_target]) if is_own else by_source
    if comes_along:
        entered = enter(weight)
        value, logits = large_tensors.linear_pair(rows.to_local(), entered, by_value @ entered)
    else:
        value = rows.to_local().to(dtype)
        with torch.autocast(value.device.type, enabled=False):
            logits = F.linear(value, by_value)
    has_query = target is not None and not is_own
    reads_target = has_query and can_project_last(lin_target, target, dtype)
    own = lin_target(target).to_rows().to_local().to(dtype) if has_query and not reads_target else None
    if conv.add_self_loops:
        edges, attr = remove_self_loops(edges, attr)
        edges, attr = add_self_loops(edges, attr, fill_value=conv.fill_value, num_nodes=edges.graph.targets.size)
    elif attr is not None and edges.rows.size == 0:
        attr = None  # PyG does not look at it where there are no edges at all
    key: Tensor = logits[:, :heads]
    query: Tensor | None = logits[:, heads:] if is_own else None
    edge_weight = None
    with torch.autocast(value.device.type, enabled=False):
        if own is not None:
            query = F.linear(own, by_target)
        elif reads_target:  # the projected targets are needed nowhere else: the heads' vectors are projected instead
            lin = [by_target @ enter(lin_target.weight)]
            lin += [] if lin_target.bias is None else [by_target @ enter(lin_target.bias)]
            with local_tensors():
                query = product(target.to_rows(), *lin)
        if attr is not None:
            of_heads = conv.lin_edge.weight.view(heads, columns, -1) * conv.att_edge.view(heads, columns, 1)
            edge_weight = edges.rows.copy_to_ranks(of_heads.sum(1).view(1, -1)).to(dtype)
    spec = _spec(conv, "additive", slope=conv.negative_slope)
    inputs = AttentionInputs(value, key, query, _local_attr(edges, attr, dtype), edge_weight)
    sums, _, alpha = _attend(conv, edges, inputs, spec)
    if not conv.concat:
        sums = sums.view(-1, heads, columns).mean(dim=1)
    if residual is None and conv.bias is not None:
        if conv.gives_terms and alpha is None:
            return Biased(_nodes(edges, sums), enter(conv.bias))
        sums = large_tensors.add(sums, enter(conv.bias))
    out = _nodes(edges, sums)
    if residual is not None:
        out = out + residual if conv.bias is None else out + residual + conv.bias
    return out if alpha is None else (out, (edges, _dropped(alpha, spec)))


def _projects_heads(lin: Linear, x: Tensor) -> bool:
    """Whether logits are products of x with projected heads' vectors, not of the output of ``lin`` with these.

    Forward and backward then read or write x up to four times more, but the output five times less, whose derivative by
    the logits would have to be added to that by the sums.
    """
    if type(x) is not NodeTensor or not can_project_last(lin, x, x.dtype) or lin.bias is not None:
        return False
    return x.shape[1] <= lin.weight.shape[0] and sparse_rows(x, lin.weight) is None


def _returns_weights(conv: MessagePassing) -> bool:
    call = call_of(conv)
    asked = None if call is None else call.given.get("return_attention_weights")
    return isinstance(asked, bool) if isinstance(conv, TransformerConv) else bool(asked)  # as their forwards do


def _attend(
    conv: MessagePassing, edges: Edges, inputs: AttentionInputs, spec: AttentionSpec
) -> tuple[Tensor, Tensor, EdgeTensor | None]:
    """The sums, and the attention weights before dropout, if requested (collective). Autocast is off within."""
    asked = _returns_weights(conv)
    with torch.autocast(inputs.value.device.type, enabled=False):
        sums, of_edges, alpha = edges.graph.attend(edges, inputs, spec, conv, has_weights=asked)
    return sums, of_edges, edges.tensor(alpha) if asked else None


def _dropped(alpha: EdgeTensor, spec: AttentionSpec) -> EdgeTensor:
    """The weights after dropout, as the sums used them."""
    if spec.p == 0:
        return alpha
    local, rows = alpha.to_local(), alpha._sharding
    key = on_device(rows.rng_key, local.device)
    return EdgeTensor.from_local(ops.keyed_dropout(local, key, spec.p, spec.seed), rows)


def _diagonal(att: Tensor) -> Tensor:
    heads = torch.eye(att.shape[0], dtype=att.dtype, device=att.device)
    return (heads.unsqueeze(2) * att).flatten(1)


@_attention(GATv2Conv, "edge_updater")
def _dynamic(conv: MessagePassing, edges: Edges, x: Any, edge_attr: Tensor | None = None) -> object:
    """GATv2: a leaky ReLU of both ends' rows and the edge's features, which are projected again at each edge.

    Returns the attention weights, or a stand-in; the weighted sums are made in the same pass.
    """
    if not (_fits(conv, edges, edge_attr, x[0]) and _are_rows(edges, x[:1], x[1:]) and _meet(x[0], conv.att)):
        return None
    dtype = _dtype_of_sums(x[0], conv.att)
    att, weight = edges.rows.copy_to_ranks(conv.att).view(-1).to(dtype), None
    if edge_attr is not None:
        weight = edges.rows.copy_to_ranks(conv.lin_edge.weight).t().to(dtype)
    spec = _spec(conv, "dynamic", slope=conv.negative_slope)
    value, query = (end.to_local().to(dtype) for end in x)
    inputs = AttentionInputs(value, None, query, _local_attr(edges, edge_attr, dtype), weight, att)
    sums, _, alpha = _attend(conv, edges, inputs, spec)
    call, weights = call_of(conv), object() if alpha is None else _dropped(alpha, spec)
    assert call is not None
    call.left = weights, _nodes(edges, sums.view(query.shape))
    return weights


@_attention(GATv2Conv, "propagate")
def _sums_of_dynamic(conv: MessagePassing, edges: Edges, x: object, alpha: object) -> NodeTensor | None:
    call = call_of(conv)
    return call.left[1] if call is not None and call.left is not None and alpha is call.left[0] else None


@_attention(TransformerConv, "propagate")
def _dot(
    conv: MessagePassing, edges: Edges, query: Any, key: Any, value: Any, edge_attr: Tensor | None = None
) -> NodeTensor | None:
    """Transformer: features of edges are projected by target, before logits and after sums: ``(W f) q = f (W^T q)``."""
    if edge_attr is None and conv.lin_edge is not None:
        return None
    if not (_fits(conv, edges, edge_attr, query) and _are_rows(edges, (value, key), (query,))):
        return None
    dtype, weight, by_edge = _dtype_of_sums(value, query), None, None
    values, keys, queries = (x.to_local().to(dtype) for x in (value, key, query))
    with torch.autocast(queries.device.type, enabled=False):
        if edge_attr is not None:
            by_edge = edges.rows.copy_to_ranks(conv.lin_edge.weight).to(dtype)
            by_edge = by_edge.view(conv.heads, conv.out_channels, -1)
            weight = torch.einsum("nhc,hcd->nhd", queries, by_edge).flatten(1)
        spec = _spec(conv, "dot", scale=1 / math.sqrt(conv.out_channels))
        inputs = AttentionInputs(values, keys, queries, _local_attr(edges, edge_attr, dtype), weight)
        sums, of_edges, conv._alpha = _attend(conv, edges, inputs, spec)
        out = sums.view(queries.shape)
        if by_edge is not None:
            out = out + torch.einsum("nhd,hcd->nhc", of_edges.view(*out.shape[:2], by_edge.shape[2]), by_edge)
    return _nodes(edges, out)


@_attention(AGNNConv, "propagate")
def _cosine(conv: MessagePassing, edges: Edges, x: Any, x_norm: Any) -> NodeTensor | None:
    """AGNN: dot products of rows of length one, times beta."""
    if not (_are_rows(edges, (x,)) and _are_rows(edges, (x_norm,), (x_norm,)) and x.dim() == 2):
        return None
    if not _meet(x, conv.beta):
        return None
    dtype = torch.promote_types(_dtype_of_sums(x, conv.beta), x_norm.dtype)
    key = x_norm.to_rows().to(dtype)
    inputs = AttentionInputs(x.to_rows().to_local().to(dtype), key.to_local(), (key * conv.beta).to_local())
    return _nodes(edges, _attend(conv, edges, inputs, _spec(conv, "dot"))[0])


@_attention(GeneralConv, "propagate", _weighs_sources)
def _of_sources(conv: MessagePassing, edges: Edges, x: Any, edge_attr: Tensor | None = None) -> NodeTensor | None:
    """GeneralConv: logits depend on the sources' messages alone."""
    source, lin = x[0], conv.lin_msg
    if edge_attr is not None or not _are_rows(edges, (source,)) or source.dim() != 2:
        return None
    if not _meet(source, lin.weight, conv.att_msg):
        return None
    value = lin(source).to_rows()
    value = value.to(_dtype_of_sums(value, conv.att_msg))
    with torch.autocast(value.device.type, enabled=False):
        key: Any = F.linear(value, _diagonal(conv.att_msg.view(conv.heads, conv.out_channels).to(value.dtype)))
    inputs = AttentionInputs(value.to_local(), key.to_local())
    sums = _attend(conv, edges, inputs, _spec(conv, "additive", slope=0.2))[0]
    return _nodes(edges, sums.view(-1, conv.heads, conv.out_channels))


def _spec(conv: MessagePassing, form: Any, **numbers: float) -> AttentionSpec:
    p = getattr(conv, "dropout", 0.0) if conv.training else 0.0
    return AttentionSpec(form, getattr(conv, "heads", 1), p=p, seed=draw_seed() if p > 0 else 0, **numbers)


def _nodes(edges: Edges, local: Tensor) -> NodeTensor:
    return NodeTensor.from_local(local, edges.graph.targets)


def _are_rows(edges: Edges, at_sources: Sequence[Any], at_targets: Sequence[object] = ()) -> bool:
    """Whether these are rows of the graph's sources, and of its targets, that the op takes together."""
    dtype, owns = getattr(at_sources[0], "dtype", None), edges.graph.owns
    are_owned = all(isinstance(x, NodeTensor) and owns(x, 0) for x in at_sources) and all(
        isinstance(x, NodeTensor) and owns(x, 1) for x in at_targets
    )
    return are_owned and dtype in ops.FLOATS and all(x.dtype == dtype for x in (*at_sources, *at_targets))


def _meet(x: Tensor, *parameters: Tensor) -> bool:
    """Whether rows and parameters have one dtype, or autocast gives them one where PyG's linear maps run."""
    if not torch.is_autocast_enabled(x.device.type):
        return all(p.dtype == x.dtype for p in parameters)
    are_double = [t.dtype == torch.float64 for t in (x, *parameters)]  # which autocast leaves as it is
    return all(are_double) or not any(are_double)


def _dtype_of_sums(value: Tensor, operand: Tensor) -> torch.dtype:
    """The dtype of PyG's sums of ``value``, weighted by a softmax of its products with ``operand``.

    Under autocast PyG's linear maps give narrow rows, while its logits are wider where one of their parameters is, or
    where autocast widens the softmax's exponential, as on GPUs. The op takes one dtype, that of the sums.
    """
    logits = torch.promote_types(value.dtype, operand.dtype)
    exponential = torch.empty(0, dtype=logits, device=value.device).exp()
    return torch.promote_types(value.dtype, exponential.dtype)


def _fits(conv: MessagePassing, edges: Edges, edge_attr: Tensor | None, x: Tensor) -> bool:
    """Whether the op can project these features of edges as ``lin_edge`` does, in the dtype of x."""
    if edge_attr is None:
        return True
    lin = conv.lin_edge
    width = 1 if edge_attr.dim() == 1 and not isinstance(conv, TransformerConv) else edge_attr.shape[-1]
    return (
        lin is not None
        and edge_attr.dim() <= 2
        and width == lin.in_channels
        and edge_attr.is_floating_point()
        and _meet(x, edge_attr, lin.weight)
    )


def _local_attr(edges: Edges, edge_attr: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if edge_attr is None:
        return None
    local = local_values(edge_attr, edges.rows).to(dtype)
    return local.view(-1, 1) if local.dim() == 1 else local
