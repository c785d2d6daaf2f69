"""The call of a layer that runs: its arguments, and rows that it has exchanged, which are sent once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pyg_dist.errors import UnsupportedError
from pyg_dist.graph.protocol import EdgeView
from pyg_dist.tensor.row_tensor import NodeTensor, RowTensor, version_of

_FEW_COLUMNS = 16
"""Narrower rows travel as they are here, also where packing would shorten them: logits of attention, degrees,
positions. A column of these has a meaning and a range of its own, and what follows is no sum (a softmax of rounded
logits is biased); in two bits 15 columns would be 8 bytes instead of 60."""


def is_wide(rows: Tensor) -> bool:
    """Whether these rows may be sent in ``bits`` when edges need them."""
    return rows.dtype.is_floating_point and rows.shape[1:].numel() >= _FEW_COLUMNS


_EdgeRows = tuple[RowTensor, tuple[int | None, bool], Tensor]


@dataclass
class Call:
    """A layer that runs."""

    layer: nn.Module
    given: Mapping[str, object] = field(default_factory=dict)  # the arguments of its forward
    is_message: bool = False
    # by tensor and graph, the tensor's state and its rows at the edges
    exchanged: dict[tuple[int, EdgeView], _EdgeRows] = field(default_factory=dict)
    left: tuple[object, NodeTensor] | None = None  # a result that a step leaves for a later one


_call: Call | None = None


def call_of(layer: nn.Module) -> Call | None:
    """The call that runs, if it is one of ``layer``."""
    return _call if _call is not None and _call.layer is layer else None


@contextmanager
def _during(call: Call) -> Iterator[None]:
    global _call
    outer, _call = _call, call
    try:
        yield
    finally:
        _call = outer


def running(layer: nn.Module, given: Mapping[str, object] | None = None) -> AbstractContextManager[None]:
    """Context of a call of ``layer``: exchanges are its own, and a node tensor is exchanged once; not in a message."""
    if _call is not None and _call.is_message:
        name, outer_name = (type(one).__name__.removeprefix("Distributed") for one in (layer, _call.layer))
        raise UnsupportedError(
            f"{outer_name} calls {name} within its message, which some ranks run more often than others: call it in "
            f"the forward, before propagate, and pass what it gives to propagate"
        )
    return _during(Call(layer, given or {}))


def no_layer_within(layer: nn.Module) -> AbstractContextManager[None]:
    """Context for the messages of ``layer``: another layer that runs within it would wait for other ranks."""
    return _during(Call(layer, is_message=True, exchanged={} if _call is None else _call.exchanged))


def neighbour_rows(x: RowTensor, graph: EdgeView) -> Tensor:
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


def known_neighbour_rows(x: RowTensor, graph: EdgeView) -> Tensor | None:
    """:func:`neighbour_rows`, where they have been exchanged in this call; ``None``: they have not."""
    known = None if _call is None else _call.exchanged.get((id(x), graph))
    return known[2] if known is not None and known[1] == _state(x) else None


def _state(x: RowTensor) -> tuple[int | None, bool]:
    return version_of(x), x.requires_grad and torch.is_grad_enabled()
