"""Linear maps between ranks (moves and sums of rows) with their transpose as the derivative: one autograd function.

====================================  ==========================================  ==================================
map                                   forward                                     transpose
====================================  ==========================================  ==================================
``replicated.CopyToRanks``            identity                                    ``SumOverRanks``
``replicated.GatherRows``             all rows, on every rank                     ``SliceRows``
``comm.redistribution``               elements go to other ranks                  they come back, copies are summed
``halo.operator.LinearOperator``      ``diag(r) (local + halo) diag(c) x``        the transposed matrix
``halo.exchange.Exchange``            rows to the ranks that need them            they come back
``halo.transfer.HaloTransfer``        matrices and exchanges in turn              the same reversed
``grid.collectives.AllGather``        every rank's piece                          ``ReduceScatter``
``grid.operator.TileProduct``         a matrix in tiles times x                   the same with its sides swapped
``sparse.matrix.Matrix``              a matrix of one rank times x                the transposed matrix
====================================  ==========================================  ==================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from pyg_dist.backend.autograd.gradient_bucket import LeafGradient
from pyg_dist.backend.comm.transport import Pending
from pyg_dist.backend.local_function import Context, LocalFunction


class LinearMap(Protocol):
    """A linear map of tensors that lie on several ranks. Every rank has its own piece of it."""

    @property
    def transposed(self) -> LinearMap:
        """The transpose: ``<A x, y> = <x, A^T y>``, inner products taken over all ranks."""
        ...

    def start(self, x: Tensor) -> Pending[Tensor]:
        """Begin to apply it: what is sent is on its way (collective, no autograd, does not wait)."""
        ...


class _Apply(LocalFunction[Tensor]):
    @staticmethod
    def forward(
        ctx: Context, x: Tensor, a: LinearMap, transposed: LinearMap | None, pending: Pending[Tensor] | None,
        leaf: LeafGradient | None,
    ) -> Tensor:  # fmt: skip
        if ctx.needs_input_grad[0]:
            # Transposed now: sorting in the backward pass would come on top of all activations. The transpose of the
            # transpose is the map itself, not one that is sorted again.
            ctx.map, ctx.transposed = a, a.transposed if transposed is None else transposed
            ctx.leaf = leaf
            ctx.set_materialize_grads(False)
        return (a.start(x) if pending is None else pending).wait()

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        if grad is None or (ctx.leaf is not None and ctx.leaf.defer(grad, ctx.next_functions[0][0])):
            return None, None, None, None, None
        return _Apply.apply(grad, ctx.transposed, ctx.map, None, None), None, None, None, None


def apply(a: LinearMap, x: Tensor, pending: Pending[Tensor] | None = None, leaf: LeafGradient | None = None) -> Tensor:
    """``a x``, differentiable by x to any order: the derivative is ``a.transposed`` (collective both ways).

    ``pending`` is ``a.start(x)``, where it has been started; ``leaf`` takes a gradient that may wait for the pass's
    end.
    """
    return _Apply.apply(x, a, None, pending, leaf)


class _Way:
    """A map that is applied in two autograd nodes, and its transpose, which is under way between their derivatives."""

    def __init__(self, a: LinearMap, x: Tensor) -> None:
        self.map, self.transposed, self.shape = a, a.transposed, x.shape
        self.returning: Pending[Tensor] | None = None


class _Begin(LocalFunction[Tensor]):
    @staticmethod
    def forward(ctx: Context, x: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None) -> tuple[Tensor | None, None]:
        returning, ctx.way.returning = ctx.way.returning, None
        return grad if returning is None else returning.wait(), None


class _End(LocalFunction[Tensor]):
    @staticmethod
    def forward(ctx: Context, x: Tensor, way: _Way, pending: Pending[Tensor]) -> Tensor:
        ctx.way = way
        ctx.set_materialize_grads(False)
        return pending.wait()

    @staticmethod
    def backward(ctx: Context, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        way = ctx.way
        if grad is None:
            return None, None, None
        if torch.is_grad_enabled():  # for a derivative of the gradient
            return _Apply.apply(grad, way.transposed, way.map, None, None), None, None
        way.returning = way.transposed.start(grad)
        return grad.new_zeros(()).expand(way.shape), None, None  # in its place; _Begin puts in what arrives


def begin(a: LinearMap, x: Tensor) -> Pending[Tensor]:
    """:func:`apply` whose messages, both ways, hide behind what is recorded before the result is waited for.

    The engine runs the latest recorded node first: the derivative of the result starts the transpose, then come those
    of all that was recorded in between, and that of x waits.
    """
    if not (x.requires_grad and torch.is_grad_enabled()):
        return a.start(x)
    way = _Way(a, x)
    begun = _Begin.apply(x, way)
    pending = a.start(x.detach())
    return Pending(lambda: _End.apply(begun, way, pending))


def append(tensors: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` along dimension 0, whose derivatives reach tensors without elements, too; not collective.

    ``torch.cat`` leaves flat ones out of the graph, and a rank without rows would not take part in a second derivative.
    """
    if tensors[0].dim() != 1:
        return torch.cat([*tensors])
    return torch.cat([t.unsqueeze(1) for t in tensors]).squeeze(1)
