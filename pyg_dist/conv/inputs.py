"""Checks and layout of a conv's inputs: a handle and row tensors, or the plain tensors of the stock conv."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn import MessagePassing

from pyg_dist.backend import ops
from pyg_dist.backend.session.state import world_size
from pyg_dist.conv.fast_paths import STEPS
from pyg_dist.errors import DataError, LayoutMismatchError, UnsupportedError
from pyg_dist.graph.adjacency import adjacency
from pyg_dist.graph.edge_index import DistributedEdgeIndex
from pyg_dist.graph.edges import Edges
from pyg_dist.graph.protocol import DistributedGraph, EdgeView, End, NodeSharding, nodes_at
from pyg_dist.partition.inputs import as_edges
from pyg_dist.tensor import EdgeTensor, NodeTensor, RowTensor
from pyg_dist.tensor.functions.moved_rows import MovedRows
from pyg_dist.tensor.operands import described
from pyg_dist.tensor.registry import mapped
from pyg_dist.tensor.row_tensor import local_tensors, version_of
from pyg_dist.tensor.sharding import RowSharding


def edge_handle(
    conv: MessagePassing,
    edge_index: object,
    x: object,
    calls_message: bool,
    hyperedges: RowSharding | int | None = None,
) -> DistributedEdgeIndex | None:
    """The edges that ``conv`` runs over; ``None`` if all is plain, in one process, and the stock conv is to run.

    A plain ``edge_index`` beside node tensors is laid out over their nodes (collective). ``x``: features, or a pair,
    rows of the sources and of the targets. ``calls_message``: whether the stock conv's ``message``, ``aggregate`` and
    ``update`` are called; if not, they must not be overridden. ``hyperedges``: those where plain edges end, or their
    number.
    """
    name = type(conv).__name__
    features, at_targets = x if isinstance(x, (tuple, list)) and len(x) == 2 else (x, None)
    features, at_targets = (x.of if type(x) is MovedRows else x for x in (features, at_targets))
    by_source = conv.flow != "source_to_target"
    turns = by_source and not calls_message
    handle: DistributedEdgeIndex
    if isinstance(edge_index, DistributedEdgeIndex):
        if by_source and edge_index.is_sparse:
            raise UnsupportedError(
                f"{name} expected flow='source_to_target' with an adj_t (got {conv.flow!r}): transpose the input"
            )
        handle = edge_index.reversed if turns else edge_index
    else:
        if type(edge_index) is MovedRows:  # ends that a script has stacked
            edge_index = edge_index.full_tensor()
        is_plain = isinstance(edge_index, Tensor) and edge_index.layout == torch.strided
        laid_out: DistributedEdgeIndex | None = None
        if is_plain and isinstance(features, NodeTensor):
            edges = as_edges(edge_index)
            whole, device = features._sharding.whole, features.device
            targets = at_targets._sharding.whole if isinstance(at_targets, NodeTensor) else whole
            ends: Any = (targets, whole) if turns else (whole, targets)
            if all(isinstance(nodes, NodeSharding) for nodes in ends):
                end: Any = ends[1] if hyperedges is None else hyperedges
                laid_out = DistributedEdgeIndex.over(edges.flip(0) if turns else edges, end, device, sources=ends[0])
        elif at_targets is None:
            laid_out = adjacency(edge_index, features)
        if laid_out is None:
            if world_size() > 1 or isinstance(features, NodeTensor):
                raise DataError(
                    f"{name} expected features and edge_index of a DistributedData (got {type(features).__name__} and "
                    f"a plain {type(edge_index).__name__} at world size {world_size()}): wrap the graph, "
                    f"data = DistributedData(data), and pass data.x and data.edge_index; for a first state of zeros "
                    f"and edges of the script's own, data.edge_set(edge_index), or a state of torch.zeros_like(data.x)"
                )
            return None
        handle = laid_out
    if not calls_message:
        refuse_overridden(conv.__class__)
    return handle


def require_all_nodes(name: str, graph: DistributedGraph | EdgeView, size: Any) -> None:
    """Refuse a ``size`` that is not the pair of the numbers of all sources and all targets; it may be left out."""
    if size is None:
        return
    wanted, pair = (graph.sources.size, graph.targets.size), (size, size) if np.ndim(size) == 0 else tuple(size)
    if len(pair) != 2 or any(n is not None and n != of_all for n, of_all in zip(pair, wanted, strict=True)):
        raise _other_size(name, graph, size)


def require_all_at(name: str, graph: DistributedGraph | EdgeView, end: End, number: int | None) -> None:
    """Refuse a ``number`` that is not that of all nodes at an end of the edges; it may be left out."""
    if number is not None and number != nodes_at(graph, end).size:
        raise _other_size(name, graph, number)


def _other_size(name: str, graph: DistributedGraph | EdgeView, size: object) -> UnsupportedError:
    all_nodes = f"{graph.sources.size} sources and all {graph.targets.size}"
    if graph.sources is graph.targets:
        all_nodes = f"{graph.sources.size} nodes as sources and as"
    return UnsupportedError(
        f"{name} expected all {all_nodes} targets (got size={size}): leave 'size' out, and wrap a HeteroData where "
        f"edges go between two sets of nodes"
    )


@cache
def refuse_overridden(cls: type) -> None:
    """Refuse a user's subclass of a conv with an own form if it overrides a step, which would not be called."""
    stock = next(base for base in cls.__mro__ if base.__module__.startswith("torch_geometric."))
    # PyG itself generates a `propagate` for every class.
    changed = next((s for s in ("update", *STEPS[1:]) if getattr(cls, s) is not getattr(stock, s)), None)
    if changed is not None:
        raise UnsupportedError(
            f"{cls.__name__} got a change to {changed!r}, a step of the stock conv that no rank takes: change x, edge "
            f"weights or the output instead, or use a stock conv on the plain Data"
        )


def place_of_nodes(conv: MessagePassing, x: Tensor) -> int:
    """The dimension of ``x`` in which the code of ``conv`` has nodes or edges."""
    return int(conv.node_dim) % x.dim() if -x.dim() <= conv.node_dim < x.dim() else 0


def has_batch(x: Any) -> bool:
    """Whether features, or the first of a pair, have more than two dimensions."""
    x = x[0] if type(x) in (tuple, list) and x else x
    with local_tensors():
        return isinstance(x, Tensor) and x.dim() > 2


def in_batch(conv: MessagePassing, value: object, rows: RowSharding) -> Any:
    """A plain ``[B, N, F]`` as a batch of these rows, if the conv has nodes in dimension 1; else the value itself."""
    if not isinstance(value, Tensor) or isinstance(value, (RowTensor, MovedRows)) or value.dim() < 3:
        return value
    place = place_of_nodes(conv, value)
    if place == 0 or value.shape[place] != rows.size:
        return value
    return MovedRows.make(RowTensor.from_local(rows.slice(value.movedim(place, 0)), rows), place)


def rows_along(name: str, what: str, x: Any, dim: int) -> tuple[Any, int]:
    """``x`` with rows first, and the dimension of its rows, which has to be ``dim``."""
    place = x.place if type(x) is MovedRows else 0
    if dim % x.dim() != place:
        remedy = "transpose(0, 1)" if place == 0 and dim % x.dim() == 1 else f"movedim({place}, {dim})"
        raise UnsupportedError(
            f"{name} reads {what} along dimension {dim} (got shape {list(x.shape)} with rows in dimension {place}): "
            f"pass [N, F], or [B, N, F], as x.{remedy} is"
        )
    return (x.of if place else x), place


def node_rows(conv: MessagePassing, graph: DistributedGraph | EdgeView, x: object, end: End | None = None) -> Any:
    """``x`` as a node tensor of ``graph``, or a batch of these, ``[B, N, F]``; a plain tensor is sliced along N.

    ``end``: whether it has rows of the sources (0) or targets (1); ``None``: of the end that fits.
    """
    rows = _rows_like(conv, x, graph) if end is None else graph.targets if end else graph.sources
    name = type(conv).__name__
    x = in_batch(conv, x, rows)
    if type(x) is MovedRows:
        if place_of_nodes(conv, x) != x.place:
            raise UnsupportedError(
                f"{name} has nodes in dimension {conv.node_dim} of its features (got {list(x.shape)} with nodes in "
                f"dimension {x.place}): call it for each item of a batch, or move the nodes, x.movedim({x.place}, 0)"
            )
        return MovedRows.make(_whole_rows(conv, graph, x.of, rows), x.place)
    is_pygs = getattr(conv, "stock", type(conv)).__module__.startswith("torch_geometric.")
    if is_pygs and isinstance(x, NodeTensor) and x.dim() > 2:  # a script's own conv may reshape it
        rows_along(name, "features", x, conv.node_dim)  # raises
    return _whole_rows(conv, graph, x, rows)


def _whole_rows(conv: MessagePassing, graph: DistributedGraph | EdgeView, x: object, rows: NodeSharding) -> NodeTensor:
    """:func:`node_rows` where nodes are in dimension 0."""
    name = type(conv).__name__
    if isinstance(x, Tensor):
        with local_tensors():
            device = x.device
        if device != graph.device:
            raise LayoutMismatchError(
                f"{name} expected features on {graph.device}, where the edges are (got them on {device}): "
                f"data.to('{device.type}') moves both"
            )
    if isinstance(x, NodeTensor) and graph.owns(x, 1 if rows is graph.targets else 0):
        return x
    if isinstance(x, NodeTensor) or (isinstance(x, RowTensor) and x._sharding.size == rows.size):
        # x[torch.randperm(N)], as contrastive methods have it
        permuted = rows.align_by_position(x.to_local(), x._sharding)
        if permuted is not None:
            return NodeTensor.from_local(permuted, rows)
        if x._sharding.whole is rows:
            raise LayoutMismatchError(
                f"{name} expected features of all {rows.size} nodes (got {x._sharding.size} selected ones): select "
                f"edges, edge_index[:, mask], and rows of the output"
            )
        if graph.sources is not graph.targets:
            end_name = "targets" if rows is graph.targets else "sources"
            raise LayoutMismatchError(
                f"{name} expected a row for each of the {rows.size} {end_name} of the edges (got rows of "
                f"{x._sharding.size} other nodes): pass the pair (x_src, x_dst) of the edges' types"
            )
        raise LayoutMismatchError(
            f"{name} got node features and an edge_index of two different graphs ({x._sharding.size} and "
            f"{rows.size} nodes): take both from one DistributedData"
        )
    if isinstance(x, Tensor) and x.layout != torch.strided:
        raise UnsupportedError(f"{name} expected dense features (got {x.layout}): use .to_dense()")
    if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows.size:
        return NodeTensor.from_local(rows.slice(x), rows)
    shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
    if isinstance(x, Tensor) and torch._C._current_graph_task_id() != -1:  # inside of a backward pass
        raise UnsupportedError(
            f"{name} got local rows {shape} from a checkpoint inside of another one, or of saved_tensors_hooks, which "
            f"returns node tensors as plain ones: pass use_reentrant=True to checkpoint"
        )
    where = f" in dimension {conv.node_dim}" if isinstance(x, Tensor) and x.dim() > 2 else ""
    raise DataError(f"{name} expected node features with {rows.size} rows{where} (got {shape}): pass data.x")


def _rows_like(conv: MessagePassing, x: Any, graph: DistributedGraph | EdgeView) -> NodeSharding:
    """The targets, if ``x`` has rows of these and not of the sources; else the sources."""
    x = x.of if type(x) is MovedRows else x
    size = None if isinstance(x, RowTensor) else x.shape[place_of_nodes(conv, x) if x.dim() > 2 else 0]
    is_of_sources = graph.owns(x, 0) if isinstance(x, RowTensor) else size == graph.sources.size
    is_of_targets = graph.owns(x, 1) if isinstance(x, RowTensor) else size == graph.targets.size
    return graph.targets if is_of_targets and not is_of_sources else graph.sources


def features(conv: MessagePassing, graph: DistributedGraph | EdgeView, x: object, end: End) -> NodeTensor:
    """:func:`node_rows`, which have to be a matrix in a dtype of the kernels."""
    rows: NodeTensor = node_rows(conv, graph, x, end)
    with local_tensors():
        fits = rows.dim() == 2 and rows.dtype in ops.FLOATS
    if not fits:
        raise DataError(
            f"{type(conv).__name__} expected features [N, F] in float32, float64, bfloat16 or float16 (got shape "
            f"{list(rows.shape)} in {rows.dtype}): reshape or convert data.x"
        )
    return rows


def edge_rows(conv: MessagePassing, edge_index: DistributedEdgeIndex, weight: Tensor | None) -> EdgeTensor | None:
    """The edge weights as an edge tensor ``[E]``: those given, else those of ``adj_t``."""
    weight = edge_index.weight if weight is None else weight
    rows = edge_index.graph.edge_sharding
    if weight is None:
        return None
    values = edge_values(conv, "edge_weight", weight, rows)
    if values.numel() != rows.size:
        raise DataError(
            f"{type(conv).__name__} expected 'edge_weight' with one value for each of the {rows.size} edges (got shape "
            f"{list(values.shape)}): pass data.edge_weight"
        )
    return flat_weight(values)


def require_floats(name: str, weight: Tensor | None) -> None:
    """Refuse integer weights, as PyG's norms do."""
    if weight is not None and not weight.is_floating_point():
        raise DataError(f"{name} expected edge weights of floating type (got {weight.dtype}): pass edge_weight.float()")


def flat_weight(weight: EdgeTensor) -> EdgeTensor:
    """A weight for each edge, ``[E]`` or ``[E, 1]``, as ``[E]``."""
    if weight.dim() == 1:
        return weight
    return derived(weight, weight._sharding, lambda w: w.view(-1).clone())  # type: ignore[return-value]


def edge_values(conv: MessagePassing, name: str, value: Tensor, rows: RowSharding) -> EdgeTensor:
    """``value`` as an edge tensor with these rows: plain tensors are sliced, values in other rows sent (collective)."""
    found = edge_values_if_any(value, rows)
    if found is not None:
        return found
    raise DataError(
        f"{type(conv).__name__} expected '{name}' with a row for each of the {rows.size} edges of this graph (got "
        f"{described(value)}): pass data.{name}"
    )


def edge_values_if_any(value: Tensor, rows: RowSharding) -> EdgeTensor | None:
    """As :func:`edge_values`; ``None`` if ``value`` does not have a row for each edge."""
    if isinstance(value, EdgeTensor) and value._sharding is rows:
        return value
    if value.shape[:1] != (rows.size,):
        return None
    if not isinstance(value, RowTensor):
        return derived(value, rows, lambda w: EdgeTensor.from_local(rows.slice(w), rows))
    return derived(value, rows, lambda w: _moved(w, rows))


def moved_values(value: Any, before: Edges, after: Edges) -> Any:
    """``value`` with edge values of ``before`` redistributed to the same edges in ``after``: collective unless same."""
    return value if before is after else mapped(value, partial(_moved_value, before.rows, after.rows))


def _moved_value(before: RowSharding, after: RowSharding, value: Any) -> Any:
    if isinstance(value, EdgeTensor) and value._sharding is before:
        return value.redistribute(after)
    return MovedRows.make(_moved_value(before, after, value.of), value.place) if type(value) is MovedRows else value


def _moved(value: RowTensor, rows: RowSharding) -> EdgeTensor | None:
    local = rows.from_sharding(value.to_local(), value._sharding)
    # A copy: a view would keep `value` alive, the key under which this is cached.
    return None if local is None else EdgeTensor.from_local(local.clone(), rows)


def snapshot(weight: EdgeTensor) -> EdgeTensor:
    """A copy of constant edge weights: the same object for all callers until they change."""
    return derived(weight, weight._sharding, lambda w: w.detach().clone())  # type: ignore[return-value]


W = TypeVar("W", bound=Tensor)
D = TypeVar("D")

_DERIVED: MutableMapping[Tensor, list[Any]] = WeakIdKeyDictionary()
"""The latest results of :func:`derived` by tensor: rows, version, result."""

_MOST_DERIVED = 4


def derived(weight: W, rows: RowSharding | None, derive: Callable[[W], D]) -> D:
    """``derive(weight)``, not a view; for a constant the same object each time, since operators are cached by it."""
    version = version_of(weight)
    if weight.requires_grad or version is None:
        return derive(weight)
    known = _DERIVED.get(weight, [])
    for its_rows, its_version, found in known:
        if its_rows is rows and its_version == version:
            return found  # type: ignore[no-any-return]
    made = derive(weight)
    still = (entry for entry in known if entry[1] == version)
    _DERIVED[weight] = [*still, (rows, version, made)][-_MOST_DERIVED:]
    return made
