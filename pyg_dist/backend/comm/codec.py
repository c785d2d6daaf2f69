"""Codecs: how rows become messages and back, the one place between products and traffic.

A codec writes the rows of a product straight into the buffer that is sent, and adds what another rank's codec wrote
straight to the output. A row takes the same number of bytes wherever it goes, so a buffer is a matrix of bytes, one row
per slot, of which each neighbour gets a range of rows as *one* message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyg_dist.backend.sparse.matrix import Matrix


class Codec(Protocol):
    """How rows travel. Nothing here is collective, and every rank has the same codec.

    Legend: R slots, F features, B bytes of a row (:meth:`row_bytes`). A message may hold the slots of all neighbours or
    of one.
    """

    def row_bytes(self, num_features: int, dtype: torch.dtype) -> int:
        """Bytes of one row, parameters included, of ``num_features`` values of ``dtype``."""
        ...

    def pack(self, message: Tensor, matrix: Matrix, x: Tensor, col_scale: Tensor | None = None) -> None:
        """Write the rows of ``matrix diag(col_scale) x``: sums are in full precision, and rounded once if at all.

        Shapes:
            - message: uint8 ``[R, B]``, contiguous, overwritten
            - matrix: ``[R, M]``; a row with one entry of value one is a row as it is, another one a partial sum
            - x: ``[M, F]``
            - col_scale: ``[M]``
        """
        ...

    def unpack_add(self, message: Tensor, matrix: Matrix, out: Tensor, row_scale: Tensor | None = None) -> None:
        """Add ``diag(row_scale) matrix`` times the rows of the message to ``out``.

        Shapes:
            - message: uint8 ``[R, B]``, contiguous
            - matrix: ``[N, R]``
            - out: ``[N, F]``, the last rows of a larger tensor
            - row_scale: ``[N]``
        """
        ...


@dataclass(frozen=True)
class Exact:
    """Rows travel as they are, in the dtype of x."""

    def row_bytes(self, num_features: int, dtype: torch.dtype) -> int:
        """See :class:`Codec`."""
        return num_features * dtype.itemsize

    def pack(self, message: Tensor, matrix: Matrix, x: Tensor, col_scale: Tensor | None = None) -> None:
        """See :class:`Codec`."""
        if x.shape[1]:  # a tensor without columns cannot be viewed in another dtype
            matrix.multiply(x, col_scale=col_scale, out=message.view(x.dtype), accumulate=False)

    def unpack_add(self, message: Tensor, matrix: Matrix, out: Tensor, row_scale: Tensor | None = None) -> None:
        """See :class:`Codec`."""
        if out.shape[1]:
            matrix.multiply(message.view(out.dtype), row_scale=row_scale, out=out)


EXACT = Exact()
