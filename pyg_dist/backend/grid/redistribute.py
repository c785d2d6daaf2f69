"""A matrix changes its layout on the grid: every element moves, nothing is added; the backward is the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend.comm.group import from_wire, to_wire
from pyg_dist.backend.grid.transport import MeshTransport, Pending
from pyg_dist.backend.local_function import LocalFunction


@dataclass(frozen=True)
class Redistribution:
    """A change of layout on this rank: a linear map that moves every element of a matrix.

    Attributes:
        wire: all ranks of the grid.
        send: for each rank: the local rows (or ``None``) and the first and last local column, exclusive, that it gets.
        receive: for each rank: the local rows that it fills, and likewise.
        num_rows, num_columns: the local size afterwards.
        back: the change in the other direction.
    """

    wire: MeshTransport
    send: tuple[tuple[Tensor | None, int, int], ...]
    receive: tuple[tuple[Tensor | None, int, int], ...]
    num_rows: int
    num_columns: int
    back: list[Redistribution]

    def move(self, x: Tensor) -> Tensor:
        """The rows and columns of the other layout (collective, no autograd)."""
        outgoing = [
            x.new_empty(0) if rows is None else x[:, low:high].index_select(0, rows).reshape(-1)
            for rows, low, high in self.send
        ]
        sizes = [0 if rows is None else rows.numel() * (high - low) for rows, low, high in self.receive]
        if self.wire.group.size == 1:
            arrived = outgoing[0]
        else:
            sent = [piece.numel() for piece in outgoing]
            arrived = from_wire(Pending(self.wire, to_wire(torch.cat(outgoing)), sent, sizes).wait(), x.dtype)
        out = x.new_empty(self.num_rows, self.num_columns)
        for piece, (rows, low, high) in zip(torch.split(arrived, sizes), self.receive, strict=True):
            if rows is not None:
                out[:, low:high].index_copy_(0, rows, piece.view(rows.numel(), high - low))
        return out


class _Redistribute(LocalFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, redistribution: Redistribution) -> Tensor:
        ctx.redistribution = redistribution
        return redistribution.move(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return redistribute(grad, ctx.redistribution.back[0]), None


def redistribute(x: Tensor, redistribution: Redistribution) -> Tensor:
    """The matrix in its other layout; values and gradients move, nothing is added (collective, both ways).

    The gradient of a matrix, too, is one matrix, of which replicas hold the same elements: so the backward is the
    change of layout in the other direction, and replicas count once.
    """
    out: Tensor = _Redistribute.apply(x, redistribution)  # type: ignore[no-untyped-call]
    return out
