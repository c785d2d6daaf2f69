"""Selections of rows: by a mask, by a list of positions, all their elements; and several distributions joined."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_dist.backend import host
from pyg_dist.backend.on_device import copied_to
from pyg_dist.tensor.sharding import RowSharding, lasting


class Selection(NamedTuple):
    """A new distribution, and which local rows go into it: on the mask's device, or for a list on the host."""

    rows: RowSharding
    local_index: Tensor


@lasting
def rows_by_mask(rows: RowSharding, mask: Tensor) -> Selection:
    """The rows where ``mask``, bool ``[num_local]``, holds (collective where the rows count selections at once)."""
    picked = mask.nonzero().view(-1)
    return Selection(_picked(rows, picked.cpu()), picked)


@lasting
def rows_by_places(rows: RowSharding, places: Tensor, device: torch.device) -> Selection:
    """:func:`rows_by_mask`, given where the mask holds: ascending, on the host, for tensors on ``device``."""
    return Selection(_picked(rows, places), copied_to(places, device))


def _picked(rows: RowSharding, places: Tensor) -> RowSharding:
    """The rows at ``places``; ``rows`` itself, where a mask is known to pick all."""
    found = MaskedRows(rows, places)
    return rows if found.counts_selections and found.size == rows.size else found


@lasting
def rows_by_index(rows: RowSharding, index: Tensor) -> Selection:
    """The rows at the positions ``index`` (int64 ``[k]``, equal on every rank), repeats and any order allowed.

    Row k of the result lives where row ``index[k]`` lives. The latest selections are cached by value (collective,
    unless the same tensor object is used again, unchanged). Raises AgreementError where the ranks' lists differ.
    """
    version = None if index.is_inference() else index._version
    # Ranks skip the comparison only where this very object has been seen: equal values might be cached on one rank
    # and not on another. Values are compared as well, since NumPy can change them without a new version: only on
    # the host, where reading them does not synchronise with a device.
    known: tuple[int | None, Selection] | None = rows.known.compared.get(index)
    same = known[1] if known is not None and known[0] == version else None
    if same is not None and version is not None and not index.is_cpu:
        return same
    wanted = torch.where(index < 0, index + rows.size, index).cpu()
    if same is not None and _is_of(same, wanted):
        return same
    rows.require_equal(wanted, "list")
    equal = (s for s in rows.known.by_list if _is_of(s, wanted))
    selection = next(equal, None) or _select(rows, wanted)
    rows.known.compared[index] = (version, selection)
    return selection


def _is_of(selection: Selection, wanted: Tensor) -> bool:
    return isinstance(selection.rows, IndexedRows) and torch.equal(selection.rows._index, wanted)


def _select(rows: RowSharding, wanted: Tensor) -> Selection:
    """:func:`rows_by_index` of a list that is not among the latest."""
    outside = (wanted < 0) | (wanted >= rows.size)
    if outside.any():
        first = int(wanted[outside][0])
        raise IndexError(
            f"index {first - rows.size * (first < 0)} is out of bounds for {rows}: "
            f"expected {-rows.size} <= index < {rows.size}"
        )
    ordered, local = rows.ordered_position
    # Where this rank has no rows there is nothing to compare with.
    place = torch.searchsorted(ordered, wanted).clamp_(max=max(rows.num_local - 1, 0))
    mine = ordered[place] == wanted if rows.num_local else torch.zeros_like(outside)
    position = mine.nonzero().view(-1)
    selection = Selection(IndexedRows(rows, position, wanted), local[place[position]])
    rows.known.by_list.append(selection)
    return selection


def elements_of(rows: RowSharding, width: int) -> RowSharding:
    """A row for each of ``width`` elements of every row, those of one row one after another."""
    rows, num_parts = rows.undivided
    width *= num_parts
    if width == 1:
        return rows
    known = rows.known.elements.get(width)
    if known is None:
        known = rows.known.elements[width] = ElementRows(rows, width)
    return known


class _PartRows(RowSharding):
    """Some of the rows of others, or what these are made of."""

    _parent: RowSharding

    @property
    def derives_from_index(self) -> bool:
        return self._parent.derives_from_index

    @property
    def num_rng_keys(self) -> int:
        return self._parent.num_rng_keys

    @property
    def whole(self) -> RowSharding:
        return self._parent.whole


class MaskedRows(_PartRows):
    """Rows picked by a mask. Their positions cost a gather, which is made at the first use."""

    is_masked = True

    def __init__(self, parent: RowSharding, picked: Tensor) -> None:
        super().__init__(parent.group, parent.kind, None, parent.rng_key[picked])
        self._parent = parent
        self._picked = picked
        self.counts_selections = parent.counts_selections
        if self.counts_selections:
            self.size  # noqa: B018

    def __repr__(self) -> str:
        return f"{self.size} {self.kind}s" if "size" in vars(self) else f"{self.kind}s picked by a mask"

    @cached_property
    @lasting
    def position(self) -> Tensor:
        mine = self._parent.position[self._picked]
        everyone = self.group.gather_rows(mine, self.counts)
        return torch.searchsorted(everyone.sort().values, mine)

    @property
    def undivided(self) -> tuple[RowSharding, int]:
        """The rows, where the mask picks equally many elements of each: ``x[~diagonal].view(N, -1)`` works then."""
        rows, num_picked = self._of_each
        return (rows, num_picked) if num_picked else (self, 1)

    @cached_property
    def _of_each(self) -> tuple[RowSharding, int]:
        """The rows whose elements the mask picks, and how many of each, or 0 (collective at the first use)."""
        rows, width = self._parent.undivided
        if width == 1 or not self.size or self.size % rows.size:
            return rows, 0
        num_picked = self.size // rows.size
        row = host.arange(rows.num_local).repeat_interleave(num_picked)
        return rows, num_picked if self.group.all_true(torch.equal(self._picked // width, row)) else 0

    def _equals(self, other: RowSharding) -> bool:
        # All ranks reach each collective `all_true`, or none: the conditions before it are equal on all ranks.
        if self.size != other.size:
            return False
        if (
            isinstance(other, MaskedRows)
            and self._parent.is_equivalent(other._parent)
            and self.group.all_true(torch.equal(self._picked, other._picked))
        ):
            return True
        for one, another in ((self, other), (other, self)):
            rows, num_picked = one.undivided
            if one.is_masked and rows is not one:
                return elements_of(rows, num_picked).is_equivalent(another)
        return False


class ElementRows(_PartRows):
    """The elements of rows that have several."""

    def __init__(self, parent: RowSharding, width: int) -> None:
        super().__init__(parent.group, parent.kind, parent.size * width, parent.rng_key)
        del self.rng_key
        self.num_local = parent.num_local * width
        self._parent = parent
        self._width = width

    def __repr__(self) -> str:
        return f"{self.size} elements of {self._parent}"

    @cached_property
    @lasting
    def rng_key(self) -> Tensor:  # type: ignore[override]
        return _numbered(self._parent.rng_key, self._width)

    @property
    def undivided(self) -> tuple[RowSharding, int]:
        return self._parent, self._width

    @property
    def num_rng_keys(self) -> int:
        return self._parent.num_rng_keys * self._width

    @cached_property
    @lasting
    def position(self) -> Tensor:
        return _numbered(self._parent.position, self._width)

    @cached_property
    def counts(self) -> list[int]:
        return [count * self._width for count in self._parent.counts]

    @cached_property
    @lasting
    def _gathered_position(self) -> Tensor:
        return _numbered(self._parent._gathered_position, self._width)

    def _equals(self, other: RowSharding) -> bool:
        if not isinstance(other, ElementRows) or other._width != self._width:
            return False
        return self._parent.is_equivalent(other._parent)


def _numbered(row: Tensor, width: int) -> Tensor:
    return (row.view(-1, 1) * width + torch.arange(width, device=row.device)).view(-1)


class IndexedRows(RowSharding):
    """Rows picked by a list of positions, which is the same on every rank."""

    is_indexed = True

    def __init__(self, parent: RowSharding, position: Tensor, index: Tensor) -> None:
        super().__init__(parent.group, parent.kind, index.numel(), position)
        self._parent = parent
        self._index = index

    @property
    def whole(self) -> RowSharding:
        return self._parent.whole

    def _equals(self, other: RowSharding) -> bool:
        if not isinstance(other, IndexedRows) or not self._parent.is_equivalent(other._parent):
            return False
        return torch.equal(self._index, other._index)


class ConcatenatedRows(RowSharding):
    """The rows of several distributions over one axis, one after another (may be collective at the first use)."""

    is_indexed = True

    def __init__(self, parts: tuple[RowSharding, ...]) -> None:
        starts = [0, *accumulate(part.size for part in parts)]
        position = torch.cat([part.position + start for part, start in zip(parts, starts, strict=False)])
        super().__init__(parts[0].group, parts[0].kind, starts[-1], position)
        self.parts = parts

    def _equals(self, other: RowSharding) -> bool:
        if not isinstance(other, ConcatenatedRows) or len(self.parts) != len(other.parts):
            return False
        return all(mine.is_equivalent(its) for mine, its in zip(self.parts, other.parts, strict=True))
