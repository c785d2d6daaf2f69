"""``to_hetero_with_bases``: all types of nodes as one set, and the edges of all relations as those of one graph.

PyG's model puts the rows of all types one after another, adds to each relation's edges the numbers of the nodes before
their types', and splits the results. Here the joined rows are those that a rank has of each type, so none is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch_geometric.nn import to_hetero_with_bases_transformer as pyg
from torch_geometric.typing import EdgeType, NodeType

from pyg_dist.backend import host
from pyg_dist.backend.on_device import on_device
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import NodeSharding
from pyg_dist.tensor import RowTensor
from pyg_dist.tensor.functions.moved_rows import MovedRows
from pyg_dist.tensor.registry import Function
from pyg_dist.tensor.sharding import RowSharding


def joined_edges(
    relations: Sequence[Edges], offsets: Sequence[tuple[int, int]], sources: NodeSharding, targets: NodeSharding
) -> DistributedEdgeIndex:
    """The edges of several relations as those of one graph (collective: gathers them all).

    ``offsets`` are added to the numbers of each relation's sources and targets.
    """
    whole = [one.full_tensor().cpu() + host.tensor(add).view(2, 1) for one, add in zip(relations, offsets, strict=True)]
    graph, pieces = relations[0].graph, [one.rows for one in relations]
    joined = DistributedEdgeIndex.over(
        torch.cat(whole, 1), targets, graph.device, graph.loop_rule, is_kept=False, sources=sources
    )
    assert joined is not None
    ordered, place = _positions(pieces).sort()
    rows = joined.graph.edge_sharding
    rows.pieces, rows.order_in_pieces = pieces, place[torch.searchsorted(ordered, rows.position)]
    return joined


def join_types(model: fx.GraphModule) -> None:
    """Let a model of ``to_hetero_with_bases`` join types of distributed graphs, too; another one stays as it is."""
    steps = {step.target: step for step in reversed(model.graph.nodes)}
    known = {"nodes": steps.get(pyg.group_node_placeholder), "offsets": steps.get(pyg.get_node_offset_dict)}
    for step in model.graph.nodes:
        if step.target in _OURS:
            step.target = _OURS[step.target]
            if step.target in (_edge_type, _group_edges):
                step.kwargs = known
    model.recompile()


def _rows(value: object) -> RowTensor | None:
    """The rows of a tensor that has them in the dimension in which PyG joins types."""
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
    """The edges of all relations, or their rows as long as their graph is not known; ``None`` of plain ones.

    ``values`` are their handles, or tensors with a row for each of their edges. The graph is made once (collective).
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
    name = f"joined {[*map(id, given)]}"  # which the pieces of the graph's edges keep alive
    if handles and name not in ends.edge_sets:
        before = [(offsets[source], offsets[target]) for source, _, target in relations]
        ends.edge_sets[name] = joined_edges([handle.edges() for handle in handles], before, ends, ends)
    if name in ends.edge_sets:
        return ends.edge_sets[name]  # type: ignore[no-any-return]
    rows = RowSharding(ends.group, "edge", sum(piece.size for piece in given), _positions(given))
    rows.pieces = given
    return rows


def _positions(pieces: Sequence[RowSharding]) -> Tensor:
    """Where the local rows of each stand among the rows of all, one after another."""
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
