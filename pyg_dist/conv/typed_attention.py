"""PyG's ``HGTConv``: attention over all relations that end at a type, as one op on one graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HGTConv
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import EdgeType

from pyg_dist.backend import ops
from pyg_dist.backend.local_function import Context, LocalFunction
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.ops.attention import MAX_HEADS
from pyg_dist.conv.fast_paths import Given, fast_path
from pyg_dist.conv.joined_types import joined_edges
from pyg_dist.graph.edges import Edges
from pyg_dist.tensor import NodeTensor


@fast_path(HGTConv, sums=(SumAggregation,), when=lambda conv: conv.heads <= MAX_HEADS)
def typed_attention(conv: HGTConv, edges: dict[EdgeType, Edges], given: Given) -> dict[str, Tensor] | None:
    """``HGTConv``'s forward (Hu et al., "Heterogeneous graph transformer", 2020; collective).

    A source has a key and a value for each relation, ``k W_r p_r`` and ``v V_r``. PyG puts the rows of all types into
    one graph, here the relations that end at a type make one: the softmax of a target is over all of them. ``None``
    under autocast.
    """
    x_dict, heads = given["x_dict"], conv.heads
    columns = conv.out_channels // heads
    projected: dict[str, Any] = conv.kqv_lin(x_dict)
    first = next(iter(projected.values()))
    if not isinstance(first, NodeTensor) or first.dtype not in ops.FLOATS or not edges:
        return None
    if torch.is_autocast_enabled(first.device.type):
        return None
    enter = first._sharding.copy_to_ranks
    weights = [enter(lin.weight) for lin in (conv.k_rel, conv.v_rel)]
    by_key, by_value = (weight.view(heads, len(conv.edge_types), columns, columns) for weight in weights)
    priors = {relation: enter(conv.p_rel["__".join(relation)]) for relation in edges}
    kqv = {kind: rows.to_local() for kind, rows in projected.items()}
    outs: dict[str, Any] = {}
    for kind, rows in kqv.items():
        if kind not in conv.dst_node_types:
            continue
        relations = [relation for relation in edges if relation[-1] == kind]
        query = torch.tensor_split(rows, 3, dim=1)[1]
        keys, values = [], []
        for relation in relations:
            key, _, value = (x.view(-1, heads, columns) for x in torch.tensor_split(kqv[relation[0]], 3, dim=1))
            number = conv.edge_types_map[relation]
            keys.append(torch.einsum("nhc,hcd->nhd", key, by_key[:, number]) * priors[relation].view(1, heads, 1))
            values.append(torch.einsum("nhc,hcd->nhd", value, by_value[:, number]))
        if relations:
            joined = _joined([edges[relation] for relation in relations])
            spec = AttentionSpec("dot", heads, scale=1 / math.sqrt(columns))
            inputs = AttentionInputs(torch.cat(values), torch.cat(keys), query.reshape(-1, heads, columns))
            sums = joined.graph.attend(joined, inputs, spec, conv)[0]
        else:
            sums = torch.zeros_like(query)
        sources = {relation[0] for relation in relations}
        unused = [rows for other, rows in kqv.items() if not (relations and other in {kind, *sources})]
        unused += [prior for relation, prior in priors.items() if relation not in relations]
        sums = _DependsOn.apply(sums, *unused, *(weights if not relations else ()))
        outs[kind] = NodeTensor.from_local(sums, projected[kind]._sharding)
    mapped = conv.out_lin({kind: F.gelu(out) for kind, out in outs.items()})
    for kind in outs:
        out = mapped[kind]
        if out.size(-1) == x_dict[kind].size(-1):
            alpha = conv.skip[kind].sigmoid()
            out = alpha * out + (1 - alpha) * x_dict[kind]
        outs[kind] = out
    return outs


class _DependsOn(LocalFunction[Tensor]):
    """A tensor as it is; others get a gradient of zeros from it.

    PyG has the rows of all types in one tensor, so each parameter gets a gradient, and an optimizer may change it
    (weight decay), whichever types' outputs make up the loss.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(grad.new_zeros(1, dtype=dtype).expand(shape) for shape, dtype in ctx.others)


def _joined(edges: Sequence[Edges]) -> Edges:
    """The edges of several relations with one type of targets, made once (collective: gathers them all)."""

    def make() -> tuple[Edges, Sequence[Edges]]:
        first, *others = (one.graph.sources for one in edges)
        before = accumulate((one.graph.sources.size for one in edges), initial=0)
        offsets = [(number, 0) for number, _ in zip(before, edges, strict=False)]
        return joined_edges(edges, offsets, first.joined(others), edges[0].graph.targets).edges(), edges

    if len(edges) == 1:
        return edges[0]
    return edges[0].kept.get(("joined", *map(id, edges)), None, make)[0]
