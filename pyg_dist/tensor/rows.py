"""Which rows of a global tensor this rank holds, and how selections of rows follow from it."""

from __future__ import annotations

import weakref
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from pyg_dist.backend import adjoint
from pyg_dist.backend.axis import Axis
from pyg_dist.errors import DataError, LayoutMismatchError

Kind = Literal["node", "edge"]


class Rows:
    """A distribution of ``size`` rows over the ranks of an axis: every row lives on one rank.

    Attributes:
        axis: the ranks.
        kind: what the rows are, for messages.
        size: number of rows over all ranks.
        num_local: rows on this rank.
        key: int64 ``[num_local]``: what dropout and random tensors are keyed by. The same for a row on every world
            size and partition: the global id, or the position in a list of ids.
    """

    def __init__(self, axis: Axis, kind: Kind, size: int, key: Tensor) -> None:
        self.axis = axis
        self.kind: Kind = kind
        self.size = size
        self.num_local = key.numel()
        self.key = key
        self._selections: dict[int, tuple[weakref.ref[Tensor], int, Selection]] = {}

    def __deepcopy__(self, memo: object) -> Rows:
        return self  # immutable

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind}s: {self.num_local} of {self.size})"

    @property
    def position(self) -> Tensor:
        """Where each local row stands in the global order, int64 ``[num_local]`` (may be collective)."""
        return self.key

    @cached_property
    def counts(self) -> list[int]:
        """Rows by rank (collective at the first use)."""
        return self.axis.gather_counts(self.num_local)

    @cached_property
    def gathered_position(self) -> Tensor:
        """``position`` of every rank's rows, ranks one after another (collective at the first use)."""
        return self.axis.gather_rows(self.position, self.counts)

    @cached_property
    def _by_position(self) -> tuple[Tensor, Tensor]:
        ordered, local = torch.sort(self.position)
        return ordered, local

    def gather(self, local: Tensor) -> Tensor:
        """All rows, in the global order, on every rank; differentiable (collective)."""
        return adjoint.gather(local, self.axis, self.counts, self.gathered_position, self.position)

    def slice(self, full: Tensor) -> Tensor:
        """This rank's rows of a replicated tensor with ``size`` rows; differentiable."""
        return adjoint.enter(full, self.axis).index_select(0, self.position)

    def enter(self, tensor: Tensor) -> Tensor:
        """A replicated tensor that is about to meet these rows (see :func:`pyg_dist.backend.adjoint.enter`)."""
        return adjoint.enter(tensor, self.axis)

    def leave(self, tensor: Tensor) -> Tensor:
        """The sum of each rank's ``tensor`` (see :func:`pyg_dist.backend.adjoint.leave`; collective)."""
        return adjoint.leave(tensor, self.axis)

    def by_mask(self, mask: Tensor) -> Selection:
        """The rows where ``mask`` (bool ``[num_local]``, this rank's piece) holds (collective: counts them)."""
        picked = mask.nonzero().view(-1)
        return Selection(_Subset(self, picked), picked)

    def by_index(self, index: Tensor) -> Selection:
        """The rows at the positions ``index`` (int64 ``[k]``, equal on every rank), repeats and any order allowed.

        Row k of the result lives where row ``index[k]`` lives. Not collective, apart from positions that are not
        known yet.
        """
        known = self._selections.get(id(index))
        if known is not None and known[0]() is index and known[1] == index._version:
            return known[2]
        index_of_rows = torch.where(index < 0, index + self.size, index)
        if index.numel() and not 0 <= int(index_of_rows.min()) <= int(index_of_rows.max()) < self.size:
            wrong = index[(index_of_rows < 0) | (index_of_rows >= self.size)][0]
            raise IndexError(
                f"index {int(wrong)} is out of bounds for {self.size} {self.kind}s: "
                f"expected {-self.size} <= index < {self.size}"
            )
        ordered, local = self._by_position
        place = torch.searchsorted(ordered, index_of_rows)
        place.clamp_(max=max(self.num_local - 1, 0))
        found = ordered[place] == index_of_rows if self.num_local else torch.zeros_like(index, dtype=torch.bool)
        position = found.nonzero().view(-1)
        selection = Selection(_Listed(self, position, index), local[place[position]])
        if len(self._selections) >= 16:  # a script has a few splits; fresh index tensors every step must not pile up
            self._selections.clear()
        self._selections[id(index)] = (weakref.ref(index), index._version, selection)
        return selection

    def require_like(self, other: Rows, function: str) -> None:
        """Raise unless ``other`` distributes the same rows in the same way (collective for two selections)."""
        if self is other or self._same_as(other):
            return
        raise LayoutMismatchError(
            f"{function} expected operands with the same rows (got {self.size} {self.kind}s and {other.size} "
            f"{other.kind}s of another graph or selection): select both alike, or use .full_tensor()"
        )

    def _same_as(self, other: Rows) -> bool:
        return False


class _Subset(Rows):
    """Rows picked by a mask. Their positions, rarely needed, cost a gather and wait until then."""

    def __init__(self, parent: Rows, picked: Tensor) -> None:
        size = parent.axis.gather_counts(picked.numel())
        super().__init__(parent.axis, parent.kind, sum(size), parent.key[picked])
        self.counts = size
        self._parent = parent
        self._picked = picked

    @property
    def position(self) -> Tensor:
        return self._position

    @cached_property
    def _position(self) -> Tensor:
        mine = self._parent.position[self._picked]
        everyone = self.axis.gather_rows(mine, self.counts)
        return torch.searchsorted(everyone.sort().values, mine)

    def _same_as(self, other: Rows) -> bool:
        # Every rank gets here together: which Rows objects meet does not depend on the rank.
        if not isinstance(other, _Subset) or self._parent is not other._parent or self.size != other.size:
            return False
        return self.axis.every(torch.equal(self._picked, other._picked))


class _Listed(Rows):
    """Rows picked by a list of positions, which is the same on every rank."""

    def __init__(self, parent: Rows, position: Tensor, index: Tensor) -> None:
        super().__init__(parent.axis, parent.kind, index.numel(), position)
        self._parent = parent
        self._index = index.clone()

    def _same_as(self, other: Rows) -> bool:
        return isinstance(other, _Listed) and self._parent is other._parent and torch.equal(self._index, other._index)


class Selection:
    """The result of selecting: the new distribution, and which local rows go into it."""

    __slots__ = ("local_index", "rows")

    def __init__(self, rows: Rows, local_index: Tensor) -> None:
        self.rows = rows
        self.local_index = local_index


def local_mask(mask: Tensor, rows: Rows) -> Tensor:
    """This rank's piece of a replicated boolean mask over ``rows``."""
    if mask.shape[0] != rows.size:
        raise DataError(
            f"Expected a mask over {rows.size} {rows.kind}s (got {mask.shape[0]} entries): "
            f"use a mask of this graph, or .to_local() rows with a local mask"
        )
    return mask.index_select(0, rows.position.to(mask.device))
