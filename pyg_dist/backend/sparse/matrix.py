"""One rank's sparse matrix with constant values, and its transpose."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from pyg_dist.backend.sparse.csr import CSR


@dataclass(frozen=True)
class Matrix:
    """A pattern with values.

    Attributes:
        pattern: where the entries are.
        storage: values by ``pattern.edge`` (negative numbers count from the end), or ``None`` for ones.
    """

    pattern: CSR
    storage: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.pattern.num_rows

    @property
    def num_cols(self) -> int:
        """Number of columns."""
        return self.pattern.num_cols

    @cached_property
    def value(self) -> Tensor | None:
        """Values in the order of the entries, ``[num_entries]``, or ``None`` for ones."""
        return None if self.storage is None else self.pattern.values(self.storage)

    @cached_property
    def transposed(self) -> Matrix:
        """The transpose; matrices of one pattern share the transposed pattern."""
        if self.storage is None:
            return Matrix(self.pattern.transposed_pattern)
        return Matrix(self.pattern.transposed, self.storage)

    def columns(self, low: int, high: int) -> Matrix:
        """The columns from ``low`` to ``high``, exclusive. Kept: a product cuts its matrix alike every time."""
        if (low, high) not in self._pieces:
            self._pieces[low, high] = Matrix(self.pattern.columns(low, high), self.storage)
        return self._pieces[low, high]

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], Matrix]:
        return {}

    def multiply(
        self,
        x: Tensor,
        row_scale: Tensor | None = None,
        col_scale: Tensor | None = None,
        divide: bool = False,
        out: Tensor | None = None,
        accumulate: bool = True,
        tries: bool = False,
    ) -> Tensor:
        """``diag(row_scale) self diag(col_scale) x``, added to ``out`` if given, or written there.

        With ``divide``: by the scales' inverses. ``tries``: see :meth:`~pyg_dist.backend.sparse.csr.CSR.multiply`.

        Shapes: ``[num_cols, F] -> [num_rows, F]``.
        """
        return self.pattern.multiply(
            x,
            self.value,
            row_scale=row_scale,
            col_scale=col_scale,
            divide=divide,
            out=out,
            accumulate=accumulate,
            tries=tries,
        )
