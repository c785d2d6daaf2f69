"""PyG's ``HGTConv``: attention over all relations that end at a type, as one op on one graph."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import HGTConv
from torch_geometric.nn.aggr import SumAggregation

from pyg_dist.backend import ops
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.ops.attention import MAX_HEADS
from pyg_dist.conv.fast_paths import fast_path
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edge_sets import JoinedNodes
from pyg_dist.graph.edges import Edges
from pyg_dist.tensor import NodeTensor


@fast_path(HGTConv, sums=(SumAggregation,), when=lambda conv: conv.heads <= MAX_HEADS)
def typed_attention(conv: HGTConv, edges: dict[Any, Edges], given: dict[str, Any]) -> dict[str, Tensor] | None:
    """``HGTConv``'s forward (Hu et al., "Heterogeneous graph transformer", 2020; collective).

    A source has a key and a value for each relation, ``k W_r p_r`` and ``v V_r``. PyG puts the rows of all types into
    one graph, here the relations that end at a type make one: the softmax of a target is over all of them. ``None``
    under autocast.
    """
    x_dict, heads = given["x_dict"], conv.heads
    columns = conv.out_channels // heads
    kqv: dict[str, Any] = {kind: torch.tensor_split(rows, 3, dim=1) for kind, rows in conv.kqv_lin(x_dict).items()}
    first = next(iter(kqv.values()))[0]
    if not isinstance(first, NodeTensor) or first.dtype not in ops.FLOATS or not edges:
        return None
    if torch.is_autocast_enabled(first.device.type):
        return None
    enter = first._sharding.copy_to_ranks
    by_key, by_value = (
        enter(lin.weight).view(heads, len(conv.edge_types), columns, columns) for lin in (conv.k_rel, conv.v_rel)
    )
    outs: dict[str, Any] = {}
    for kind, (_, query, _) in kqv.items():
        if kind not in conv.dst_node_types:
            continue
        relations = [relation for relation in edges if relation[-1] == kind]
        if not relations:
            outs[kind] = torch.zeros_like(query)
            continue
        keys, values = [], []
        for relation in relations:
            key, _, value = (rows.to_local().view(-1, heads, columns) for rows in kqv[relation[0]])
            number, prior = conv.edge_types_map[relation], enter(conv.p_rel["__".join(relation)])
            keys.append(torch.einsum("nhc,hcd->nhd", key, by_key[:, number]) * prior.view(1, heads, 1))
            values.append(torch.einsum("nhc,hcd->nhd", value, by_value[:, number]))
        joined = _joined([edges[relation] for relation in relations])
        spec = AttentionSpec("dot", heads, scale=1 / math.sqrt(columns))
        inputs = AttentionInputs(torch.cat(values), torch.cat(keys), query.to_local().view(-1, heads, columns))
        sums = joined.graph.attend(joined, inputs, spec, conv)[0]
        outs[kind] = NodeTensor.from_local(sums, joined.graph.targets)
    projected = conv.out_lin({kind: F.gelu(out) for kind, out in outs.items()})
    for kind in outs:
        out = projected[kind]
        if out.size(-1) == x_dict[kind].size(-1):
            alpha = conv.skip[kind].sigmoid()
            out = alpha * out + (1 - alpha) * x_dict[kind]
        outs[kind] = out
    return outs


def _joined(edges: Sequence[Edges]) -> Edges:
    """The edges of several relations with one type of targets, made once (collective: gathers them all)."""

    def make() -> tuple[Edges, Sequence[Edges]]:
        sources = JoinedNodes([one.graph.sources for one in edges])
        offsets = [torch.tensor([[first], [0]]) for first in sources.first_of]
        whole = [one.full_tensor().cpu() + offset for one, offset in zip(edges, offsets, strict=False)]
        graph = edges[0].graph
        handle = DistributedEdgeIndex.over(
            torch.cat(whole, 1), graph.targets, graph.device, is_kept=False, sources=sources
        )
        assert handle is not None
        return handle.edges(), edges

    if len(edges) == 1:
        return edges[0]
    return edges[0].kept.get(("joined", *map(id, edges)), None, make)[0]
