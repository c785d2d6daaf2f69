"""From rows per node to rows per edge and back: products with the incidence matrix of an end, and with its transpose.

A conv's messages are edge tensors, and its nodes' features are node tensors. Two functions lead from one to the other,
each the transpose of the other: :func:`nodes_to_edges` gives each edge the row of one of its ends (PyG's ``_lift``),
:func:`edges_to_nodes` reduces the values of the edges that meet in a node (PyG's ``scatter``). Both take a
:class:`~pyg_dist.graph.edges.NodeIds`, which stands for ``edge_index[0]`` (sources, whose rows may live on other
ranks) or ``edge_index[1]`` (targets, which are local).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from pyg_dist.errors import LayoutMismatchError, UnsupportedError
from pyg_dist.graph.protocol import EdgeView
from pyg_dist.tensor.row_tensor import EdgeTensor, NodeTensor, as_row_tensor_, local_values, version_of

_FEW_COLUMNS = 16
"""Narrower rows travel as they are here, also where packing would shorten them: logits of attention, degrees,
positions. A column of these has a meaning and a range of its own, and what follows is no sum (a softmax of rounded
logits is biased); in two bits 15 columns would be 8 bytes instead of 60."""


def is_wide(rows: Tensor) -> bool:
    """Whether these rows may be sent in ``bits`` when edges need them."""
    return rows.dtype.is_floating_point and rows.shape[1:].numel() >= _FEW_COLUMNS


class EdgeEnd(Protocol):
    """What a :class:`~pyg_dist.graph.edges.NodeIds` is: the sources (0) or targets (1) of edges."""

    edges: Any
    end: Any


_EdgeRows = tuple[NodeTensor, tuple[int | None, bool], Tensor]


@dataclass
class _Call:
    """A layer that runs, and the rows that it has exchanged: by tensor and graph, the tensor's state and the rows."""

    layer: nn.Module
    is_message: bool = False
    exchanged: dict[tuple[int, EdgeView], _EdgeRows] = field(default_factory=dict)


_call: _Call | None = None


@contextmanager
def share_halo_within(layer: nn.Module) -> Iterator[None]:
    """Within it exchanges are those of ``layer``, and a node tensor is exchanged once.

    Raises:
        UnsupportedError: See :func:`no_layer_within`.
    """
    global _call
    if _call is not None and _call.is_message:
        name, outer_name = (type(one).__name__.removeprefix("Distributed") for one in (layer, _call.layer))
        raise UnsupportedError(
            f"{outer_name} calls {name} within its message, which some ranks run more often than others: call it in "
            f"the forward, before propagate, and pass what it gives to propagate"
        )
    outer, _call = _call, _Call(layer)
    try:
        yield
    finally:
        _call = outer


@contextmanager
def no_layer_within(layer: nn.Module) -> Iterator[None]:
    """Context for the messages of ``layer``: another layer that runs within it would wait for other ranks."""
    global _call
    outer = _call
    _call = _Call(layer, True, {} if outer is None else outer.exchanged)
    try:
        yield
    finally:
        _call = outer


def nodes_to_edges(x: NodeTensor, ids: EdgeEnd) -> EdgeTensor:
    """Each edge's row of ``x``: its source's or its target's. Differentiable, collective for sources.

    Exact, but for sources' rows of 16 columns or more in a conv's training with ``bits``: those are rounded at random,
    and so are their gradients on the way back.

    Shapes:
        - x: ``[N, ...]``; floating types travel as they are (float16 as float32), or in ``bits``; integers and
          bools as int64
        - output: ``[E, ...]``
    """
    edges = ids.edges
    edges.end(ids.end)  # raises where they were changed
    if not edges.graph.owns(x):
        raise LayoutMismatchError(
            f"Expected a row for each of the {edges.graph.node_sharding} of the edges' graph (got {x._sharding} of "
            f"another graph or selection): take both from one data"
        )
    return cast(EdgeTensor, edges.fetch(x, ids.end))


def neighbour_rows(x: NodeTensor, graph: EdgeView) -> Tensor:
    """Local rows, then those of other ranks; exchanged once for all edges of a layer's call (collective)."""
    known = known_neighbour_rows(x, graph)
    if known is not None:
        return known
    local, state = x.to_local(), _state(x)
    call = None if state[0] is None else _call
    rows = graph.neighbour_rows(local, call.layer if call is not None and is_wide(local) else None)
    if call is not None:
        call.exchanged[id(x), graph] = (x, state, rows)
    return rows


def known_neighbour_rows(x: NodeTensor, graph: EdgeView) -> Tensor | None:
    """:func:`neighbour_rows`, where they have been exchanged in this call; ``None``: they have not."""
    known = None if _call is None else _call.exchanged.get((id(x), graph))
    return known[2] if known is not None and known[1] == _state(x) else None


def _state(x: NodeTensor) -> tuple[int | None, bool]:
    return version_of(x), x.requires_grad and torch.is_grad_enabled()


def edges_to_nodes(values: EdgeTensor, ids: EdgeEnd, reduce: str = "sum") -> NodeTensor:
    """Reduce the values of the edges that share a target (or, sums only, a source). Exact, differentiable.

    Collective for sources.

    Shapes:
        - values: ``[E, ...]``
        - output: ``[N, ...]``

    Raises:
        UnsupportedError: Another reduction than a sum over edges with a common source, which lie on several ranks.
    """
    edges = ids.edges
    out = edges.reduce(local_values(values, edges.rows), ids.end, reduce)
    return cast(NodeTensor, as_row_tensor_(out, edges.graph.node_sharding))
