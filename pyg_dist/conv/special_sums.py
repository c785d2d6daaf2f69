"""PyG's convs that sum weighted rows in a special form: gates, stacks, a root's own row, and a cached norm."""

from __future__ import annotations

from math import isclose
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    ChebConv,
    ClusterGCNConv,
    FAConv,
    GCN2Conv,
    GINConv,
    HypergraphConv,
    MessagePassing,
    MFConv,
    aggr,
)

from pyg_dist.conv.fast_paths import NORMS, Given, fast_path
from pyg_dist.conv.graph_functions import add_self_loops, degree, gcn_norm, remove_self_loops
from pyg_dist.conv.inputs import derived
from pyg_dist.conv.lazy_norm import made
from pyg_dist.conv.weighted_sum import add_into_, commutes, sum_by
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import Norm
from pyg_dist.tensor import NodeTensor


@fast_path(FAConv, step="propagate", code=("message", "update", "aggregate"))
def gated_sum(conv: MessagePassing, edges: Edges, given: Given) -> NodeTensor | None:
    """``FAConv``'s sums: each edge's gate and the norm are one weight (collective)."""
    if given["edge_weight"] is None:
        return None
    (source, target), weight, (by_source, by_target) = made(edges), made(given["edge_weight"]), given["alpha"]
    gate = source.fetch(by_source) + target.fetch(by_target)
    conv._alpha = gate = gate.tanh().squeeze(-1)
    gate = F.dropout(gate, p=conv.dropout, training=conv.training)
    return sum_by(conv, edges, given["x"], gate * weight, NORMS[type(conv.aggr_module)])  # type: ignore[no-any-return]


@fast_path(
    HypergraphConv, step="propagate", code=("message", "update", "aggregate"), sums=(aggr.SumAggregation,),
    needs_edges=True,
)  # fmt: skip
def incidence_sum(conv: MessagePassing, edges: Edges, given: Given) -> Tensor | None:
    """``HypergraphConv``'s sums without attention: the target's factor multiplies the sum, not each message."""
    x, norm = given["x"], given["norm"]
    if given["alpha"] is not None or norm.dtype != x.dtype:
        return None
    out = sum_by(conv, edges, x.flatten(1), None, Norm.SUM)
    return None if out is None else norm.view(-1, 1, 1) * out.view(-1, conv.heads, conv.out_channels)


_BY_COLUMN = (
    *NORMS, aggr.MaxAggregation, aggr.MinAggregation, aggr.MulAggregation, aggr.VarAggregation, aggr.StdAggregation,
)  # fmt: skip


@fast_path(ARMAConv, sums=_BY_COLUMN, needs_edges=True)
def stacked_forward(conv: MessagePassing, edges: Edges, given: Given) -> Tensor:
    """``ARMAConv``'s forward with its K stacks as columns, ``[N, K F]``: PyG's are ``[K, N, F]``."""
    x, weight = given["x"], given.get("edge_weight")
    edges, weight = gcn_norm(edges, weight, x.size(0), add_self_loops=False, dtype=x.dtype)
    out = x
    for t in range(conv.num_layers):
        if t == 0:
            out = out @ _side_by_side(conv.init_weight)
        else:
            stacks = out.view(-1, conv.num_stacks, conv.out_channels)
            out = torch.einsum("nkf,kfg->nkg", stacks, conv.weight[0 if conv.shared_weights else t - 1]).flatten(1)
        out = conv.propagate(edges, x=out, edge_weight=weight)
        layer = 0 if conv.shared_weights else t
        out = out + F.dropout(x, p=conv.dropout, training=conv.training) @ _side_by_side(conv.root_weight[layer])
        if conv.bias is not None:
            out = out + conv.bias[layer].view(-1)
        if conv.act is not None:
            out = conv.act(out)
    return out.view(-1, conv.num_stacks, conv.out_channels).mean(dim=1)  # type: ignore[no-any-return]


@fast_path(ClusterGCNConv, when=lambda conv: conv.add_self_loops)
def averaging_forward(conv: MessagePassing, edges: Edges, given: Given) -> Tensor | None:
    """``ClusterGCNConv``'s forward, whose norm is kept: ``D^-1 A + lambda diag(D^-1 A)`` (collective)."""
    x, dtype = given["x"], torch.get_default_dtype()
    if edges.weight is not None:
        return None

    def make() -> tuple[Edges, Tensor]:
        looped, _ = add_self_loops(remove_self_loops(edges)[0], num_nodes=x.size(0))
        source, target = looped
        inverse = 1.0 / degree(target, x.size(0), dtype).clamp_(1.0)
        by_target = inverse[target]
        return looped, by_target + (source == target) * (conv.diag_lambda * by_target)

    looped, weight = edges.kept.get(("cluster", conv.diag_lambda, dtype), None, make)
    return conv.lin_out(conv.propagate(looped, x=x, edge_weight=weight)) + conv.lin_root(x)  # type: ignore[no-any-return]


@fast_path(GINConv, sums=(aggr.SumAggregation,), when=lambda conv: not conv.eps.requires_grad)
def isomorphism_forward(conv: MessagePassing, edges: Edges, given: Given) -> Tensor | None:
    """``GINConv``'s forward with one product, ``(A + (1 + eps) I) x``; kept for a constant x (collective).

    ``None`` if eps was changed, and in mini-batches, whose sparsity pattern is used for one step only.
    """
    x, eps = given["x"], conv.eps
    if edges.graph.sources is not edges.graph.targets:
        return None
    x = x[0] if isinstance(x, (tuple, list)) and len(x) == 2 and x[0] is x[1] else x
    if not isinstance(x, NodeTensor) or x.dtype != eps.dtype or edges.graph.targets.sample is not None:
        return None
    of_root = _factor_of_root(conv)
    if of_root is None:
        return None
    out = sum_by(conv, edges, x, None, Norm("sum", identity=of_root))
    return None if out is None else conv.nn(out)


@fast_path(MFConv, sums=_BY_COLUMN)
def by_degree_forward(conv: MessagePassing, edges: Edges, given: Given) -> Tensor | None:
    """``MFConv``'s forward: a target's linear maps are those of its degree (collective). ``None`` under autocast.

    PyG's forward fills an empty plain tensor, which could not be a node tensor.
    """
    x = given["x"]
    source, target = x if isinstance(x, (tuple, list)) else (x, x)
    if not all(isinstance(own, NodeTensor) for own in (source, target) if own is not None):
        return None
    if torch.is_autocast_enabled(source.device.type) or not all(map(commutes, (*conv.lins_l, *conv.lins_r))):
        return None
    sums = conv.propagate(edges, x=(source, target), size=None).to_rows()
    number = degree(edges.end(1), dtype=torch.long).to_rows().to_local().clamp(max=conv.max_degree)
    root, rows = None if target is None else target.to_rows().to_local(), sums._sharding
    places, outs = [], []
    for k, (of_sum, of_root) in enumerate(zip(conv.lins_l, conv.lins_r, strict=True)):
        place = (number == k).nonzero().view(-1)
        bias = None if of_sum.bias is None else rows.copy_to_ranks(of_sum.bias)
        out = F.linear(sums.to_local()[place], rows.copy_to_ranks(of_sum.weight), bias)
        outs.append(out if root is None else out + F.linear(root[place], rows.copy_to_ranks(of_root.weight)))
        places.append(place)
    return NodeTensor.from_local(torch.cat(outs)[torch.cat(places).argsort()], rows)


def _has_initial_residual(conv: MessagePassing) -> bool:
    is_factor = isinstance(conv.alpha, (int, float)) and conv.alpha != 1
    return is_factor and not (conv.normalize and conv.cached)  # with cached=True PyG ignores later edges


@fast_path(GCN2Conv, when=_has_initial_residual)
def initial_residual_forward(conv: MessagePassing, edges: Edges, given: Given) -> Tensor | None:
    """``GCN2Conv``'s forward with its factors in the matrix (GCNII, eq. 5; collective).

    The formula::

        ((1 - a) h + a x_0) ((1 - b) I + b W)  =  (h + a / (1 - a) x_0) M,    M = (1 - a) ((1 - b) I + b W)

    So no pass over all rows scales h, the sum over neighbours, forward or backward. With a second weight, for x_0,
    there are two such matrices. ``None`` under autocast.
    """
    x, x_0, weight = given["x"], given["x_0"], given.get("edge_weight")
    if torch.is_autocast_enabled(x.device.type):
        return None
    if not x.dtype == x_0.dtype == conv.weight1.dtype:
        return None
    if conv.normalize:
        edges, weight = gcn_norm(edges, weight, x.size(0), False, conv.add_self_loops, conv.flow, dtype=x.dtype)
    h = conv.propagate(edges, x=x, edge_weight=weight)
    x_0, scale = x_0[: x.size(0)], 1 - conv.alpha
    if conv.weight2 is None:
        h = add_into_(h, x_0, conv.alpha / scale)
        return h @ _with_identity(conv.weight1, conv.beta, scale)
    own = x_0 @ _with_identity(conv.weight2, conv.beta, conv.alpha)
    return h @ _with_identity(conv.weight1, conv.beta, scale) + own  # type: ignore[no-any-return]


def _is_personalized(conv: MessagePassing) -> bool:
    """Whether alpha is a number, no edges are dropped, and the matrix is normalised (else ``A^k`` may overflow)."""
    is_plain = isinstance(conv.alpha, (int, float)) and not (conv.dropout > 0 and conv.training)
    return is_plain and conv.K >= 1 and conv.normalize and not conv.cached  # with cached=True PyG ignores later edges


@fast_path(APPNP, when=_is_personalized)
def personalized_forward(conv: MessagePassing, edges: Edges, given: Given) -> Tensor | None:
    """``APPNP``'s forward without passes that scale its hops (Gasteiger et al., 2019, eq. 5; collective).

    The formula::

        (1 - a)^K A^K x + a sum_k (1 - a)^k A^k x  =  A (... A (A c_K x + c_{K-1} x) ...) + c_0 x

    with ``c_k = a (1 - a)^k`` for ``k < K`` and ``c_K = (1 - a)^K``. ``None`` under autocast.
    """
    x, weight, a = given["x"], given.get("edge_weight"), conv.alpha
    if not x.is_floating_point() or torch.is_autocast_enabled(x.device.type):
        return None
    edges, weight = gcn_norm(edges, weight, x.size(0), False, conv.add_self_loops, conv.flow, dtype=x.dtype)
    out = (1 - a) ** conv.K * conv.propagate(edges, x=x, edge_weight=weight)  # of a constant x it is kept
    for k in reversed(range(conv.K)):
        if k < conv.K - 1:
            out = conv.propagate(edges, x=out, edge_weight=weight)
        out = add_into_(out, x, a * (1 - a) ** k)
    return out  # type: ignore[no-any-return]


def _with_identity(weight: Tensor, beta: float, scale: float) -> Tensor:
    identity = torch.eye(weight.size(0), dtype=weight.dtype, device=weight.device)
    return torch.add(identity * (scale * (1 - beta)), weight, alpha=scale * beta)


def _factor_of_root(conv: GINConv) -> float | None:
    """``1 + eps``; ``None`` if eps is not the initial one, since each value would keep an operator.

    The value is read again only after eps was written to: reading waits for the device.
    """

    def factor(eps: Tensor) -> float | None:
        rounding = max(torch.finfo(dtype).eps for dtype in (eps.dtype, torch.float32))  # it may have been cast
        return float(1 + eps) if isclose(eps, conv.initial_eps, rel_tol=rounding) else None

    return derived(conv.eps, None, factor)


def _side_by_side(weight: Tensor) -> Tensor:
    return weight.transpose(0, 1).flatten(1)


def kept_laplacian(
    conv: MessagePassing,
    edge_index: object,
    num_nodes: int | None,
    edge_weight: Tensor | None,
    normalization: str | None,
    lambda_max: object = None,
    dtype: torch.dtype | None = None,
    batch: Tensor | None = None,
) -> Any:
    """``ChebConv.__norm__``, whose results are kept as long as the weights of edges do not change (collective)."""
    options = edge_weight, normalization, lambda_max, dtype, batch

    def make() -> object:
        return conv.code.__norm__(conv, edge_index, num_nodes, *options)

    learns = edge_weight is not None and edge_weight.requires_grad and torch.is_grad_enabled()
    if not isinstance(edge_index, Edges) or learns or batch is not None or isinstance(lambda_max, Tensor):
        return make()
    return edge_index.kept.get((normalization, lambda_max, dtype), edge_weight, make)  # type: ignore[arg-type]


def own_methods(stock: type[MessagePassing]) -> dict[str, object]:
    """The methods of ``stock`` that are replaced, by name."""
    return {"__norm__": kept_laplacian} if getattr(stock, "__norm__", None) is ChebConv.__norm__ else {}
