"""Copies of rows on several ranks, for products in which each copy has another part; the adjoint sums them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.grid.transport import MeshTransport, Pending
from pyg_dist.backend.local_function import LocalFunction


@dataclass(frozen=True)
class EdgeValueScatter:
    """Rows that go to one or several ranks each, the same way every time.

    Attributes:
        wire: the ranks.
        send_index: local rows, by receiver.
        sent, received: rows by rank.
        arrival: puts what arrives into its final order.
        num_rows: local rows.
    """

    wire: MeshTransport
    send_index: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]
    arrival: Tensor
    num_rows: int

    @staticmethod
    def by_rank(wire: MeshTransport, receiver: Tensor, row: Tensor, key: Tensor) -> EdgeValueScatter:
        """Send local ``row[i]`` to ``receiver[i]``, where rows are sorted by their ``key`` (collective).

        Shapes:
            - receiver, row: int64 ``[s]``
            - key: int64, by local row
        """
        group = wire.group
        order = torch.argsort(receiver, stable=True)
        sent = torch.bincount(receiver, minlength=group.size)
        received = group.gather_rows(sent.view(1, -1), [1] * group.size)[:, group.rank]
        unsorted = EdgeValueScatter(
            wire,
            row[order],
            tuple(sent.tolist()),
            tuple(received.tolist()),
            torch.arange(int(received.sum())),
            key.numel(),
        )
        return replace(unsorted, arrival=torch.argsort(unsorted.scatter(key), stable=True))

    def scatter(self, values: Tensor) -> Tensor:
        """What arrives of every rank's ``values`` (collective, no autograd): ``[e, ...] -> [sum(received), ...]``."""
        outgoing = values.index_select(0, self.send_index)
        return self._exchange(outgoing, self.sent, self.received).index_select(0, self.arrival)

    def gather_sum(self, copies: Tensor) -> Tensor:
        """The sum of every row's copies, at the row's rank; the transpose of :meth:`scatter` (collective, no autograd).

        Shapes:
            - copies: ``[sum(received), ...]``
            - output: ``[e, ...]``
        """
        outgoing = torch.empty_like(copies).index_copy_(0, self.arrival, copies)
        arrived = self._exchange(outgoing, self.received, self.sent)
        return copies.new_zeros(self.num_rows, *copies.shape[1:]).index_add_(0, self.send_index, arrived)

    def _exchange(self, outgoing: Tensor, sent: tuple[int, ...], received: tuple[int, ...]) -> Tensor:
        """Rows by receiver become rows by sender."""
        if self.wire.group.size == 1:
            return outgoing
        shape = outgoing.shape[1:]
        sizes = ([count * shape.numel() for count in counts] for counts in (sent, received))
        return Pending(self.wire, outgoing.contiguous().view(-1), *sizes).wait().view(sum(received), *shape)


class _ScatterEdgeValues(LocalFunction):
    """Copies of rows, or their sums: each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dispatch: EdgeValueScatter, home: bool) -> Tensor:
        ctx.dispatch, ctx.home = dispatch, home
        return dispatch.gather_sum(values) if home else dispatch.scatter(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _ScatterEdgeValues.apply(grad, ctx.dispatch, not ctx.home), None, None  # type: ignore[no-untyped-call]


def scatter_edge_values(values: Tensor, dispatch: EdgeValueScatter) -> Tensor:
    """:meth:`EdgeValueScatter.scatter`; the backward sums the copies, each of which met another part (collective)."""
    out: Tensor = _ScatterEdgeValues.apply(values, dispatch, False)  # type: ignore[no-untyped-call]
    return out
