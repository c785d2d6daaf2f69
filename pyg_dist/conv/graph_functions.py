"""PyG's graph functions that convs call, for distributed edges.

The code of a conv runs as PyG wrote it, but its ``softmax``, ``add_self_loops`` ... are these
(:mod:`pyg_dist.conv.function_patching`). For other functions of edges all edges are gathered, and PyG's function is
called. On plain tensors each function is PyG's.

PyG's pools that keep nodes (``TopKPooling``, ``SAGPooling``, ``GraphUNet``) call two of them: ``SelectTopK`` chooses
nodes by the scores of all, ``FilterEdges`` keeps the edges between these. Rows stay on their ranks; each rank cuts its
own edges (:meth:`~pyg_dist.graph.protocol.DistributedGraph.among`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import FunctionType
from typing import Any, cast

import torch
import torch_geometric.utils as pyg
from torch import Tensor
from torch_geometric.nn import GraphUNet, pool
from torch_geometric.nn.conv import gcn_conv
from torch_geometric.nn.pool.connect import FilterEdges
from torch_geometric.nn.pool.select import SelectTopK

from pyg_dist.backend import host
from pyg_dist.backend.autograd.linear_map import append
from pyg_dist.conv.function_patching import patched
from pyg_dist.conv.inputs import moved_values, require_all_at, require_all_nodes, require_floats, rows_along
from pyg_dist.conv.lazy_norm import LazyNorm, made, norm_of
from pyg_dist.errors import LayoutMismatchError, UnsupportedError
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edge_sets import pick
from pyg_dist.graph.edges import Edges, NodeIds
from pyg_dist.graph.gcn_norm import inverse_sqrt_degree
from pyg_dist.graph.protocol import NodeSharding, nodes_at, the_one
from pyg_dist.store.manifest import LoopRule
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.functions.moved_rows import MovedRows
from pyg_dist.tensor.operands import local_values as _local
from pyg_dist.tensor.registry import Function, mapped
from pyg_dist.tensor.row_index import PickedNodes

SUBSTITUTES: dict[Function, Function] = {}
"""The functions for distributed edges, by PyG's."""


def _stands_for(stock: Function, *others: type) -> Callable[[Function], Function]:
    """Register the decorated function in place of ``stock`` for calls with distributed edges or rows."""
    kinds = (Edges, RowTensor, MovedRows, *others)

    def decorate(ours: Function) -> Function:
        @wraps(stock)
        def either(*args: object, **kwargs: object) -> Any:
            is_ours = any(isinstance(a, kinds) for a in (*args, *kwargs.values()))
            return ours(*made(args), **made(kwargs)) if is_ours else stock(*args, **kwargs)

        SUBSTITUTES[stock] = either
        return ours

    return decorate


def _ids_of(index: object, values: object = None) -> NodeIds | None:
    """``index`` as an end of edges; a copy, such as a clone, is found by comparison with the ends (collective)."""
    if isinstance(index, NodeIds) or not isinstance(index, Tensor):
        return index if isinstance(index, NodeIds) else None
    of_edges = index if isinstance(index, RowTensor) else values.of if isinstance(values, MovedRows) else values
    known = of_edges._sharding.known.edges if isinstance(of_edges, EdgeTensor) else None
    edges: Edges | None = None if known is None else known()
    if edges is None or index.shape != (edges.rows.size,):
        return None
    ends = [edges.end(end) for end in (1, 0)]
    equal = [ids for ids in ends if bool((ids == index).all())]
    return equal[0] if len(equal) == 1 or (equal and edges.graph.sources is edges.graph.targets) else None


def _require_ids(name: str, index: object, values: object = None) -> NodeIds:
    ids = _ids_of(index, values)
    if ids is not None:
        return ids
    raise UnsupportedError(
        f"{name} expected edge_index[0] or edge_index[1] as its index (got a {type(index).__name__}): other indices "
        f"are not known to name nodes"
    )


def _require_no_values(name: str, edges: Edges) -> None:
    if edges.weight is not None:
        raise UnsupportedError(f"{name} of an adj_t with values: pass edge_index and edge_weight")


@_stands_for(pyg.softmax)
def softmax(
    src: Tensor, index: object = None, ptr: object = None, num_nodes: int | None = None, dim: int = 0
) -> EdgeTensor:
    """Softmax over the edges of each node at one end; or over rows with the same index, such as a graph's nodes.

    Collective for sources: values are sent to the ranks of the sources and back.
    """
    if not isinstance(index, NodeIds) and isinstance(src, NodeTensor):
        return pyg.softmax(src, index, ptr, num_nodes, dim)  # type: ignore[no-any-return]
    ids = _require_ids("softmax", index, src)
    if ptr is not None:
        raise UnsupportedError("softmax of distributed edges expected no 'ptr', which goes by all edges: leave it out")
    values, place = rows_along("softmax", "values", src, dim)
    by_node = ids.edges if ids.end else ids.edges.reversed
    out = by_node.softmax_by_target(_local(moved_values(values, ids.edges, by_node), by_node.rows))
    return cast(EdgeTensor, MovedRows.make(moved_values(by_node.tensor(out), by_node, ids.edges), place))


@_stands_for(pyg.scatter)
def scatter(src: Tensor, index: Any, dim: int = 0, dim_size: int | None = None, reduce: str = "sum") -> Tensor:
    """Reduce by the nodes at one end; or sum by another index, such as a type, into a plain tensor (collective)."""
    ids = _ids_of(index, src)
    of_rows = index if isinstance(index, RowTensor) else src if isinstance(index, Tensor) else None
    if ids is not index and ids is not None and dim_size not in (None, nodes_at(ids.edges.graph, ids.end).size):
        ids = None  # types that are equal to the nodes' ids, as without edges
    if ids is None and isinstance(of_rows, RowTensor) and dim_size is not None and reduce == "sum":
        rows = of_rows._sharding
        return rows.reduce_from_ranks(pyg.scatter(_local(src, rows), _local(index, rows), dim, dim_size, reduce))
    ids = ids if ids is not None else _require_ids("scatter", index)
    values, place = rows_along("scatter", "values", src, dim)
    require_all_at("scatter", ids.edges.graph, ids.end, dim_size)
    return MovedRows.make(ids.add_up(values, reduce), place)


@_stands_for(pyg.degree)
def degree(index: object, num_nodes: int | None = None, dtype: torch.dtype | None = None) -> NodeTensor:
    """Number of edges at each node."""
    ids = _require_ids("degree", index)
    require_all_at("degree", ids.edges.graph, ids.end, num_nodes)
    dtype = dtype or torch.get_default_dtype()
    counted = dtype if dtype.is_floating_point else torch.float64  # sources' sums travel as floats
    return ids.add_up(_ones(ids.edges, counted)).to(dtype)  # type: ignore[return-value]


def _ones(edges: Edges, dtype: torch.dtype) -> EdgeTensor:
    return edges.tensor(torch.ones(edges.rows.num_local, dtype=dtype, device=edges.graph.device))


@_stands_for(pyg.remove_self_loops)
def remove_self_loops(edge_index: Edges, edge_attr: Tensor | None = None) -> tuple[Edges, EdgeTensor | None]:
    """The other edges, and their values (collective at the first use)."""
    _require_no_values("remove_self_loops", edge_index)
    edges, places = edge_index.without_loops
    if edge_attr is None:
        return edges, None
    return edges, edges.tensor(_local(edge_attr, edge_index.rows).index_select(0, places))


@_stands_for(pyg.contains_self_loops)
def contains_self_loops(edge_index: Edges) -> bool:
    """Whether there is one on any rank (collective at the first use)."""
    return edge_index.without_loops.edges.rows.size < edge_index.rows.size


@_stands_for(pyg.add_self_loops)
def add_self_loops(
    edge_index: Edges, edge_attr: Tensor | None = None, fill_value: object = None, num_nodes: object = None
) -> tuple[Edges, Tensor | None]:
    """Append a loop for each node; its value is given, or reduced from those of the node's in-edges."""
    _require_no_values("add_self_loops", edge_index)
    require_all_nodes("add_self_loops", edge_index.graph, num_nodes)
    return _looped(edge_index, edge_attr, fill_value, num_nodes)


def _knows_all_nodes(edges: Edges, num_nodes: object) -> bool:
    """Whether PyG knows the number of nodes: by ``num_nodes``, an ``adj_t``, or since the last node has an edge."""
    is_told = num_nodes is not None or edges.graph.loop_rule != "remaining"
    return is_told or edges.end_of_ids == edges.graph.targets.size


def _loops_at(edges: Edges, weight: Tensor | None, edge_index: Edges, num_nodes: object) -> tuple[Edges, Tensor | None]:
    """``edges`` with only the loops that PyG makes: without ``num_nodes`` up to the last node in ``edge_index``."""
    if _knows_all_nodes(edge_index, num_nodes):
        return edges, weight
    kept = edges.tensor(edges.end(1).to_local() < edge_index.end_of_ids)
    return edges.selected(kept), None if weight is None else weight[kept]


def _filled(values: Tensor, fill_value: Any, edges: Edges) -> Tensor:
    """The value of each node's loop: ``fill_value``, one (``None``), or its in-edges' values reduced by that name."""
    if isinstance(fill_value, str):
        return edges.reduce(values, 1, fill_value)
    shape = (edges.graph.targets.num_local, *values.shape[1:])
    if isinstance(fill_value, Tensor):
        value = edges.rows.copy_to_ranks(fill_value).to(values.dtype)
        return (value if value.dim() == values.dim() else value.unsqueeze(0)).expand(shape)
    return values.new_full(shape, 1.0 if fill_value is None else fill_value)


@_stands_for(pyg.add_remaining_self_loops)
def add_remaining_self_loops(
    edge_index: Edges, edge_attr: Tensor | None = None, fill_value: object = None, num_nodes: object = None
) -> tuple[Edges, Tensor | None]:
    """One loop for each node, behind the other edges; a node that has one keeps its value."""
    _require_no_values("add_remaining_self_loops", edge_index)
    require_all_nodes("add_remaining_self_loops", edge_index.graph, num_nodes)
    return _looped(edge_index, edge_attr, fill_value, num_nodes, "remaining")


def _looped(
    edge_index: Edges, edge_attr: Tensor | None, fill_value: object, num_nodes: object, rule: LoopRule | None = None
) -> tuple[Edges, Tensor | None]:
    """The edges and a loop for each node; with a ``rule`` for their values, the loops replace those that exist."""
    others, places = edge_index.without_loops if rule is not None else (edge_index, None)
    edges, weight = others.with_loops, None
    if edge_attr is not None:
        values = _local(edge_attr, edge_index.rows)
        filled = _filled(values, fill_value, edge_index)
        if rule is not None and places is not None:
            filled = edge_index.with_loop_values(filled, values, rule)
            values = values.index_select(0, places)
        weight = edges.tensor(append([values, filled]))
    return _loops_at(edges, weight, edge_index, num_nodes)


@_stands_for(gcn_conv.gcn_norm)
def gcn_norm(
    edge_index: Edges,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> tuple[Edges, Tensor]:
    """``d_j^-1/2 w_ji d_i^-1/2``; for all edges of a graph they are made at the first use (collective then)."""
    if edge_index.weight is not None:  # PyG ignores edge_weight then
        edge_weight = edge_index.weight
    require_floats("gcn_norm", edge_weight)
    graph, dtype = edge_index.graph, dtype or torch.get_default_dtype()
    the_one(graph.sources, graph.targets)
    is_all = not add_self_loops or _knows_all_nodes(edge_index, num_nodes)
    if add_self_loops:
        require_all_nodes("add_remaining_self_loops", edge_index.graph, num_nodes)
    is_vector = edge_weight is None or (
        isinstance(edge_weight, EdgeTensor) and edge_weight._sharding is edge_index.rows and edge_weight.dim() == 1
    )
    by_source = flow == "target_to_source" and graph.loop_rule == "remaining"  # PyG ignores the flow of an adj_t
    if edge_index.rows is not graph.edge_sharding or not is_vector or not is_all or by_source:
        return _gcn_norm(edge_index, edge_weight, improved, add_self_loops, dtype, by_source, num_nodes)
    norm = norm_of(graph, add_self_loops, improved, edge_weight is not None)
    lazy = LazyNorm(
        edge_index, edge_weight, norm, dtype if edge_weight is None else edge_weight.dtype,  # type: ignore[arg-type]
        lambda edges, weight: _gcn_norm(edges, weight, improved, add_self_loops, dtype, num_nodes=graph.targets.size),
    )  # fmt: skip
    return lazy.stand_ins()


def _gcn_norm(
    edge_index: Edges,
    edge_weight: Tensor | None,
    improved: bool,
    add_self_loops: bool,
    dtype: torch.dtype,
    by_source: bool = False,
    num_nodes: int | None = None,
) -> tuple[Edges, Tensor]:
    """The norm of any edges, with degrees by target or by source (collective)."""
    if add_self_loops:
        fill_value = 2.0 if improved else 1.0
        rule = edge_index.graph.loop_rule
        if edge_weight is None and rule == "add":  # one and one are two
            edge_weight = _ones(edge_index, dtype)
        edge_index, edge_weight = _looped(edge_index, edge_weight, fill_value, num_nodes, rule)
    source, target = edge_index.end(0), edge_index.end(1)
    weight = _ones(edge_index, dtype) if edge_weight is None else edge_weight
    end = source if by_source else target
    scale = inverse_sqrt_degree(end.add_up(weight))
    return edge_index, scale[source] * weight * scale[target]


@_stands_for(pyg.get_laplacian)
def get_laplacian(
    edge_index: Edges,
    edge_weight: Tensor | None = None,
    normalization: str | None = None,
    dtype: torch.dtype | None = None,
    num_nodes: int | None = None,
) -> tuple[Edges, EdgeTensor]:
    """``D - A``, ``I - D^-1/2 A D^-1/2`` ("sym") or ``I - D^-1 A`` ("rw"), loops left out of A (collective)."""
    require_all_nodes("get_laplacian", edge_index.graph, num_nodes)
    require_floats("get_laplacian", edge_weight)
    edges, weight = remove_self_loops(edge_index, edge_weight)
    weight = _ones(edges, dtype or torch.get_default_dtype()) if weight is None else weight
    source, target = edges.end(0), edges.end(1)
    degree = source.add_up(weight)
    values = weight
    if normalization == "sym":
        scale = inverse_sqrt_degree(degree)
        values = scale[source] * weight * scale[target]
    elif normalization == "rw":
        inverse = 1.0 / degree
        values = inverse.masked_fill(inverse == float("inf"), 0.0)[source] * weight
    elif normalization is not None:
        raise UnsupportedError(f"get_laplacian expected the normalization 'sym', 'rw' or None (got {normalization!r})")
    loops = degree.to_local() if normalization is None else torch.ones_like(degree.to_local())
    looped = edges.with_loops
    of_all = looped.tensor(append([-values.to_local(), loops]))
    return _loops_at(looped, of_all, edges, num_nodes)  # type: ignore[return-value]


@_stands_for(pool.select.topk.topk)
def topk(x: Any, ratio: float | None, batch: Any, min_score: float | None = None, tol: float = 1e-7) -> PickedNodes:
    """The nodes with the highest scores, best first, as ids that select their rows (collective: gathers all scores)."""
    nodes, scores = x.to_rows()._sharding, x.detach().full_tensor()
    if not isinstance(nodes, NodeSharding) or nodes.is_union:
        raise UnsupportedError(
            f"Pooling expected a score for each node of a graph, or of a batch of one data group (got {nodes}): pool "
            f"the rows of the whole graph"
        )
    batch = batch.full_tensor() if isinstance(batch, RowTensor) else batch
    chosen = pool.select.topk.topk(scores, ratio, batch, min_score, tol)
    return pick(nodes, chosen, x.device)


@_stands_for(pool.connect.filter_edges.filter_adj, DistributedEdgeIndex)
def filter_adj(
    edge_index: Any, edge_attr: Tensor | None, node_index: Any, cluster_index: Any = None, num_nodes: object = None
) -> tuple[DistributedEdgeIndex, Tensor | None]:
    """The edges between picked nodes, numbered by these, and their values (collective)."""
    if cluster_index is not None and not torch.equal(cluster_index.cpu(), host.arange(len(node_index))):
        raise UnsupportedError(
            "Pooling expected picked nodes in the order of their numbers (got another cluster_index): order both by it"
        )
    nodes: Any = node_index.source if isinstance(node_index, PickedNodes) else edge_index.graph.targets
    if isinstance(edge_index, MovedRows):  # ends that a script has stacked
        edge_index = edge_index.full_tensor()
    if not isinstance(edge_index, DistributedEdgeIndex):  # kept for later calls by the nodes of a graph, not of a batch
        edge_index = DistributedEdgeIndex.over(edge_index, nodes, node_index.device, is_kept=nodes.sample is None)
    whole = edge_index.graph
    if whole.sources is not nodes or whole.targets is not nodes or edge_index.is_sparse:
        raise LayoutMismatchError(
            f"Pooling expected an edge_index between the {nodes.size} nodes that it has scores of (got {edge_index!r} "
            f"of other nodes, or an adj_t): take both from one DistributedData"
        )
    if not isinstance(node_index, PickedNodes):  # chosen by plain scores
        node_index = pick(nodes, node_index, whole.device)
    graph, rows = whole.among(node_index._sharding), whole.edge_sharding
    if edge_attr is not None:
        values = edge_attr if isinstance(edge_attr, RowTensor) else EdgeTensor.from_local(_local(edge_attr, rows), rows)
        edge_attr = graph.pick_edges().fetch(values)
    return DistributedEdgeIndex(graph), edge_attr


@_stands_for(pyg.one_hot)
def one_hot(index: RowTensor, num_classes: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Row by row."""
    classes = int(index.max()) + 1 if num_classes is None else num_classes
    return RowTensor.from_local(pyg.one_hot(index.to_local(), classes, dtype), index._sharding)


def _of_all_edges(stock: Function) -> Function:
    """PyG's function of all edges and rows, which are gathered; the result is plain (collective)."""

    def ours(*args: object, **kwargs: object) -> Any:
        return stock(*mapped(args, _full), **mapped(kwargs, _full))

    return ours


def _full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, (DistributedEdgeIndex, Edges, RowTensor, MovedRows)) else value


for _name in {*pyg.__all__} - {"trim_to_layer"}:
    _stock = getattr(pyg, _name)
    if isinstance(_stock, FunctionType) and "edge_index" in signature(_stock).parameters and _stock not in SUBSTITUTES:
        _stands_for(_stock)(_of_all_edges(_stock))


class DistributedSelectTopK(SelectTopK):
    """PyG's code; the highest scores are found among those of all nodes (collective). Exact."""

    forward = patched(SelectTopK.forward, SUBSTITUTES)


class DistributedFilterEdges(FilterEdges):
    """PyG's code, for distributed edges (collective). Exact."""

    forward = patched(FilterEdges.forward, SUBSTITUTES)


class DistributedGraphUNet(GraphUNet):
    """PyG's code; every rank computes all paths of two edges of the whole graph (collective). Exact."""

    augment_adj = _of_all_edges(GraphUNet.augment_adj)
