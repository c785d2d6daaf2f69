"""Which collectives a function of the global view calls, as DTensor's tests count them with ``CommDebugMode``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from against_torch import LAYOUTS, NO_DERIVATIVE, Expression, Operands, assert_same, leaves
from torch import Tensor
from torch_geometric.data import Data

from pyg_dist import DistributedData
from pyg_dist.backend.comm.group import Group
from pyg_dist.backend.comm.transport import Transport
from pyg_dist.tensor import RowTensor

# Everything that leaves a rank passes through one of these; what one of them calls inside is part of it.
_OF_GROUP = {
    "all_reduce_": "sum", "gather_counts": "count", "all_true": "agree", "gather_rows": "gather",
    "broadcast_": "broadcast",
}  # fmt: skip
_OF_TRANSPORT = {
    "all_to_all": "all-to-all", "all_gather": "pieces", "reduce_scatter": "scattered-sum",
    "to_neighbours": "messages", "barrier": "barrier",
}  # fmt: skip
MESH = {"x": 2, "y": 2}


@contextmanager
def collectives() -> Iterator[list[str]]:
    """The kinds of the collectives that this rank calls inside the context, among more than one rank."""
    seen: list[str] = []
    depth = [0]

    def spied(kind: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if depth[0] == 0 and (args[0] if isinstance(args[0], Group) else args[0].group).size > 1:
                seen.append(kwargs.get("op", args[2] if len(args) > 2 else kind) if kind == "sum" else kind)
            depth[0] += 1
            try:
                return function(*args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    with ExitStack() as stack:
        for owner, kinds in ((Group, _OF_GROUP), (Transport, _OF_TRANSPORT)):
            for name, kind in kinds.items():
                stack.enter_context(mock.patch.object(owner, name, spied(kind, getattr(owner, name))))
        yield seen


def words(kinds: list[str]) -> str:
    """``["sum", "count", "sum"]`` as ``"2 sum, count"``."""
    counts = {kind: kinds.count(kind) for kind in sorted(kinds)}
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in counts.items()) or "none"


def plus(costs: str, more: str) -> str:
    """Both costs, as :func:`words` writes them."""
    kinds = [part.rpartition(" ") for part in (*costs.split(", "), *more.split(", ")) if part != "none"]
    return words([kind for number, _, kind in kinds for _ in range(int(number or 1))])


@cache
def _tiles() -> Any:
    """A graph on a mesh over the nodes of the layout "tall", whose ``x`` is a tile."""
    N, F, _ = LAYOUTS["tall"]
    node = torch.arange(N)
    data = Data(x=torch.zeros(N, F, dtype=torch.float64), edge_index=torch.stack([node, node.roll(1)]))
    return DistributedData(data, layout="grid", mesh=MESH).x._sharding


class GridOperands(Operands):
    """Operands on a grid: matrices with as many columns as features in tiles, the others in whole rows."""

    def _distribute(self, full: Tensor) -> RowTensor:
        tile = _tiles()
        is_tile = full.shape[1:] == (tile.width,)
        rows = tile if is_tile else tile.whole
        with torch.no_grad():
            return RowTensor.from_local(rows.slice(full), rows)


def count(expression: Expression, on_grid: bool, compare: bool = True) -> tuple[str, str, int, int]:
    """What a call costs: collectives of the call, of its backward pass, tiles among its operands, those that learn.

    What a parameter, or a distribution, has once (first values, the positions of all rows) does not count.

    Args:
        expression: the call.
        on_grid: whether matrices are tiles.
        compare: whether to compare the values with torch's on the way.
    """
    kind = GridOperands if on_grid else Operands
    before = kind("tall", True)
    _backward(expression(before))
    operands = kind("tall", True)
    operands._made.update({name: x for name, x in before._made.items() if not isinstance(x, RowTensor)})
    with collectives() as forward:
        result = expression(operands)
    with collectives() as backward:
        _backward(result)
    if compare:
        for got, expected in zip(leaves(result), leaves(expression(Operands("tall", False))), strict=True):
            assert_same(got.full_tensor() if isinstance(got, RowTensor) else got, expected, "result")
    tiles = [x for x in operands._made.values() if isinstance(x, RowTensor) and x._sharding.kind == "tile"]
    return words(forward), words(backward), len(tiles), sum(tile.grad is not None for tile in tiles)


def _backward(result: Any) -> None:
    outputs = [x for x in leaves(result) if isinstance(x, Tensor) and x.requires_grad and x.is_floating_point()]
    outputs = [x.to_local() if isinstance(x, RowTensor) else x for x in outputs]
    if outputs:
        try:
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
        except RuntimeError as error:
            if not any(reason in str(error) for reason in NO_DERIVATIVE):
                raise
