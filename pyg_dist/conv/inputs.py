"""What a Distributed conv is given: a graph handle and row tensors, or the plain tensors of the stock conv."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from torch_geometric.nn import MessagePassing

from pyg_dist.backend.world import world_size
from pyg_dist.errors import DataError, LayoutMismatchError, UnsupportedError
from pyg_dist.tensor import DistributedEdgeIndex, EdgeTensor, NodeTensor
from pyg_dist.tensor.edge_index import Graph
from pyg_dist.tensor.row_tensor import version_of
from pyg_dist.tensor.rows import Rows


def require_edge_index(conv: MessagePassing, edge_index: Any, x: Any) -> bool:
    """Whether ``edge_index`` is a distributed one, which features ``x`` and several ranks ask for.

    Raises:
        DataError: A plain ``edge_index`` at world size > 1, or with node tensors.
        UnsupportedError: A flow other than ``source_to_target``.
    """
    name = type(conv).__name__
    features = x[0] if isinstance(x, (tuple, list)) else x
    if not isinstance(edge_index, DistributedEdgeIndex):
        if world_size() > 1 or isinstance(features, NodeTensor):
            raise DataError(
                f"{name} expected the edge_index of a DistributedData (got a plain {type(edge_index).__name__} at "
                f"world size {world_size()}): wrap the graph, data = DistributedData(data), and pass data.edge_index"
            )
        return False
    if conv.flow != "source_to_target":
        raise UnsupportedError(
            f"{name} expected flow='source_to_target' (got {conv.flow!r}): flip edge_index before DistributedData"
        )
    return True


def is_distributed(conv: MessagePassing, edge_index: Any, x: Any) -> bool:
    """Whether ``conv`` has to run distributed, after checking that its inputs fit together.

    Raises:
        DataError: See :func:`require_edge_index`.
        UnsupportedError: So, too, or somebody reckons with steps of the stock conv.
    """
    if not require_edge_index(conv, edge_index, x):
        return False
    name = type(conv).__name__
    changed = "explain" if conv.explain else _overridden(type(conv)) or hooked(conv)  # type: ignore[arg-type]
    if changed is not None:
        raise UnsupportedError(
            f"{name} got a change to {changed!r}, a step of the stock conv that no rank takes: change x, edge weights "
            f"or the output instead, or use the plain Data"
        )
    return True


_STEPS = ("propagate", "message", "aggregate", "message_and_aggregate", "edge_update")


@cache
def _overridden(cls: type) -> str | None:
    """The step of PyG's conv that a user's subclass has replaced. Distributed, it would never be called."""
    stock = next(base for base in cls.__mro__ if base.__module__.startswith("torch_geometric."))
    # PyG itself writes a `propagate` for every class.
    return next((s for s in ("update", *_STEPS[1:]) if getattr(cls, s) is not getattr(stock, s)), None)


def hooked(conv: MessagePassing) -> str | None:
    """The step that has hooks."""
    return next(
        (s for s in _STEPS if getattr(conv, f"_{s}_forward_pre_hooks") or getattr(conv, f"_{s}_forward_hooks")), None
    )


def node_rows(conv: MessagePassing, graph: Graph, x: Any) -> NodeTensor:
    """``x`` as a node tensor of ``graph``; a plain tensor with a row per node is sliced.

    Raises:
        DataError: Neither.
        LayoutMismatchError: The node tensor belongs to another graph.
        UnsupportedError: A node tensor that torch has saved for recomputation, and given back as a plain tensor.
    """
    name, rows = type(conv).__name__, graph.node_rows
    if isinstance(x, NodeTensor):
        if not graph.owns(x):
            permuted = rows.pair(x.to_local(), x._rows)  # x[torch.randperm(N)], as contrastive methods have it
            if permuted is not None:
                return NodeTensor.from_local(permuted, rows)  # type: ignore[return-value]
            raise LayoutMismatchError(
                f"{name} got node features and an edge_index of two different graphs ({x._rows.size} and {rows.size} "
                f"nodes): take both from one DistributedData"
            )
        return x
    if isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows.size:
        return NodeTensor.from_local(rows.slice(x), rows)  # type: ignore[return-value]
    shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
    if isinstance(x, Tensor) and torch._C._current_graph_task_id() != -1:  # inside of a backward pass
        raise UnsupportedError(
            f"{name} got local rows {shape} from a checkpoint inside of another one, or of saved_tensors_hooks, which "
            f"returns node tensors as plain ones: pass use_reentrant=True to checkpoint"
        )
    raise DataError(f"{name} expected node features with {rows.size} rows (got {shape}): pass data.x")


_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def features(conv: MessagePassing, graph: Graph, x: Any) -> NodeTensor:
    """:func:`node_rows` of a matrix in a dtype that the kernels know.

    Raises:
        DataError: Also for another number of dimensions, or another dtype.
    """
    rows = node_rows(conv, graph, x)
    if rows.dim() != 2 or rows.dtype not in _DTYPES:
        raise DataError(
            f"{type(conv).__name__} expected features [N, F] in float32, float64 or bfloat16 (got shape "
            f"{list(rows.shape)} in {rows.dtype}): reshape or convert data.x"
        )
    return rows


def edge_rows(conv: MessagePassing, edge_index: DistributedEdgeIndex, weight: Tensor | None) -> EdgeTensor | None:
    """The edge weights as an edge tensor: those given, else those of ``adj_t``.

    Raises:
        DataError: The weights are neither an edge tensor of this graph nor a plain ``[E]`` tensor.
    """
    weight = edge_index.weight if weight is None else weight
    rows = edge_index.graph.edge_rows
    if weight is None:
        return None
    if not isinstance(weight, EdgeTensor) and weight.shape[:1] == (rows.size,) and type(weight) is not NodeTensor:
        weight = _derived(weight, rows, lambda w: EdgeTensor.from_local(rows.slice(w), rows))
    if not isinstance(weight, EdgeTensor) or weight._rows is not rows or weight.numel() != rows.size:
        raise DataError(
            f"{type(conv).__name__} expected edge weights with one value for each of the {rows.size} edges of this "
            f"graph (got {type(weight).__name__} of shape {list(weight.shape)}): pass data.edge_weight"
        )
    return weight if weight.dim() == 1 else _derived(weight, rows, lambda w: w.view(-1).clone())  # type: ignore[return-value]


_DERIVED = WeakIdKeyDictionary()


def _derived(weight: Tensor, rows: Rows, derive: Callable[[Tensor], Tensor]) -> Tensor:
    """``derive(weight)``, no view; for a constant the same as last time: operators go by the object's identity."""
    version = version_of(weight)
    if weight.requires_grad or version is None:
        return derive(weight)
    known = _DERIVED.get(weight)  # type: ignore[no-untyped-call]
    if known is None or known[0] is not rows or known[1] != version:
        known = _DERIVED[weight] = (rows, version, derive(weight))
    return known[2]  # type: ignore[no-any-return]
