"""A sparse matrix in tiles times dense tiles: the product on one rank, the sums over ranks, and the derivative."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pyg_dist.backend.autograd.linear_map import apply
from pyg_dist.backend.comm.transport import Pending, Transport
from pyg_dist.backend.sparse.matrix import Matrix, edge_product
from pyg_dist.backend.timing import phase
from pyg_dist.graph.gcn_norm import LearnedScales
from pyg_dist.graph.protocol import Norm
from pyg_dist.grid.collectives import (
    AllGather,
    ReduceScatter,
    all_gather,
    copy_to_replicas,
    reduce_from_replicas,
    reduce_scatter,
)
from pyg_dist.grid.plan.mesh_shape import TileLayout


@dataclass(frozen=True)
class GridOperator:
    """A sparse matrix ``diag(r) W diag(c)`` on one rank, and its transpose; without scales where W learns."""

    matrix: Matrix  # where its values require grad, they learn
    row_scale: Tensor | None = None
    col_scale: Tensor | None = None
    divides: bool = False  # r and c stand for their inverses

    @property
    def learns(self) -> bool:
        return self.matrix.storage is not None and self.matrix.storage.requires_grad

    @cached_property
    def transposed(self) -> GridOperator:
        return GridOperator(self.matrix.transposed, self.col_scale, self.row_scale, self.divides)

    def multiply(self, x: Tensor, low: int = 0, high: int | None = None) -> Tensor:
        """Rows ``low`` to ``high`` of the product, local, without autograd. Shapes: ``[m, F] -> [high - low, F]``."""
        rows = self.matrix.rows(low, self.matrix.num_rows if high is None else high)
        scale = None if self.row_scale is None else self.row_scale[low:high]
        with phase("aggregate"):
            tries = rows is self.matrix
            return rows.multiply(x, tries, row_scale=scale, col_scale=self.col_scale, divide=self.divides)


@dataclass(frozen=True)
class Side:
    """How the rows of a product, or of its right factor, are distributed over an axis."""

    transport: Transport
    sizes: tuple[int, ...]  # rows by rank
    is_scattered: bool  # whether each rank has its piece, or all rows


@dataclass(frozen=True)
class TileProduct:
    """A matrix in tiles over two axes, times a matrix whose rows are split by one of them (Plexus, Alg. 1, lines 2-4).

    Rows are gathered along the axis of ``source``, each rank multiplies by its tile, and the products are summed along
    the axis of ``target``, scattered or to all ranks. The derivative is the same with the sides swapped. Sums of a row
    block are under way while the next of ``num_blocks`` is multiplied (Plexus, 5.2).
    """

    operator: GridOperator
    source: Side
    target: Side
    num_blocks: int

    @property
    def transposed(self) -> TileProduct:
        """The derivative."""
        return TileProduct(self.operator.transposed, self.target, self.source, self.num_blocks)

    @torch.no_grad()
    def start(self, x: Tensor) -> Pending[Tensor]:
        """Multiply this rank's piece of x, and send the products to be summed (collective, no autograd)."""
        x, source, target = x.detach(), self.source, self.target
        if source.is_scattered:
            x = AllGather(source.transport, source.sizes).start(x).wait()
        x = x.contiguous()
        if target.transport.group.size == 1:
            whole = self.operator.multiply(x)
            return Pending(lambda: whole)
        sums = []
        for block in range(self.num_blocks):  # some rows of each rank's piece
            done, end = ([size * k // self.num_blocks for size in target.sizes] for k in (block, block + 1))
            sizes = [high - low for low, high in zip(done, end, strict=True)]
            part = self._multiply_rows(x, done, sizes)
            sums.append(ReduceScatter(target.transport, sizes).start(part))

        def finish() -> Tensor:
            pieces = [pending.wait() for pending in sums]
            piece = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            return piece if target.is_scattered else AllGather(target.transport, target.sizes).start(piece).wait()

        return Pending(finish)

    def _multiply_rows(self, x: Tensor, done: list[int], sizes: list[int]) -> Tensor:
        """``sizes`` rows of the product from row ``done`` on, of every rank's piece."""
        if self.num_blocks == 1:
            return self.operator.multiply(x)
        start, parts = 0, []
        for size, first, count in zip(self.target.sizes, done, sizes, strict=True):
            parts.append(self.operator.multiply(x, start + first, start + first + count))
            start += size
        return torch.cat(parts)


def multiply(x: Tensor, product: TileProduct, pending: Pending[Tensor] | None = None) -> Tensor:
    """The product, differentiable by x, and by weights that learn (collective); see :meth:`TileProduct.start`.

    ``pending`` is ``product.start(x)``, where it has been started; not with weights that learn.
    """
    return _multiply_edges(x, product) if product.operator.learns else apply(product, x, pending)


def _multiply_edges(x: Tensor, product: TileProduct) -> Tensor:
    """The product with weights that learn, in one block.

    The weights' derivative on a rank is a part, dot products over its columns, which is summed on the ranks that store
    the weights (:meth:`~pyg_dist.backend.comm.redistribution.Redistribution.of_copies`).
    """
    operator, source, target = product.operator, product.source, product.target
    assert operator.matrix.storage is not None
    assert operator.row_scale is None
    assert operator.col_scale is None
    x = all_gather(x, source.transport, source.sizes) if source.is_scattered else copy_to_replicas(x, source.transport)
    out = edge_product(operator.matrix.storage, x, operator.matrix.pattern)
    if target.is_scattered:
        return reduce_scatter(out, target.transport, target.sizes)
    return reduce_from_replicas(out, target.transport)


@dataclass(eq=False, frozen=True)
class TiledOperator:
    """A distributed matrix: ``tile`` gives this rank's tile for a layout of x (collective when built).

    A GCN norm of weights that learn is a product of products (:func:`~pyg_dist.graph.gcn_norm.gcn_product`): the tiles
    then are those of ``A_w``, loops included, and ``scales`` are the norm's.
    """

    norm: Norm
    learns: bool
    tile: Callable[[TileLayout], GridOperator]
    scales: LearnedScales = field(default_factory=LearnedScales)
