"""A sparse matrix in tiles times dense tiles: the product on one rank, its sums, its transpose and its derivative."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyg_dist.backend import ops
from pyg_dist.backend.grid.collectives import (
    PendingSum,
    all_gather,
    copy_to_replicas,
    gather_pieces,
    reduce_from_replicas,
    reduce_scatter,
)
from pyg_dist.backend.grid.transport import MeshTransport
from pyg_dist.backend.halo.operator import edge_product
from pyg_dist.backend.local_function import LocalFunction
from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.timing import phase


@dataclass(frozen=True)
class GridOperator:
    """A sparse matrix ``diag(r) W diag(c)`` on one rank, and its transpose; a constant, or else without scales.

    Attributes:
        csr: the pattern.
        weight: by edge storage of the pattern, or ``None`` for ones. Where it requires grad, it learns.
        row_scale: r, or ``None`` for ones.
        col_scale: c, or ``None`` for ones.
        divides: whether r and c stand for their inverses, as in
            :class:`~pyg_dist.backend.halo.operator.LinearOperator`.
    """

    csr: CSR
    weight: Tensor | None = None
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    divides: bool = False

    @property
    def learns(self) -> bool:
        """Whether products are to be differentiated by the weights."""
        return self.weight is not None and self.weight.requires_grad

    @cached_property
    def _values(self) -> Tensor | None:
        return None if self.weight is None else self.weight[self.csr.edge]

    @cached_property
    def transposed(self) -> GridOperator:
        """The transposed matrix; a directed graph's backward needs it."""
        return GridOperator(self.csr.transposed, self.weight, self.col_scale, self.row_scale, self.divides)

    def multiply(self, x: Tensor, low: int = 0, high: int | None = None) -> Tensor:
        """Rows ``low`` to ``high`` of the product, local, without autograd. Shapes: ``[m, F] -> [high - low, F]``."""
        high = self.csr.num_rows if high is None else high
        if (low, high) == (0, self.csr.num_rows):
            rowptr, col, values, scale = self.csr.rowptr, self.csr.col, self._values, self.row_scale
        else:
            rowptr = self.csr.rowptr[low : high + 1]
            first, last = int(rowptr[0]), int(rowptr[-1])
            rowptr, col = rowptr - first, self.csr.col[first:last]
            values = None if self._values is None else self._values[first:last]
            scale = None if self.row_scale is None else self.row_scale[low:high]
        with phase("aggregate"):
            return ops.spmm_csr(rowptr, col, x, values, row_scale=scale, col_scale=self.col_scale, divide=self.divides)


@dataclass(frozen=True)
class Side:
    """The rows of a product, or of what it multiplies, and the axis along which they are one whole.

    Attributes:
        wire: the axis.
        sizes: rows by rank of the axis.
        is_scattered: whether each rank holds its piece of them, and not all.
    """

    wire: MeshTransport
    sizes: tuple[int, ...]
    is_scattered: bool


@dataclass(frozen=True)
class TileProduct:
    """A matrix in tiles over two axes, times a matrix whose rows lie over one of them (Plexus, Alg. 1, lines 2-4).

    Pieces of the source's rows are gathered along ``source``'s axis, each rank multiplies by its tile, and the products
    are summed along ``target``'s axis: each rank's piece to it alone, or all to all. The transposed product is the same
    with the sides swapped, and it is the derivative: a gather's is a scattered sum, and that of replicas, each of which
    met another tile, is a sum to all.

    Attributes:
        operator: the tile.
        source: what it multiplies.
        target: the product; its axis is the one to sum over.
        num_blocks: row blocks whose sums are under way while the next block is multiplied (Plexus, 5.2).
    """

    operator: GridOperator
    source: Side
    target: Side
    num_blocks: int

    @property
    def transposed(self) -> TileProduct:
        """The derivative."""
        return TileProduct(self.operator.transposed, self.target, self.source, self.num_blocks)


class PendingProduct:
    """A :class:`TileProduct` under way: all is multiplied, and sums are in flight (collective, no autograd)."""

    def __init__(self, x: Tensor, product: TileProduct) -> None:
        self._operator, self._target = product.operator, product.target
        source, wire = product.source, product.target.wire
        with torch.no_grad():
            x = x.detach()
            if source.is_scattered:
                x = gather_pieces(x, source.wire, source.sizes)
            self._x = x.contiguous()
            self._sums: list[Tensor | PendingSum] = []
            if wire.group.size == 1:
                self._sums.append(self._operator.multiply(self._x))
                return
            self._sizes = [self._block_sizes(b, product.num_blocks) for b in range(product.num_blocks)]
            done = [0] * wire.group.size
            for sizes in self._sizes:
                self._sums.append(PendingSum(self._multiply_rows(done, sizes), wire, sizes, 0))
                done = [d + size for d, size in zip(done, sizes, strict=True)]

    def wait(self) -> Tensor:
        """The product's rows, on this rank or on all."""
        wire = self._target.wire
        if wire.group.size == 1:
            (whole,) = self._sums
            return whole  # type: ignore[return-value]
        pieces = [pending.wait() for pending in self._sums]  # type: ignore[union-attr]
        piece = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return piece if self._target.is_scattered else gather_pieces(piece, wire, self._target.sizes)

    def _block_sizes(self, block: int, num_blocks: int) -> list[int]:
        """How many rows of each rank's piece the block has."""
        return [size * (block + 1) // num_blocks - size * block // num_blocks for size in self._target.sizes]

    def _multiply_rows(self, done: list[int], sizes: list[int]) -> Tensor:
        """The product's next rows of every rank's piece."""
        if len(self._sizes) == 1:
            return self._operator.multiply(self._x)
        start, parts = 0, []
        for size, first, count in zip(self._target.sizes, done, sizes, strict=True):
            parts.append(self._operator.multiply(self._x, start + first, start + first + count))
            start += size
        return torch.cat(parts)


class _Multiply(LocalFunction):
    """The product; the derivative is the transposed one, to any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, product: TileProduct, pending: PendingProduct | None) -> Tensor:
        ctx.product = product
        return (PendingProduct(x, product) if pending is None else pending).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return multiply(grad, ctx.product.transposed), None, None


def multiply(x: Tensor, product: TileProduct, pending: PendingProduct | None = None) -> Tensor:
    """The product, differentiable by x, and by weights that learn (collective).

    Args:
        x: ``[m, F]``: this rank's piece of the source's rows, or all of them.
        product: the matrix.
        pending: the same product, where it has been started; not with weights that learn.

    Shapes:
        - output: ``[n, F]``: this rank's piece of the target's rows, or all of them
    """
    if product.operator.learns:
        return _multiply_edges(x, product)
    out: Tensor = _Multiply.apply(x, product, pending)  # type: ignore[no-untyped-call]
    return out


def _multiply_edges(x: Tensor, product: TileProduct) -> Tensor:
    """The product with weights that learn, in one block.

    Their derivative on a rank is a dot product of its columns for each of the tile's edges, a part of the whole: the
    sum over the column axis is made where the weights come from, by
    :func:`~pyg_dist.backend.grid.edge_values.scatter_edge_values`.
    """
    operator, source, target = product.operator, product.source, product.target
    assert operator.weight is not None
    assert operator.row_scale is None
    assert operator.col_scale is None
    scattered = source.is_scattered
    x = all_gather(x, source.wire, source.sizes) if scattered else copy_to_replicas(x, source.wire)
    out = edge_product(operator.weight, x, operator.csr)
    return (
        reduce_scatter(out, target.wire, target.sizes)
        if target.is_scattered
        else reduce_from_replicas(out, target.wire)
    )
