"""A sparse matrix's pattern in compressed rows, its transpose, and blocks of targets with all their in-edges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import Unpack

from pyg_dist.backend import ops
from pyg_dist.backend.host import in_few_bits, integers_to
from pyg_dist.backend.on_device import on_device, part_of, to_host
from pyg_dist.backend.ops.memory import trim_after
from pyg_dist.backend.session.settings import SPMM_FORM
from pyg_dist.backend.session.state import current
from pyg_dist.backend.sparse.form_trial import FormTrial
from pyg_dist.errors import DataError, OptionError

Place = Literal["source", "neighbour", "target", "edge", "all"]
"""The rows of an input: local sources of edges; these, then halo slots; local targets; edges. "all" has no rows, and is
the same for all edges."""


class Block(NamedTuple):
    """All in-edges of some targets, those of one target together, targets ascending."""

    low: int  # the first target
    high: int  # the last one, exclusive
    source: Tensor  # of each edge: local row, or halo slot behind these, int64 ``[e]``
    target: Tensor  # of each edge, less ``low``, int64 ``[e]``
    place: Tensor  # position of each edge's value in the edge storage, int64 ``[e]``


Run = Callable[[Block, list[Tensor]], Tensor]
"""Makes the targets' outputs ``[high - low, ...]`` of a block and of its piece of each input."""


@dataclass(frozen=True)
class CSR:
    """Pattern of a ``[num_rows, num_cols]`` sparse matrix.

    On another device than the host (:meth:`to`), patterns that are made of it are made on the host, and moved; but for
    :meth:`restricted`, and :meth:`rows`, which share its memory.
    """

    rowptr: Tensor  # int64 ``[num_rows + 1]``
    col: Tensor  # in ``[0, num_cols)``, int32 ``[num_entries]``
    # position of each value in the caller's edge storage, int32 or int64 ``[num_entries]``, on the host; None: values
    # lie in the order of the entries, from ``first`` on
    place: Tensor | None
    num_cols: int  # number of columns
    is_identity: bool = False  # whether it was made as one
    host: CSR | None = field(default=None, repr=False, compare=False)  # the same on the host; None: this is it
    first: int = 0  # position of the first value, if ``place`` is None

    def __post_init__(self) -> None:
        """Check the columns, once: the native ops that take a pattern do not.

        Raises:
            DataError: One is outside of the matrix.
        """
        if self.host is None and not self.is_identity and self.col.is_cpu and self.num_entries:
            least, most = self.col.aminmax()
            if least < 0 or most >= self.num_cols:
                raise DataError(
                    f"Expected columns from 0 to {self.num_cols - 1} in a pattern (got {int(least)} to {int(most)}): "
                    f"write the store again, or report a defect"
                )

    @property
    def device(self) -> torch.device:
        """The pattern's device."""
        return self.col.device

    @property
    def on_host(self) -> CSR:
        """The same on the host."""
        return self if self.host is None else self.host

    @property
    def edge(self) -> Tensor:
        """Position of each entry's value in the caller's edge storage, int32 or int64 ``[num_entries]``."""
        return self._entries() if self.place is None else on_device(self.place, self.device)

    def values(self, storage: Tensor) -> Tensor:
        """Each entry's value, ``[num_entries]``; of storage in the order of the entries a view."""
        if self.place is None:
            return storage[self.first : self.first + self.num_entries]
        place = on_device(self.place, storage.device)
        # An eighth of the time of storage[place], which alone takes negative ones.
        return storage[place] if self._counts_from_end else storage.index_select(0, place)

    @cached_property
    def _counts_from_end(self) -> bool:
        """Whether some values lie at negative places."""
        place = self.on_host.place
        return place is not None and place.numel() > 0 and bool(place.min() < 0)

    def places(self, entry: Tensor) -> Tensor:
        """Where the values of some entries lie in the caller's edge storage, integers like ``entry``."""
        if self.place is None:
            return entry + self.first if self.first else entry
        return on_device(self.place, entry.device)[entry]

    def placed(self, number: Callable[[Tensor], Tensor]) -> CSR:
        """The same pattern, and its transpose, whose values lie elsewhere: ``number`` makes new places of old ones."""
        host = self.on_host
        if host.num_entries == 0:
            return self
        turned = host.transposed
        placed, placed_turned = (replace(csr, place=in_few_bits(number(csr.edge)), first=0) for csr in (host, turned))
        placed.__dict__["transposed"] = placed_turned
        return placed if self.host is None else placed.to(self.device)

    def _entries(self) -> Tensor:
        last = self.first + self.num_entries
        return torch.arange(self.first, last, dtype=integers_to(last), device=self.col.device)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.rowptr.numel() - 1

    @property
    def num_entries(self) -> int:
        """Number of stored entries."""
        return self.col.numel()

    @staticmethod
    def from_edges(row: Tensor, col: Tensor, edge: Tensor | None, num_rows: int, num_cols: int) -> CSR:
        """Group entries by row, where they lie; entries of one row keep their given order.

        ``edge`` is the position of each entry's value; None: values are in the order of the entries given. Raises
        DataError where an entry is outside of the matrix, OptionError for more rows or columns than 32 bits can number.
        """
        if integers_to(max(num_rows, num_cols)) != torch.int32:
            raise OptionError(
                f"Expected fewer than 2^31 rows and columns on one rank (got {num_rows}, {num_cols}): use more ranks"
            )
        place = None if edge is None else in_few_bits(edge.cpu())
        csr = CSR(*ops.csr_from_edges(row.cpu(), col.cpu(), place, num_rows, num_cols), num_cols)
        return csr if row.is_cpu else csr.to(row.device)

    @staticmethod
    def identity(size: int, device: torch.device) -> CSR:
        """One entry in every row, on the diagonal."""
        place = torch.arange(size + 1, device=device)
        return CSR(place, place[:-1].to(torch.int32), None, size, is_identity=True)

    def row(self, dtype: torch.dtype = torch.int64) -> Tensor:
        """The row of each entry, ``[num_entries]``."""
        rows = torch.arange(self.num_rows, dtype=dtype, device=self.rowptr.device)
        return torch.repeat_interleave(rows, self.rowptr.diff(), output_size=self.num_entries)

    @cached_property
    def transposed(self) -> CSR:
        """The pattern of the transposed matrix; ``edge`` still names the same values. Computed once and kept.

        Of an undirected graph whose rows have their columns in ascending order, as those of a coalesced graph on one
        rank, it shares ``rowptr`` and ``col``. Others do not share them: sums would be added in another order.
        """
        if self.is_identity:
            return self
        if self.host is not None:
            turned = self.host.transposed
            if turned.rowptr is self.host.rowptr:
                return replace(self, place=turned.place, num_cols=turned.num_cols, host=turned, first=turned.first)
            return turned.to(self.device)
        rowptr, col, entry = ops.transpose_csr(self.rowptr, self.col, self.num_cols)
        for known in (self, self.__dict__.get("_transposed_alone")):
            if known is not None and torch.equal(rowptr, known.rowptr) and torch.equal(col, known.col):
                rowptr, col = known.rowptr, known.col
                break
        place = in_few_bits(self.places(entry))
        del entry
        trim_after(self.num_entries, each_step=True)
        return CSR(rowptr, col, place, self.num_rows)

    @property
    def transposed_pattern(self) -> CSR:
        """:attr:`transposed` for products without values, where ``edge`` has no meaning. Kept.

        Where the two share ``rowptr`` and ``col`` this is the pattern itself, which is found out without making
        another. Otherwise no places of values are kept, which saves as much memory.
        """
        if "transposed" in self.__dict__ or self.is_identity:
            return self.transposed
        return self if self._equals_transpose else self._transposed_alone

    @cached_property
    def _equals_transpose(self) -> bool:
        if self.host is not None:
            return self.host._equals_transpose
        return self.num_rows == self.num_cols and ops.equals_transpose_csr(self.rowptr, self.col)

    @cached_property
    def _transposed_alone(self) -> CSR:
        if self.host is not None:
            return self.host.transposed_pattern.to(self.device)
        rowptr, col = ops.transpose_csr(self.rowptr, self.col, self.num_cols)[:2]
        trim_after(self.num_entries, each_step=True)
        return CSR(rowptr, col, None, self.num_rows)

    def multiply(
        self, x: Tensor, values: Tensor | None = None, tries: bool = False, **options: Unpack[ops.SpmmOptions]
    ) -> Tensor:
        """:func:`~pyg_dist.backend.ops.spmm_csr` of this pattern, in the form that is the fastest here.

        ``values`` are of the entries in their order. ``tries``: whether this product may be one by which forms are
        compared: not while a message is waited for. Shapes: ``[num_cols, F] -> [num_rows, F]``.
        """
        trial = self._trial(x)

        def product(way: ops.SpmmWay | None) -> Tensor:
            return ops.spmm_csr(self.rowptr, self.col, x, values, form=way, **options)

        if trial is None or trial.is_over or not tries:
            return product(None if trial is None else trial.best)
        return trial.run(product, self.num_entries)

    def form(self, x: Tensor) -> ops.SpmmWay | None:
        """The way of a product with x, as far as is known; None: there is only one."""
        trial = self._trial(x)
        return None if trial is None else trial.best

    def choose_form(self, x: Tensor) -> None:
        """Multiply in all ways until it is known which is the fastest: before messages fly, not while they do."""
        trial = self._trial(x)
        while trial is not None and not trial.is_over:
            self.multiply(x, tries=True)

    def _trial(self, x: Tensor) -> FormTrial | None:
        width = x.shape[1] if x.dim() == 2 else x[:1].numel()
        key = width, x.dtype
        if key not in self._trials:
            self._trials[key] = self._new_trial(x)
        return self._trials[key]

    def _new_trial(self, x: Tensor) -> FormTrial | None:
        row_bytes = x[:1].numel() * x.element_size()
        if not x.is_cpu or min(self.num_cols, self.num_entries) * row_bytes < _WORTH_A_TRIAL:
            return None
        guess, fixed = ops.guessed_form(self.rowptr, self.col, x), SPMM_FORM.value()
        if fixed is not None:
            return None if guess is None else FormTrial([fixed], is_fixed=True)
        sizes = self.num_rows, self.num_cols, self.num_entries
        product = f"{sizes[0]} x {sizes[1]}, {sizes[2]} entries, by {x[0].numel()} columns of {x.dtype}, guess {guess}"
        key = *(size.bit_length() for size in sizes), row_bytes, x.dtype, guess
        tried = current().of(_TrialsBySize).setdefault(key, [])
        if len(tried) < _MOST_TRIALS:
            others: dict[object, ops.SpmmForm] = {"plain": "blocks", "blocks": "plain"}
            tried.append(FormTrial([guess] if guess is None else [guess, others[guess]], product=product))
        return tried[-1]

    @cached_property
    def _trials(self) -> dict[tuple[int, torch.dtype], FormTrial | None]:
        return {}

    def rows(self, low: int, high: int) -> CSR:
        """The pattern of the rows from ``low`` to ``high``, exclusive, in the same memory; of all rows itself."""
        if (low, high) == (0, self.num_rows):
            return self
        host = self.on_host
        if self.place is not None:
            on_device(self.place, self.device)  # before it is parted
        first, last = int(host.rowptr[low]), int(host.rowptr[high])
        return replace(
            self,
            rowptr=self.rowptr[low : high + 1] - first,
            col=self.col[first:last],
            place=None if self.place is None else part_of(self.place, first, last),
            is_identity=False,
            host=None if self.host is None else host.rows(low, high),
            first=self.first + first if self.place is None else 0,
        )

    def split(self, row: int) -> tuple[CSR, CSR]:
        """The patterns of the rows before ``row``, and of the others. Kept."""
        if row not in self._split:
            self._split[row] = self.rows(0, row), self.rows(row, self.num_rows)
        return self._split[row]

    @cached_property
    def _split(self) -> dict[int, tuple[CSR, CSR]]:
        return {}

    def columns(self, low: int, high: int) -> CSR:
        """The pattern of the columns from ``low`` to ``high``, exclusive."""
        if self.host is not None:
            return self.host.columns(low, high).to(self.device)
        chosen = (self.col >= low) & (self.col < high)
        before = torch.zeros(self.num_entries + 1, dtype=torch.int64, device="cpu")
        torch.cumsum(chosen, 0, out=before[1:])
        return CSR(before[self.rowptr], self.col[chosen] - low, self.edge[chosen], high - low)

    def restricted(self, row: Tensor, column: Tensor) -> tuple[CSR, Tensor]:
        """Some rows (in any order) and columns (ascending), with the transpose, and which entries these are.

        It is cut on the pattern's device, which is waited for: how many entries there are is known there alone. Values
        lie in the order of the entries, whose numbers, int64, are on the host. O(entries of the rows + num_cols / 64)
        time.
        """
        row, column = (on_device(x, self.device) for x in (row, column))
        cut = ops.restrict_csr(self.rowptr, self.col, row, column, self.num_cols)
        rowptr, col, entry, turned_rowptr, turned_col, turned_entry = map(to_host, cut)
        restricted = CSR(rowptr, col, None, column.numel())
        restricted.__dict__["transposed"] = CSR(turned_rowptr, turned_col, turned_entry, row.numel())
        return restricted.to(self.device), entry

    def to(self, device: torch.device | str) -> CSR:
        """The same pattern on ``device``."""
        host = self.on_host
        if torch.device(device).type == "cpu":
            return host
        there = torch.device(device)
        return replace(host, rowptr=on_device(host.rowptr, there), col=on_device(host.col, there), host=host)


_WORTH_A_TRIAL = 8 << 20
"""Bytes of x, and of what a product reads of it; ``kMinSourceBytes`` of ``csrc/ops/cpu/spmm_csr.cpp``."""

_MOST_TRIALS = 4
"""Of patterns of like size: a graph has four, with loops and without, and their transposes."""


class _TrialsBySize(dict[object, list[FormTrial]]):
    """By sizes in powers of two. Further patterns share the last trial: those of a batch, or of edges that a step
    draws, serve a few products only.
    """


def timed_forms() -> list[str]:
    """The forms of products that this run has timed, a line each with its times. Not collective."""
    return [str(trial) for trials in current().of(_TrialsBySize).values() for trial in trials if trial.is_over]
