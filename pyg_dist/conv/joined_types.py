"""Models that join types: ``to_hetero_with_bases`` (all types in one tensor) and ``HGTConv`` (relations in one graph).

PyG concatenates the rows of all types, shifts each relation's edges by the number of nodes before their types, and
splits the results. Here each rank concatenates its own rows of each type, so no row is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch_geometric.nn import HGTConv
from torch_geometric.nn import to_hetero_with_bases_transformer as pyg
from torch_geometric.nn.aggr import SumAggregation
from torch_geometric.typing import EdgeType, NodeType

from pyg_dist.backend import host, ops
from pyg_dist.backend.local_function import Context, LocalFunction
from pyg_dist.backend.on_device import on_device
from pyg_dist.backend.ops import AttentionInputs, AttentionSpec
from pyg_dist.backend.ops.attention import MAX_HEADS
from pyg_dist.conv.fast_paths import Given, fast_path
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import NodeSharding
from pyg_dist.tensor import NodeTensor, RowTensor
from pyg_dist.tensor.functions.moved_rows import MovedRows
from pyg_dist.tensor.registry import Function
from pyg_dist.tensor.sharding import RowSharding


def joined_edges(
    relations: Sequence[Edges], offsets: Sequence[tuple[int, int]], sources: NodeSharding, targets: NodeSharding
) -> DistributedEdgeIndex:
    """The edges of several relations as one graph, with ``offsets`` added to ids (collective: gathers them all)."""
    whole = [one.full_tensor().cpu() + host.tensor(add).view(2, 1) for one, add in zip(relations, offsets, strict=True)]
    graph, pieces = relations[0].graph, [one.rows for one in relations]
    edges = torch.cat(whole, 1)
    joined = DistributedEdgeIndex.over(edges, targets, graph.device, graph.loop_rule, is_kept=False, sources=sources)
    ordered, place = _positions(pieces).sort()
    rows = joined.graph.edge_sharding
    rows.pieces, rows.order_in_pieces = pieces, place[torch.searchsorted(ordered, rows.position)]
    return joined


def join_types(model: fx.GraphModule) -> None:
    """Make a model of ``to_hetero_with_bases`` join types of distributed graphs; other models are left unchanged."""
    steps = {step.target: step for step in reversed(model.graph.nodes)}
    known = {"nodes": steps.get(pyg.group_node_placeholder), "offsets": steps.get(pyg.get_node_offset_dict)}
    for step in model.graph.nodes:
        if step.target in _OURS:
            step.target = _OURS[step.target]
            if step.target in (_edge_type, _group_edges):
                step.kwargs = known
    model.recompile()


def _rows(value: object) -> RowTensor | None:
    """The rows of a tensor if they lie in the dimension that PyG concatenates types in."""
    if type(value) is MovedRows:
        return value.of if value.place == value.dim() - 2 else None
    return value if isinstance(value, RowTensor) and value.dim() <= 2 else None


def _joined(values: Sequence[Any], rows: RowSharding) -> Tensor:
    local = torch.cat([_rows(value).to_local() for value in values])  # type: ignore[union-attr]
    if rows.order_in_pieces is not None:
        local = local.index_select(0, on_device(rows.order_in_pieces, local.device))
    return MovedRows.make(RowTensor.from_local(local, rows), max(values[0].dim() - 2, 0))


def _group_nodes(input_dict: Mapping[NodeType, Tensor], type2id: Mapping[NodeType, int]) -> Tensor:
    values = [input_dict[kind] for kind in type2id]
    rows = [own._sharding for value in values if (own := _rows(value)) is not None]
    if len(values) == 1 or len(rows) < len(values):
        return pyg.group_node_placeholder(input_dict, type2id)  # type: ignore[no-any-return]
    first, *others = rows
    return _joined(values, first.joined(others))  # type: ignore[attr-defined]


def _group_edges(
    input_dict: Mapping[EdgeType, Any], type2id: Mapping[EdgeType, int], offset_dict: object = None, **known: Any
) -> Any:
    values = [input_dict[relation] for relation in type2id]
    joined = _relations(values, type2id, **known)
    if joined is None or len(values) == 1:
        return pyg.group_edge_placeholder(input_dict, type2id, offset_dict)
    return joined if isinstance(values[0], DistributedEdgeIndex) else _joined(values, _rows_of(joined))


def _edge_type(input_dict: Mapping[EdgeType, Any], type2id: Mapping[EdgeType, int], **known: Any) -> Tensor:
    values = [input_dict[relation] for relation in type2id]
    joined = _relations(values, type2id, **known)
    if joined is None:
        return pyg.get_edge_type(input_dict, type2id)  # type: ignore[no-any-return]
    rows = _rows_of(joined)
    local = host.arange(len(values)).repeat_interleave(host.tensor([p.num_local for p in rows.pieces or [rows]]))
    if rows.order_in_pieces is not None:
        local = local[rows.order_in_pieces]
    return RowTensor.from_local(local.to(values[0].device), rows)


def _rows_of(edges: DistributedEdgeIndex | RowSharding) -> RowSharding:
    return edges if isinstance(edges, RowSharding) else edges.graph.edge_sharding


def _relations(
    values: Sequence[Any], relations: Iterable[EdgeType], nodes: object, offsets: Mapping[NodeType, int]
) -> DistributedEdgeIndex | RowSharding | None:
    """The joined edges of all relations, or only their row sharding while no graph was made; ``None`` for plain values.

    ``values`` are handles of edges, or tensors with a row for each edge. The graph is made once (collective).
    """
    own = _rows(nodes)
    handles = [value for value in values if isinstance(value, DistributedEdgeIndex)]
    given = [handle.graph.edge_sharding for handle in handles] or [
        value._sharding for value in map(_rows, values) if value is not None
    ]
    if own is None or len(given) < len(values):
        return None
    if len(values) == 1:
        return handles[0] if handles else given[0]
    ends: Any = own._sharding
    name = f"joined {[*map(id, given)]}"  # ids stay valid: ``rows.pieces`` of the joined edges keeps ``given`` alive
    if handles and name not in ends.edge_sets:
        before = [(offsets[source], offsets[target]) for source, _, target in relations]
        ends.edge_sets[name] = joined_edges([handle.edges() for handle in handles], before, ends, ends)
    if name in ends.edge_sets:
        return ends.edge_sets[name]  # type: ignore[no-any-return]
    rows = RowSharding(ends.group, "edge", sum(piece.size for piece in given), _positions(given))
    rows.pieces = given
    return rows


def _positions(pieces: Sequence[RowSharding]) -> Tensor:
    """The positions of the pieces' local rows among all rows of all pieces, concatenated."""
    before = accumulate((piece.size for piece in pieces), initial=0)
    return torch.cat([piece.position + number for piece, number in zip(pieces, before, strict=False)])


def _split(output: Tensor, offset_dict: Mapping[Any, int]) -> dict[Any, Tensor]:
    own = _rows(output)
    if own is None:
        return pyg.split_output(output, offset_dict)  # type: ignore[no-any-return]
    rows, local = own._sharding, own.to_local()
    if not rows.pieces:
        return dict.fromkeys(offset_dict, output)
    if rows.order_in_pieces is not None:
        local = local.index_select(0, rows.order_in_pieces.argsort().to(local.device))
    parts = local.split([piece.num_local for piece in rows.pieces])
    found = [RowTensor.from_local(part, piece) for part, piece in zip(parts, rows.pieces, strict=True)]
    return {kind: MovedRows.make(part, max(output.dim() - 2, 0)) for kind, part in zip(offset_dict, found, strict=True)}


_OURS: dict[Function, Function] = {
    pyg.group_node_placeholder: _group_nodes,
    pyg.group_edge_placeholder: _group_edges,
    pyg.get_edge_type: _edge_type,
    pyg.split_output: _split,
}


@fast_path(HGTConv, sums=(SumAggregation,), when=lambda conv: conv.heads <= MAX_HEADS)
def typed_attention(conv: HGTConv, edges: dict[EdgeType, Edges], given: Given) -> dict[str, Tensor] | None:
    """``HGTConv``'s forward (Hu et al., "Heterogeneous graph transformer", 2020; collective).

    A source has a key and a value for each relation, ``k W_r p_r`` and ``v V_r``. A target's softmax is over the edges
    of all relations that end at its type, so these are joined into one graph (PyG joins all). ``None`` under autocast.
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
            joined = _one_graph([edges[relation] for relation in relations])
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
    """The identity of a tensor, which also gives other tensors a gradient of zeros.

    In PyG one tensor has the rows of all types, so every parameter gets a gradient (and weight decay), even if the loss
    depends on some types only.
    """

    @staticmethod
    def forward(ctx: Context, x: Tensor, *others: Tensor) -> Tensor:
        ctx.others = [(other.shape, other.dtype) for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(grad.new_zeros(1, dtype=dtype).expand(shape) for shape, dtype in ctx.others)


def _one_graph(edges: Sequence[Edges]) -> Edges:
    """The edges of several relations with one type of targets, made once (collective: gathers them all)."""

    def make() -> tuple[Edges, Sequence[Edges]]:
        first, *others = (one.graph.sources for one in edges)
        before = accumulate((one.graph.sources.size for one in edges), initial=0)
        offsets = [(number, 0) for number, _ in zip(before, edges, strict=False)]
        return joined_edges(edges, offsets, first.joined(others), edges[0].graph.targets).edges(), edges

    if len(edges) == 1:
        return edges[0]
    return edges[0].kept.get(("joined", *map(id, edges)), None, make)[0]
