"""Constant rows of which few elements are not zero, as bags of words: products with these elements alone.

Of cora's features 1.3 % are not zero, and a linear map of dense rows reads all. So the attributes of a graph, and the
sums over neighbours that are kept of them, are looked at once, at their first product; where at most an eighth of the
elements are not zero, these are kept beside the rows as a sparse matrix. Exact up to rounding: a product adds the same
terms, but for those that are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyg_dist.backend.sparse.csr import CSR
from pyg_dist.backend.sparse.matrix import Matrix

DENSEST = 1 / 8
"""Share of elements that are not zero up to which products are sparse. One thread, Zen 4, 4,000 x 1,024 times 7 to 256
columns, forward and backward: 0.02 to 0.24 of the dense product's time at a tenth, 0.1 to 0.9 at a fifth. Matrix,
transpose and places take at most 0.9 of float32 rows' memory."""

_FEWEST = 1 << 16
"""Elements below which a call costs more than what it saves."""

_SAMPLED_ROWS = 1024


class _NonZeros:
    """Where rows are not zero."""

    def __init__(self, rows: Tensor) -> None:
        row, column = rows.nonzero().unbind(1)
        self.pattern = CSR.from_edges(row, column, None, *rows.shape)
        self._place = row * rows.shape[1] + column  # among the elements of contiguous rows

    def of(self, rows: Tensor) -> Matrix:
        """The matrix of rows that are zero elsewhere."""
        return Matrix(self.pattern, rows.reshape(-1).index_select(0, self._place))


class SparseForm:
    """The non-zero elements of constant rows, where they are few, for one version of the rows."""

    def __init__(self, nonzeros: _NonZeros | None = None, version: int | None = None) -> None:
        self._nonzeros, self._version = nonzeros, version
        self._matrix: Matrix | None = None

    def matrix(self, x: Tensor, version: int | None) -> Matrix | None:
        """This rank's rows as a sparse matrix, made when first asked for; ``None`` where they are better dense.

        Not collective.

        ``version`` counts changes in place; ``None``: nobody does.
        """
        if version is None or x.dim() != 2 or not x.is_cpu or x.requires_grad or x.numel() < _FEWEST:
            return None
        if version != self._version:
            self._nonzeros, self._version, self._matrix = _few_nonzeros(x), version, None
        if self._matrix is None and self._nonzeros is not None:
            self._matrix = self._nonzeros.of(x)
        return self._matrix

    def of_masked(self, x: Tensor, version: int | None, masked: Tensor) -> SparseForm | None:
        """The form of ``masked``, which is zero wherever x is, as what dropout makes of it; see :meth:`matrix`."""
        return None if self.matrix(x, version) is None else SparseForm(self._nonzeros, masked._version)


def _few_nonzeros(x: Tensor) -> _NonZeros | None:
    if x.dtype not in (torch.float32, torch.float64):
        return None
    step = max(x.shape[0] // _SAMPLED_ROWS, 1)
    if any(int(rows.count_nonzero()) > DENSEST * rows.numel() for rows in (x[::step], x)):
        return None
    return _NonZeros(x)
